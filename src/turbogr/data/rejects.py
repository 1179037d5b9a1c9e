"""Rows of a raw log that cannot be used: named in an error, or written to `rejects.csv` and counted.

They are gathered in tables on disk, because there may be as many of them as the log has rows (lines that are no rows at
all pass through memory, and too many of them are refused):

    unparsed  (file, line, message, text)     lines that the CSV reader refused
    invalid   (file, line, fault, found, raw) rows without an id, a time, ..., or with a negative time
"""

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turbogr.data.engine import Engine
from turbogr.data.sources.reading import CsvRows, Log, TypedRows, texts
from turbogr.errors import DataError

_FILE = "CAST(list_position({}, file_path) - 1 AS INTEGER)"
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
    _gather_unparsed(engine, log)
    _gather_invalid(engine, log)
    rows = engine.one("SELECT (SELECT count(*) FROM unparsed) + (SELECT count(*) FROM invalid)")
    if rows:
        first = next(engine.stream(f"{IN_ORDER} LIMIT 1")).to_pylist()[0]
        place = f"{log.rows.files[first['file']]}, {log.rows.place} {first['line']}"
        found = Rejects(rows, f"{place}: {_reason(first, log)}")
        if target is None:
            more = f" ({rows:,} such rows in all)" if rows > 1 else ""
            raise DataError(f"{found.first}{more}; mend it, or pass --skip-bad-rows to set such rows aside.")
        _write(engine, log, target)
        engine.run("DELETE FROM log WHERE fault IS NOT NULL")
    engine.run("DROP TABLE unparsed; DROP TABLE invalid")
    return found if rows else Rejects()


def _write(engine: Engine, log: Log, target: Path) -> None:
    # names without their folder: the store must not depend on where the log lay
    names = [Path(path).name for path in log.rows.files]
    with target.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("file", "line", "reason", "text"))
        for batch in engine.stream(IN_ORDER):
            for row in batch.to_pylist():
                writer.writerow((names[row["file"]], row["line"], _reason(row, log), _text(row, log)))


def _gather_unparsed(engine: Engine, log: Log) -> None:
    """One row per line that the CSV reader refused, for its first fault."""
    rows = log.rows
    if isinstance(rows, TypedRows) or not engine.one(
        "SELECT count(*) FROM duckdb_tables() WHERE table_name = 'reject_errors'"
    ):
        engine.run("CREATE TABLE unparsed (file INTEGER, line BIGINT, message VARCHAR, text VARCHAR)")
        return
    engine.run(
        f"CREATE TABLE unparsed AS SELECT DISTINCT ON (file_path, line) {_FILE.format(texts(rows.files))} AS file, "
        "CAST(line AS BIGINT) AS line, error_message AS message, csv_line AS text "
        "FROM reject_errors JOIN reject_scans USING (scan_id, file_id) ORDER BY file_path, line, column_idx"
    )
    _require_all_noted(engine, rows)


def _require_all_noted(engine: Engine, rows: CsvRows) -> None:
    """Nothing is dropped uncounted: where as many faults of a file are noted as ever are, there may be more."""
    crowded = (
        f"SELECT {_FILE.format(texts(rows.files))} AS file FROM reject_errors JOIN reject_scans "
        f"USING (scan_id, file_id) GROUP BY file_path HAVING count(*) >= {rows.refused_limit}"
    )
    for file, line, message, lines in engine.all(
        "SELECT file, min(line), arg_min(message, line), count(*) FROM unparsed "
        f"WHERE file IN ({crowded}) GROUP BY file ORDER BY file LIMIT 1"
    ):
        raise DataError(
            f"{rows.files[file]}, line {line}: {_refusal(message)}, and so in {lines:,} lines or more, too many to "
            "set aside: mend the file, or convert it to Parquet."
        )


def _gather_invalid(engine: Engine, log: Log) -> None:
    """Rows that were read but cannot be used.

    A row's place in its file counts accepted rows only, so the refused ones before it are added: line l, the k-th
    refused one from 0, stands before the rows from place l - k on.
    """
    starts = "SELECT file, min(rowid) AS start FROM log GROUP BY file"
    bad = (
        "SELECT file, log.rowid - start AS place, fault, found, raw FROM log JOIN starts USING (file) "
        "WHERE fault IS NOT NULL"
    )
    before = "row_number() OVER (PARTITION BY file ORDER BY line)"
    refused = f"SELECT file, line - {log.rows.first} - {before} + 1 AS place, {before} AS before FROM unparsed"
    steps = "SELECT file, place, max(before) AS before FROM refused GROUP BY file, place"
    engine.run(
        f"CREATE TABLE invalid AS WITH starts AS ({starts}), bad AS ({bad}), refused AS ({refused}), "
        f"steps AS ({steps}) SELECT bad.file AS file, "
        f"CAST({log.rows.first} + bad.place + coalesce(before, 0) AS BIGINT) AS line, fault, found, raw "
        "FROM bad ASOF LEFT JOIN steps ON bad.file = steps.file AND bad.place >= steps.place"
    )


def _text(row: dict[str, Any], log: Log) -> str:
    """The line, or the fields of a row as a line."""
    if row["raw"] is None:
        return str(row["text"])
    fields = ["" if field is None else field for field in row["raw"]]
    if len(log.rows.delimiter) > 1:
        return log.rows.delimiter.join(fields)
    line = io.StringIO()
    csv.writer(line, delimiter=log.rows.delimiter, lineterminator="").writerow(fields)
    return line.getvalue()


def _reason(row: dict[str, Any], log: Log) -> str:
    if row["fault"] is None:
        return _refusal(row["message"])
    value, found = log.values[row["fault"]], row["found"]
    if not found:
        return f"{value.column} is missing"
    if value is log.time and re.match(r"-\d", found):
        return f"{value.column} is negative ({found})"
    return f"{value.column} {found!r} is not {value.wanted}"


def _refusal(message: str) -> str:
    if found := re.search(r"Expected Number of Columns: (\d+) Found: (\d+)", message):
        return f"{found[2]} fields instead of {found[1]}"
    if "unicode" in message:
        return "the line is no UTF-8 text, convert the file to UTF-8"
    return message.strip().splitlines()[0]
