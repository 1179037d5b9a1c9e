"""The rows of a raw log into the table `log`, in file order: user, item, time, actions and, where known, rating, title.

Most logs are clean. So the first reading only asks whether every row is whole: it stops at the first line that is none,
and DuckDB's own statistics say whether a value is missing. Where a fault shows, the log is read again with care: each
bad row keeps its place, its first fault and its fields, and leaves through `rejects`.

    file   the file's number          fault  the number of the value that cannot be used, NULL in a good row
    found  what stands there instead  raw    all fields of the row
"""

from pathlib import Path

from turbogr.data.engine import Engine
from turbogr.data.rejects import Rejects, settle
from turbogr.data.sources.reading import FILE, Log, name, texts
from turbogr.errors import DataError


def stage(engine: Engine, log: Log, target: Path | None) -> Rejects:
    """Make the table `log`; bad rows go to `target`, and without one they are an error."""
    if _read_strictly(engine, log):
        return Rejects()
    engine.phase("reading again, for bad rows", 0, 55)
    _read_carefully(engine, log)
    return settle(engine, log, target)


def _read_strictly(engine: Engine, log: Log) -> bool:
    """Whether every row can be used."""
    try:
        engine.run(f"CREATE TABLE log AS SELECT {_values(log)} FROM {log.rows.strict}")
    except DataError:
        return False
    required = ['"user"', "item", '"time"', "actions", *(["rating"] if log.rating else [])]
    missing = " OR ".join(f"{column} IS NULL" for column in required)
    if not engine.one(f'SELECT count(*) FROM log WHERE {missing} OR "time" < 0'):
        return True
    engine.run("DROP TABLE log")
    return False


def _read_carefully(engine: Engine, log: Log) -> None:
    faults = [f"{value.sql} IS NULL" for value in log.values]
    faults[log.values.index(log.time)] += f" OR {log.time.sql} < 0"
    # not by their names: the log may have columns of these names
    fault = f"CASE {' '.join(f'WHEN {test} THEN {number}' for number, test in enumerate(faults))} END"
    found = " ".join(f"WHEN {k} THEN CAST({name(value.column)} AS VARCHAR)" for k, value in enumerate(log.values))
    raw = ", ".join(f"CAST({name(column)} AS VARCHAR)" for column in log.rows.columns)
    engine.run(
        f"CREATE TABLE log AS SELECT {_values(log)}, "
        f"CAST(list_position({texts(log.rows.files)}, {name(FILE)}) - 1 AS INTEGER) AS file, "
        f"CAST({fault} AS UTINYINT) AS fault, CASE {fault} {found} END AS found, "
        f"CASE WHEN {fault} IS NOT NULL THEN [{raw}] END AS raw FROM {log.rows.careful}"
    )


def _values(log: Log) -> str:
    bits = [f"CAST({value.sql} AS USMALLINT) * {1 << bit}" for bit, value in enumerate(log.actions.values())]
    listed = [
        f'{log.user.sql} AS "user"',
        f"{log.item.sql} AS item",
        f'{log.time.sql} AS "time"',
        f"CAST({' + '.join(bits) or '0'} AS USMALLINT) AS actions",
    ]
    if log.rating:
        listed.append(f"{log.rating.sql} AS rating")
    if log.title:
        listed.append(f"{log.title} AS title")
    return ", ".join(listed)
