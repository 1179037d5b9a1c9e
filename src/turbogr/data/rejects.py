"""Rows of a raw log that cannot be used: named in an error, or written to `rejects.csv` and counted."""

import csv
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from turbogr.data.engine import Engine
from turbogr.data.sources.reading import TIME_TYPE, Log
from turbogr.errors import DataError

BAD = (
    '"user" IS NULL OR item IS NULL OR "time" IS NULL OR "time" < 0 '
    "OR CAST(\"user\" AS VARCHAR) = '' OR CAST(item AS VARCHAR) = ''"
)


@dataclass(frozen=True, order=True)
class Reject:
    file_number: int
    line: int
    reason: str
    text: str


def settle(engine: Engine, log: Log, target: Path | None) -> int:
    """Remove the bad rows from the staged table `log` and write them to `target`; without a target they are an error.

    Returns how many there were.
    """
    unparsed = _unparsed(engine, log)
    found = sorted(unparsed + _invalid(engine, log, unparsed))
    if not found:
        return 0
    if target is None:
        first = found[0]
        more = f" ({len(found):,} such rows in all)" if len(found) > 1 else ""
        raise DataError(
            f"{log.files[first.file_number]}, {log.place} {first.line}: {first.reason}{more}; "
            "mend it, or pass --skip-bad-rows to set such rows aside."
        )
    engine.run(f"DELETE FROM log WHERE {BAD}")
    with target.open("w", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("file", "line", "reason", "text"))
        for one in found:
            # names without their folder: the store must not depend on where the log lay
            writer.writerow((Path(log.files[one.file_number]).name, one.line, one.reason, one.text))
    return len(found)


def _unparsed(engine: Engine, log: Log) -> list[Reject]:
    """Rows that the CSV reader refused; one reject per line, for its first bad field."""
    if not engine.one("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'reject_errors'"):
        return []
    rows = engine.all(
        "SELECT file_path, line, column_name, error_type, error_message, csv_line FROM reject_errors "
        "JOIN reject_scans USING (scan_id, file_id) ORDER BY file_path, line, column_idx"
    )
    first: dict[tuple[int, int], Reject] = {}
    for path, line, column, kind, message, text in rows:
        number = log.files.index(path)
        first.setdefault((number, line), Reject(number, line, _reason(column, kind, message), text))
    return list(first.values())


def _reason(column: str, kind: str, message: str) -> str:
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
    return f"{kind.lower()} ({message.splitlines()[0]})"


def _invalid(engine: Engine, log: Log, unparsed: list[Reject]) -> list[Reject]:
    """Rows that were read but have no id, no time or a negative one."""
    rows = engine.all(f'SELECT rowid, file, "user", item, "time" FROM log WHERE {BAD}')
    if not rows:
        return []
    starts = dict(engine.all("SELECT file, min(rowid) FROM log GROUP BY file"))
    rejected: dict[int, list[int]] = {number: [] for number in range(len(log.files))}
    for one in unparsed:
        rejected[one.file_number].append(one.line - log.first_line)
    found = []
    for row, path, user, item, time in rows:
        number = log.files.index(path)
        place = row - starts[path]
        # the place counts accepted rows only: add the refused ones that stand before it
        before = np.asarray(sorted(rejected[number]), np.int64)
        place += int(np.searchsorted(before - np.arange(len(before)), place, side="right"))
        text = ",".join("" if value is None else str(value) for value in (user, item, time))
        found.append(Reject(number, log.first_line + place, _invalid_reason(user, item, time), text))
    return found


def _invalid_reason(user: object, item: object, time: object) -> str:
    for what, value in (("user", user), ("item", item), ("time", time)):
        if value is None or value == "":
            return f"the {what} is missing" + (" or does not fit 64 bits" if what == "time" else "")
    return f"the time is negative ({time})"
