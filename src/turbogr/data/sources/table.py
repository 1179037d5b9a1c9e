"""Any log in CSV, Parquet or Arrow IPC files, or in a frame in memory, with a column mapping."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.dataset as ds

from turbogr.data.engine import Engine
from turbogr.data.sources.reading import (
    FILE,
    CsvRows,
    Log,
    TypedRows,
    Value,
    csv_header,
    first_line,
    integer,
    name,
    number,
    require_columns,
    require_path,
    require_readable,
    string,
    text,
    texts,
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
    def units(self) -> int:
        return UNITS_PER_SECOND[self.time_unit]

    @property
    def columns(self) -> list[str]:
        named = (self.user, self.item, self.time, *self.actions, self.title, self.rating)
        return list(dict.fromkeys(n for n in named if n))

    def log(self, rows: CsvRows | TypedRows, values: dict[str, Value], units: int, moment: bool) -> Log:
        """`values` by column; `units` of the time in a second; `moment`: times are no numbers in `time_unit`."""
        return Log(
            rows=rows,
            user=values[self.user],
            item=values[self.item],
            time=values[self.time],
            time_units_per_second=units,
            time_unit="" if moment else self.time_unit,
            actions={action: values[action] for action in self.actions},
            rating=values[self.rating] if self.rating else None,
            title=f"nullif(CAST({name(self.title)} AS VARCHAR), '')" if self.title else "",
        )

    def typed_log(self, sql: str, types: dict[str, str], files: tuple[str, ...], first: int) -> Log:
        """Of columns that have types already; one without an action or a rating has a NULL there."""
        values = {a: Value(a, f"coalesce(CAST({name(a)} AS DOUBLE) <> 0, false)", "a number") for a in self.actions}
        if self.rating:
            least = f"coalesce(CAST({name(self.rating)} AS DOUBLE), '-infinity')"
            values[self.rating] = Value(self.rating, least, "a number")
        time, units = _time(types[self.time], self)
        values |= {c: _id(types[c], c) for c in (self.user, self.item)} | {self.time: time}
        return self.log(TypedRows(sql, self.columns, files, first), values, units, _is_moment(types[self.time]))


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
        parquet = f"read_parquet({texts(map(str, files))}, filename = {text(FILE)})"
        if kind == "parquet":
            for path in files:
                require_readable(engine, path, f"read_parquet({text(str(path))})", "Parquet")
        rows = _ipc_rows(engine, files) if kind == "ipc" else parquet
        types = engine.columns(rows)
        require_columns([c for c in types if c != FILE], self.columns.columns, files[0])
        return self.columns.typed_log(rows, types, tuple(map(str, files)), first=1)

    def _csv(self, engine: Engine, files: list[Path]) -> Log:
        columns = self.columns
        delimiter = max(DELIMITERS, key=first_line(files[0]).count)
        names = csv_header(files, delimiter)
        require_columns(names, columns.columns, files[0])
        sampled = _sample(engine, CsvRows(files[:1], names, delimiter), columns.columns)
        values: dict[str, Value] = {}
        for column in columns.actions:
            seen = sampled[column]
            truth = Value(column, f"TRY_CAST({name(column)} AS BOOLEAN)", "true or false")
            nonzero = Value(column, f"TRY_CAST({name(column)} AS DOUBLE) <> 0", "a number")
            values[column] = nonzero if seen.numbers == seen.filled else truth
        if columns.rating:
            values[columns.rating] = number(columns.rating)
        for column in (columns.user, columns.item):
            values[column] = _csv_id(column, sampled[column])
        kind = sampled[columns.time].time_type
        values[columns.time], units = _time(kind, columns) if kind else (integer(columns.time), columns.units)
        return columns.log(CsvRows(files, names, delimiter), values, units, moment=kind == "TIMESTAMP")


@dataclass(frozen=True)
class _Sample:
    """Of a CSV column's first values: how many there are, and as how many of them can be read."""

    filled: int
    integers: int
    numbers: int
    moments: int
    points: int
    """With a decimal point."""

    @property
    def time_type(self) -> str:
        """Of the type that the texts are cast to; none for integers, which must be written plainly."""
        if self.moments > self.numbers:
            return "TIMESTAMP"
        return "DOUBLE" if self.points and self.numbers > self.integers else ""


def _sample(engine: Engine, rows: CsvRows, columns: Sequence[str]) -> dict[str, _Sample]:
    counts = ", ".join(
        f"count({c}), count(*) FILTER ({c} SIMILAR TO '(0|-?[1-9][0-9]*)' AND TRY_CAST({c} AS BIGINT) IS NOT NULL), "
        f"count(TRY_CAST({c} AS DOUBLE)), count(TRY_CAST({c} AS TIMESTAMP)), count(*) FILTER (contains({c}, '.'))"
        for c in (f"nullif({name(column)}, '')" for column in columns)
    )
    relation = rows.relation("ignore_errors = true")
    row = engine.all(f"SELECT {counts} FROM (FROM {relation} LIMIT {SAMPLE_ROWS})")[0]
    return {column: _Sample(*row[5 * place : 5 * place + 5]) for place, column in enumerate(columns)}


def _csv_id(column: str, seen: _Sample) -> Value:
    """Integers where nearly all are: the few others are bad rows then."""
    if seen.filled and seen.integers >= NEARLY_ALL * seen.filled:
        return integer(column)
    if seen.numbers == seen.filled and seen.points > 0:
        raise _fractions(column, "DOUBLE")
    return string(column)


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
        rows = f"(SELECT *, 'the frame' AS {name(FILE)} FROM frame)"
        return self.columns.typed_log(rows, engine.columns(rows), ("the frame",), first=0)


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
    for place, path in enumerate(files):
        try:
            engine.connection.register(f"ipc_{place}", ds.dataset(path, format="ipc"))
        except pa.ArrowException as error:
            raise DataError(f"{path} is not a whole Arrow IPC file ({error}).") from None
        parts.append(f"SELECT *, {text(str(path))} AS {name(FILE)} FROM ipc_{place}")
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


def _id(kind: str, column: str) -> Value:
    """int64 where the column is integer, else a string (also integers that do not fit int64)."""
    if kind in INTEGERS:
        return Value(column, f"CAST({name(column)} AS BIGINT)", "an integer")
    if kind in FLOATS or kind.startswith("DECIMAL"):
        raise _fractions(column, kind)
    return Value(column, f"nullif(CAST({name(column)} AS VARCHAR), '')", "a text")


def _fractions(column: str, kind: str) -> DataError:
    return DataError(
        f"column {column!r} holds numbers with a fraction ({kind}): ids must be integers or strings, convert it."
    )


def _time(kind: str, mapping: Mapping) -> tuple[Value, int]:
    """(the time as an integer, its units per second), of a column of that type or of texts that are cast to it."""
    column = name(mapping.time)
    if _is_moment(kind):
        sql = f"epoch_us({column if kind.endswith('ZONE') else f'TRY_CAST({column} AS TIMESTAMP)'})"
        return Value(mapping.time, sql, "a timestamp after 1969"), 1_000_000
    if kind in FLOATS or kind.startswith("DECIMAL"):
        sql = f"TRY_CAST(round(TRY_CAST({column} AS DOUBLE) * {1_000_000 // mapping.units}) AS BIGINT)"
        return Value(mapping.time, sql, "a number"), 1_000_000
    if kind == "VARCHAR":
        return integer(mapping.time), mapping.units
    return Value(mapping.time, f"TRY_CAST({column} AS BIGINT)", "an integer of 64 bits"), mapping.units
