"""What a source hands to `prepare`, and how CSV files are read strictly."""

import csv
import gzip
import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from turbogr.data.engine import Engine
from turbogr.errors import DataError, did_you_mean

REFUSED_LINES = 2_000_000
"""Fewer lines than this that are no rows are set aside; DuckDB keeps each in about a kilobyte of memory."""

FILE = "file of the row"
"""The column that relations of several files have beside the files' own."""


@dataclass(frozen=True)
class Value:
    """What every row must hold in one column."""

    column: str
    sql: str
    """NULL where a row holds nothing usable there."""
    wanted: str
    """What an error says that it must be."""


@dataclass(frozen=True)
class CsvRows:
    """CSV files, every field as text: DuckDB's typed columns would round what must be refused (1.5, 1e3, 007)."""

    paths: Sequence[Path]
    columns: Sequence[str]
    delimiter: str = ","
    header: bool = True
    quote: str = '"'
    place: str = "line"

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(map(str, self.paths))

    @property
    def first(self) -> int:
        return 2 if self.header else 1

    @property
    def strict(self) -> str:
        """Stops at the first line that is no row."""
        return self.relation("ignore_errors = false")

    @property
    def refused_limit(self) -> int:
        """Of one file: DuckDB notes no more faults of its lines, and says nothing."""
        return max(REFUSED_LINES // len(self.paths), 1)

    @property
    def careful(self) -> str:
        """Lines that are no rows go to DuckDB's reject table.

        Without `parallel = false` DuckDB 2.0 ends a file, rejects and rows behind them too, where a thread's whole
        part of it (8 MB) holds no row.
        """
        return self.relation(f"parallel = false, store_rejects = true, rejects_limit = {self.refused_limit}")

    def relation(self, faults: str) -> str:
        columns = ", ".join(f"{text(n)}: 'VARCHAR'" for n in self.columns)
        return (
            f"read_csv({texts(self.files)}, columns = {{{columns}}}, auto_detect = false, header = {self.header}, "
            f"delim = {text(self.delimiter)}, quote = {text(self.quote)}, escape = {text(self.quote)}, "
            f"force_not_null = {texts(self.columns)}, filename = {text(FILE)}, {faults})"
        )


@dataclass(frozen=True)
class TypedRows:
    """Parquet and Arrow files, or a frame: what their reader accepts are rows."""

    strict: str
    """A relation with the column FILE."""
    columns: Sequence[str]
    files: tuple[str, ...]
    first: int
    delimiter: str = ","
    place: str = "row"

    @property
    def careful(self) -> str:
        return self.strict


@dataclass(frozen=True, kw_only=True)
class Log:
    """How a raw log's rows are read, in file order. SQL is over the columns of `rows`."""

    rows: CsvRows | TypedRows
    """`first` is the number of a file's first row as an error names it, `place` what that number counts."""
    user: Value
    item: Value
    time: Value
    time_units_per_second: int
    actions: dict[str, Value] = field(default_factory=dict)
    """Name -> whether an event has it; bit a of an event is the a-th."""
    rating: Value | None = None
    time_unit: str = ""
    """The unit that the user named, where times are numbers."""
    title: str = ""
    """SQL of an item's title as it stands in the log (the first one counts)."""
    users: str = ""
    """A relation of user features with a column raw_id; at most one row per user."""
    items: str = ""
    """A relation of item features with a column raw_id; at most one row per item."""
    whole_catalogue: bool = False
    """Items of `items` without any event belong to the catalogue too."""

    @property
    def values(self) -> list[Value]:
        rating = [self.rating] if self.rating else []
        return [self.user, self.item, self.time, *self.actions.values(), *rating]


class Source(Protocol):
    """A raw log somewhere."""

    @property
    def name(self) -> str:
        """Stands in the manifest."""

    def open(self, engine: Engine) -> Log:
        """Look at the files (unpack them to `engine.scratch` if need be) and say how to read them."""


def text(value: str) -> str:
    """A SQL string."""
    return "'" + value.replace("'", "''") + "'"


def name(value: str) -> str:
    """A SQL identifier."""
    return '"' + value.replace('"', '""') + '"'


def whole(column: str) -> str:
    """SQL: the int64 that a text column spells, else NULL.

    A cast alone would round 2.5 to another id and merge 07 with 7, as the CSV reader's own integers do.
    """
    number = f"TRY_CAST({name(column)} AS BIGINT)"
    return f"CASE WHEN CAST({number} AS VARCHAR) = {name(column)} THEN {number} END"


def integer(column: str) -> Value:
    """Of a text column, as the following are."""
    return Value(column, whole(column), "a plain integer of 64 bits")


def number(column: str) -> Value:
    return Value(column, f"TRY_CAST({name(column)} AS DOUBLE)", "a number")


def flag(column: str) -> Value:
    return Value(column, f"CASE {name(column)} WHEN '1' THEN true WHEN '0' THEN false END", "0 or 1")


def string(column: str) -> Value:
    return Value(column, f"nullif({name(column)}, '')", "a text")


def texts(values: Iterable[str]) -> str:
    return "[" + ", ".join(map(text, values)) + "]"


def feature_rows(engine: Engine, files: Sequence[Path], key: str) -> str:
    """A relation over CSV files of features with the integer column `key` as raw_id, the other types detected.

    An id that is no integer stops the run, naming file and value.
    """
    options = f"header = true, delim = ',', quote = '\"', escape = '\"', types = {{{text(key)}: 'VARCHAR'}}"
    for path in files:
        require_readable(
            engine, path, f"read_csv({text(str(path))}, {options})", "CSV, with as many fields in every line"
        )
    rows = f"read_csv({texts(map(str, files))}, {options}, filename = {text(FILE)})"
    fault = (
        f"{name(FILE)} || {text(f': {key} ')} || coalesce({name(key)}, '(empty)') || "
        f"{text(' is not an integer; mend it.')}"
    )
    raw = f"coalesce({whole(key)}, error({fault}))"
    return f"(SELECT {raw} AS raw_id, * EXCLUDE ({name(key)}, {name(FILE)}) FROM {rows})"


def require_readable(engine: Engine, path: Path, relation: str, form: str) -> None:
    """Look at a file's beginning; DuckDB does not always name the file that it cannot read."""
    try:
        engine.columns(relation)
    except DataError:
        raise DataError(f"{path} cannot be read as {form}: mend it or fetch it again.") from None


def csv_header(files: Sequence[Path], delimiter: str = ",") -> list[str]:
    """The column names, the same in all files; without a name (pandas writes its index so) one gets its place."""
    fields = first_fields(files[0], delimiter)
    for other in files[1:]:
        if first_fields(other, delimiter) != fields:
            raise DataError(
                f"the header of {other} differs from that of {files[0]}: prepare them apart or make them agree."
            )
    names = [field or f"unnamed column {place}" for place, field in enumerate(fields, 1)]
    lower = [n.lower() for n in names]
    if twice := next((n for n in names if lower.count(n.lower()) > 1), None):
        raise DataError(
            f"the header of {files[0]} has the column {twice!r} more than once (capitals do not count): "
            "rename or remove one."
        )
    return names


def first_fields(path: Path, delimiter: str = ",") -> list[str]:
    """The fields of a CSV file's first line."""
    line = first_line(path)
    return next(csv.reader([line], delimiter=delimiter)) if len(delimiter) == 1 else line.split(delimiter)


def first_line(path: Path) -> str:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as raw:
            line = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace").readline().rstrip("\r\n")
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}): fetch it again.") from None
    if not line:
        raise DataError(f"{path} is empty: it needs a header line and rows.")
    if any(character < " " and character != "\t" for character in line):
        raise DataError(f"{path} is no text file: give CSV, or name the file by its format.")
    return line


def require_columns(found: Sequence[str], wanted: Iterable[str], where: object) -> None:
    for column in wanted:
        if column not in found:
            raise DataError(
                f"{where} has no column {column!r}{did_you_mean(column, found)}; it has {', '.join(map(str, found))}."
            )


def require_path(path: Path) -> Path:
    if not path.exists():
        near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
        raise DataError(f"{path} does not exist{near}.")
    return path


def members(path: Path, names: Sequence[str], scratch: Path) -> dict[str, Path]:
    """Those of the named files that lie in a folder (or one below it) or in a zip archive, unpacked to `scratch`."""
    require_path(path)
    if path.is_dir():
        archives = sorted(path.glob("*.zip"))
        found = {n: p for n in names for p in [path / n, *sorted(path.glob(f"*/{n}"))][::-1] if p.is_file()}
        if found or len(archives) != 1:
            return found
        path = archives[0]
    if not zipfile.is_zipfile(path):
        raise DataError(
            f"{path} is neither a folder nor a whole zip archive: give the folder or the zip, or fetch it again."
        )
    folder = scratch / "unpacked"
    folder.mkdir()
    found = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            base = Path(entry.filename).name
            if base in names:
                entry.filename = base  # no folders from the archive
                found[base] = Path(archive.extract(entry, folder))
    return found
