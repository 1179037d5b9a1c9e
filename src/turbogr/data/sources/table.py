"""Any log in CSV, Parquet or Arrow IPC files, or in a frame in memory, with a column mapping."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.dataset as ds

from turbogr.data.engine import Engine
from turbogr.data.sources.reading import (
    TIME_TYPE,
    Log,
    csv_header,
    csv_rows,
    first_line,
    name,
    require_columns,
    require_path,
    require_readable,
    text,
    texts,
    whole,
)
from turbogr.errors import DataError

TimeUnit = Literal["s", "ms", "us"]
UNITS_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000}
INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
FLOATS = ("FLOAT", "DOUBLE")
DELIMITERS = ",\t;|"
SAMPLE_ROWS = 10_000
NEARLY_ALL = 0.95
CSV_ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".txt")
PARQUET_ENDINGS = (".parquet", ".pq")
IPC_ENDINGS = (".arrow", ".feather", ".ipc")


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """Which column is what."""

    user: str
    item: str
    time: str
    time_unit: TimeUnit = "s"
    """Unit of a numeric time column; fractions of it are kept as microseconds. Timestamps need none."""
    actions: tuple[str, ...] = ()
    """Columns that are true or non-zero where the event had that action."""
    title: str = ""
    """Column with the item's title; the first one found counts."""
    rating: str = ""
    """Column with a rating, for `min_rating`."""

    @property
    def columns(self) -> list[str]:
        named = (self.user, self.item, self.time, *self.actions, self.title, self.rating)
        return list(dict.fromkeys(n for n in named if n))

    def log(self, rows: str, types: dict[str, str], files: tuple[str, ...], first: int, place: str = "row") -> Log:
        time, units = _time(types[self.time], self)
        return Log(
            rows=rows,
            files=files,
            first_line=first,
            place=place,
            user=_id(types[self.user], self.user),
            item=_id(types[self.item], self.item),
            time=time,
            time_units_per_second=units,
            time_unit="" if _is_moment(types[self.time]) else self.time_unit,
            actions={a: f"CAST({name(a)} AS DOUBLE) <> 0" for a in self.actions},
            rating=name(self.rating) if self.rating else "",
            title=f"nullif(CAST({name(self.title)} AS VARCHAR), '')" if self.title else "",
        )


@dataclass(frozen=True)
class Table:
    """Files are read in the order of their names when a folder is given."""

    path: Path
    columns: Mapping
    name: str = "table"

    def open(self, engine: Engine) -> Log:
        files = _files(self.path)
        kind = _kind(files[0])
        if any(_kind(f) != kind for f in files):
            raise DataError(f"{self.path} mixes file formats: prepare one format at a time.")
        if kind == "csv":
            return self._csv(engine, files)
        parquet = f"read_parquet({texts(map(str, files))}, filename = true)"
        if kind == "parquet":
            for path in files:
                require_readable(engine, path, f"read_parquet({text(str(path))})", "Parquet")
        rows = _ipc_rows(engine, files) if kind == "ipc" else parquet
        types = engine.columns(rows)
        require_columns([c for c in types if c != "filename"], self.columns.columns, files[0])
        return self.columns.log(rows, types, tuple(map(str, files)), first=1)

    def _csv(self, engine: Engine, files: list[Path]) -> Log:
        delimiter = max(DELIMITERS, key=first_line(files[0]).count)
        names = csv_header(files, delimiter)
        require_columns(names, self.columns.columns, files[0])
        types = _csv_types(engine, files[0], names, delimiter, self.columns)
        ids = (self.columns.user, self.columns.item)
        rows = csv_rows(files, names, types | dict.fromkeys(ids, "VARCHAR"), delimiter=delimiter)
        log = self.columns.log(rows, types, tuple(map(str, files)), first=2, place="line")
        user, item = (whole(c) if types[c] == "BIGINT" else name(c) for c in ids)
        return dataclasses.replace(log, user=user, item=item, id_columns=ids)


def _csv_types(engine: Engine, path: Path, names: list[str], delimiter: str, columns: Mapping) -> dict[str, str]:
    """The type that the first rows' values of each mapped column have.

    Ids are integers where nearly all of them are: the few others are bad rows then.
    """
    rows = csv_rows([path], names, {}, delimiter=delimiter, faults="ignore_errors = true")
    counts = ", ".join(
        f"count({c}), count(*) FILTER ({c} SIMILAR TO '(0|-?[1-9][0-9]*)' AND TRY_CAST({c} AS BIGINT) IS NOT NULL), "
        f"count(TRY_CAST({c} AS DOUBLE)), count(TRY_CAST({c} AS TIMESTAMP)), count(*) FILTER (contains({c}, '.'))"
        for c in map(name, columns.columns)
    )
    row = engine.all(f"SELECT {counts} FROM (FROM {rows} LIMIT {SAMPLE_ROWS})")[0]
    types = {}
    for place, column in enumerate(columns.columns):
        filled, integers, numbers, moments, points = row[5 * place : 5 * place + 5]
        if column == columns.time:
            types[column] = (
                "TIMESTAMP" if moments > numbers else "DOUBLE" if points and numbers > integers else TIME_TYPE
            )
        elif column in (columns.user, columns.item):
            fraction = numbers == filled and points > 0
            nearly_all = filled and integers >= NEARLY_ALL * filled
            types[column] = "BIGINT" if nearly_all else "DOUBLE" if fraction else "VARCHAR"
            _id(types[column], column)  # refuses fractions, before they are rounded
        elif column == columns.rating:
            types[column] = "DOUBLE"
        elif column in columns.actions:
            types[column] = "DOUBLE" if numbers == filled else "BOOLEAN"
    return types


@dataclass(frozen=True)
class Frame:
    """A pandas, Polars or Arrow table in memory."""

    frame: Any
    columns: Mapping
    name: str = "frame"

    def open(self, engine: Engine) -> Log:
        table = self.frame if isinstance(self.frame, pa.Table) else _arrow(self.frame)
        require_columns(table.column_names, self.columns.columns, "the frame")
        engine.connection.register("frame", table.select(self.columns.columns))
        rows = "(SELECT *, 'the frame' AS filename FROM frame)"
        return self.columns.log(rows, engine.columns(rows), ("the frame",), first=0)


def _arrow(frame: Any) -> pa.Table:
    if not hasattr(frame, "__arrow_c_stream__"):
        raise DataError(
            f"a {type(frame).__name__} is no pandas, Polars or Arrow table: convert it (a LazyFrame: collect it)."
        )
    try:
        return pa.table(frame)
    except pa.ArrowException as error:
        raise DataError(f"the frame cannot be read as an Arrow table: {error}.") from None


def _ipc_rows(engine: Engine, files: Sequence[Path]) -> str:
    parts = []
    for number, path in enumerate(files):
        try:
            engine.connection.register(f"ipc_{number}", ds.dataset(path, format="ipc"))
        except pa.ArrowException as error:
            raise DataError(f"{path} is not a whole Arrow IPC file ({error}).") from None
        parts.append(f"SELECT *, {text(str(path))} AS filename FROM ipc_{number}")
    return "(" + " UNION ALL BY NAME ".join(parts) + ")"


def _files(path: Path) -> list[Path]:
    require_path(path)
    if path.is_file():
        if not _kind(path):
            known = ", ".join((*CSV_ENDINGS, *PARQUET_ENDINGS, *IPC_ENDINGS))
            raise DataError(f"{path} has no ending that says its format: it must be one of {known}.")
        return [path]
    files = sorted(p for p in path.iterdir() if p.is_file() and _kind(p) and not p.name.startswith((".", "_")))
    if not files:
        raise DataError(f"{path} holds no CSV, Parquet or Arrow file.")
    return files


def _kind(path: Path) -> str:
    endings = "".join(path.suffixes[-2:]).lower()
    if endings.endswith(CSV_ENDINGS):
        return "csv"
    if endings.endswith(PARQUET_ENDINGS):
        return "parquet"
    return "ipc" if endings.endswith(IPC_ENDINGS) else ""


def _is_moment(kind: str) -> bool:
    return kind.startswith("TIMESTAMP") or kind == "DATE"


def _id(kind: str, column: str) -> str:
    """int64 where the column is integer, else a string (also integers that do not fit int64)."""
    if kind in INTEGERS:
        return f"CAST({name(column)} AS BIGINT)"
    if kind in FLOATS or kind.startswith("DECIMAL"):
        raise DataError(
            f"column {column!r} holds numbers with a fraction ({kind}): ids must be integers or strings, convert it."
        )
    return f"CAST({name(column)} AS VARCHAR)"


def _time(kind: str, mapping: Mapping) -> tuple[str, int]:
    """(SQL that gives the time as an integer or NULL, its units per second)."""
    column, unit = name(mapping.time), UNITS_PER_SECOND[mapping.time_unit]
    if _is_moment(kind):
        return f"epoch_us({column if kind.endswith('ZONE') else f'CAST({column} AS TIMESTAMP)'})", 1_000_000
    if kind in FLOATS or kind.startswith("DECIMAL"):
        return f"TRY_CAST(round(CAST({column} AS DOUBLE) * {1_000_000 // unit}) AS BIGINT)", 1_000_000
    return f"TRY_CAST({column} AS BIGINT)", unit
