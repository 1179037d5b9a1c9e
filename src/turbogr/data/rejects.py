"""Rows of a raw log that cannot be used: named in an error, or written to `rejects.csv` and counted.

They are gathered in tables on disk, because there may be as many of them as the log has rows:

    unparsed  (file, line, field, kind, message, text)            lines that the CSV reader refused
    invalid   (file, line, user, item, time, raw_user, raw_item)  rows without an id, a time, or a negative one
"""

import csv
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbogr.data.engine import Engine
from turbogr.data.sources.reading import TIME_TYPE, Log, texts
from turbogr.errors import DataError

BAD = (
    '"user" IS NULL OR item IS NULL OR "time" IS NULL OR "time" < 0 '
    "OR CAST(\"user\" AS VARCHAR) = '' OR CAST(item AS VARCHAR) = ''"
)
IN_ORDER = "SELECT * FROM unparsed FULL JOIN invalid USING (file, line) ORDER BY file, line"


@dataclass(frozen=True)
class Rejects:
    rows: int = 0
    first: str = ""
    """Where the first one stands and what is wrong with it."""

    def words(self) -> str:
        """For the end of another error's sentence."""
        return f" ({self.rows:,} rows were rejected, the first: {self.first})" if self.rows else ""


def settle(engine: Engine, log: Log, target: Path | None) -> Rejects:
    """Remove the bad rows from the staged table `log` and write them to `target`; without one they are an error."""
    invalid = engine.one(f"SELECT count(*) FROM log WHERE {BAD}")
    _gather_unparsed(engine, log)
    rows = invalid + engine.one("SELECT count(*) FROM unparsed")
    if not rows:
        return Rejects()
    _gather_invalid(engine, log)
    first = next(engine.stream(f"{IN_ORDER} LIMIT 1")).to_pylist()[0]
    found = Rejects(rows, f"{log.files[first['file']]}, {log.place} {first['line']}: {_reason(first, log)}")
    if target is None:
        more = f" ({rows:,} such rows in all)" if rows > 1 else ""
        raise DataError(f"{found.first}{more}; mend it, or pass --skip-bad-rows to set such rows aside.")
    _write(engine, log, target)
    if invalid:
        engine.run(f"DELETE FROM log WHERE {BAD}")
    engine.run("DROP TABLE unparsed; DROP TABLE invalid")
    return found


def _write(engine: Engine, log: Log, target: Path) -> None:
    # names without their folder: the store must not depend on where the log lay
    names = [Path(path).name for path in log.files]
    with target.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("file", "line", "reason", "text"))
        for batch in engine.stream(IN_ORDER):
            for row in batch.to_pylist():
                writer.writerow((names[row["file"]], row["line"], _reason(row, log), _text(row)))


def _gather_unparsed(engine: Engine, log: Log) -> None:
    """One row per line that the CSV reader refused, for its first bad field."""
    query = (
        "SELECT NULL::BIGINT AS file, NULL::BIGINT AS line, '' AS field, '' AS kind, '' AS message, '' AS text "
        "WHERE false"
    )
    if engine.one("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'reject_errors'"):
        query = (
            f"SELECT DISTINCT ON (file_path, line) CAST(list_position({texts(log.files)}, file_path) - 1 AS BIGINT) AS "
            "file, CAST(line AS BIGINT) AS line, column_name AS field, CAST(error_type AS VARCHAR) AS kind, "
            "error_message AS message, csv_line AS text "
            "FROM reject_errors JOIN reject_scans USING (scan_id, file_id) ORDER BY file_path, line, column_idx"
        )
    engine.run(f"CREATE TABLE unparsed AS {query}")


def _gather_invalid(engine: Engine, log: Log) -> None:
    """Rows that were read but cannot be used.

    A row's place in its file counts accepted rows only, so the refused ones before it are added: line l, the k-th
    refused one from 0, stands before the rows from place l - k on.
    """
    raw = "raw_0 AS raw_user, raw_1 AS raw_item" if log.id_columns else "NULL AS raw_user, NULL AS raw_item"
    starts = "SELECT file, min(rowid) AS start FROM log GROUP BY file"
    found = (
        f"SELECT list_position({texts(log.files)}, file) - 1 AS number, log.rowid - start AS place, "
        f'CAST("user" AS VARCHAR) AS "user", CAST(item AS VARCHAR) AS item, "time", {raw} '
        f"FROM log JOIN starts USING (file) WHERE {BAD}"
    )
    before = "row_number() OVER (PARTITION BY file ORDER BY line)"
    refused = f"SELECT file, line - {log.first_line} - {before} + 1 AS place, {before} AS before FROM unparsed"
    steps = "SELECT file, place, max(before) AS before FROM refused GROUP BY file, place"
    engine.run(
        f"CREATE TABLE invalid AS WITH starts AS ({starts}), found AS ({found}), refused AS ({refused}), "
        f"steps AS ({steps}) SELECT CAST(number AS BIGINT) AS file, "
        f"CAST({log.first_line} + found.place + coalesce(before, 0) AS BIGINT) AS line, "
        'CAST("user" AS VARCHAR) AS "user", item, "time", raw_user, raw_item '
        "FROM found ASOF LEFT JOIN steps ON found.number = steps.file AND found.place >= steps.place"
    )


def _text(row: dict[str, Any]) -> str:
    if row["kind"]:
        return str(row["text"])
    fields = (row["user"] or row["raw_user"], row["item"] or row["raw_item"], row["time"])
    return ",".join("" if value is None else str(value) for value in fields)


def _reason(row: dict[str, Any], log: Log) -> str:
    return _unparsed_reason(row["field"], row["kind"], row["message"]) if row["kind"] else _invalid_reason(row, log)


def _unparsed_reason(column: str, kind: str, message: str) -> str:
    if kind == "CAST":
        if not (found := re.search(r'Could not convert string "(.*)" to \'(\w+)', message, re.DOTALL)):
            return f"{column} is missing"
        value, wanted = found.groups()
        if wanted == TIME_TYPE and re.fullmatch(r"-\d+", value):
            return f"{column} is negative ({value})"
        return (
            f"{column} {value!r} is not a number"
            if "INT" in wanted or wanted == "DOUBLE"
            else f"{column} {value!r} is no {wanted}"
        )
    if found := re.search(r"Expected Number of Columns: (\d+) Found: (\d+)", message):
        return f"{found[2]} fields instead of {found[1]}"
    if "unicode" in message:
        return "the line is no UTF-8 text, convert the file to UTF-8"
    return f"{kind.lower()} ({message.splitlines()[0]})"


def _invalid_reason(row: dict[str, Any], log: Log) -> str:
    user, item = log.id_columns or ("the user", "the item")
    for what, value, raw in ((user, row["user"], row["raw_user"]), (item, row["item"], row["raw_item"])):
        if not value:
            return _no_id(what, raw) if raw else f"{what} is missing"
    if row["time"] is None:
        return "the time is missing or does not fit 64 bits"
    return f"the time is negative ({row['time']})"


def _no_id(what: str, raw: str) -> str:
    try:
        float(raw)
    except ValueError:
        return f"{what} {raw!r} is not a number"
    return f"{what} {raw!r} is not a plain integer of 64 bits"
