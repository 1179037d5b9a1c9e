"""Questions and answers in raw ids: a pasted history becomes a query, the best items become an Arrow table.

B users, k places
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from turbogr.data.queries import Queries
from turbogr.data.store import Store
from turbogr.errors import DataError, UserError
from turbogr.evaluate import TopK
from turbogr.files import whole_file

ENDINGS = (".parquet", ".csv")


def pasted_query(
    items: np.ndarray, times: Sequence[int] | None, now: int | None, latest: int, max_history: int
) -> Queries:
    """One history of item indices as a query: its latest `max_history` events, to be continued at `now`.

    Without `now` the moment is `latest`, or the last of `times` where that is later. Without `times` every event
    counts as having happened at that moment.
    """
    if not len(items):
        raise DataError("the history is empty: a model needs one item at least.")
    if times is None:
        now = latest if now is None else now
        when = np.full(len(items), now, np.int64)
    else:
        when = _times(times, len(items))
        now = max(latest, int(when[-1])) if now is None else now
        check_now(now, int(when[-1]))
    kept = min(len(items), max_history)
    return Queries(
        users=np.array([-1]),
        offsets=np.array([0, kept]),
        item=items[-kept:],
        time=when[-kept:],
        next_time=np.array([now]),
    )


def latest_seconds(store: Store) -> int:
    """The latest time of a store; times ascend within a user, so the last event of each is enough."""
    last = np.asarray(store.offsets[1:]) - 1
    return int(store.time[last].max()) // store.manifest.time_units_per_second


def check_now(now: int, last: int) -> None:
    if now < last:
        raise UserError(f"now is {now} and a history reaches to {last} (seconds): recommend for {last} or later.")


def answer_table(best: TopK, items: pa.Table, users: pa.ChunkedArray | None) -> pa.Table:
    """Columns user (where `users` [B] are given), rank, item, title (where there are titles), score; best first.

    A row with fewer than k items left has fewer lines.
    """
    found = best.items.cpu().numpy()
    row, place = np.nonzero(found >= 0)
    index = pa.array(found[row, place])
    columns: dict[str, Any] = {} if users is None else {"user": users.take(pa.array(row))}
    columns |= {"rank": pa.array(place + 1, pa.int32()), "item": items["raw_id"].take(index)}
    if "title" in items.column_names:
        columns["title"] = items["title"].take(index)
    return pa.table({**columns, "score": pa.array(best.scores.cpu().numpy()[row, place], pa.float32())})


def check_ending(out: Path) -> None:
    if out.suffix not in ENDINGS:
        raise UserError(f"{out} must end in {' or '.join(ENDINGS)}.")


def write_answers(tables: Iterable[pa.Table], out: Path) -> int:
    """Stream tables of one schema into a Parquet or CSV file, whole or not at all; answers the number of rows."""
    check_ending(out)
    open_writer = pq.ParquetWriter if out.suffix == ".parquet" else pa.csv.CSVWriter
    writer, rows = None, 0
    with whole_file(out) as partial:
        try:
            for table in tables:
                writer = writer or open_writer(str(partial), table.schema)
                if len(table):
                    writer.write_table(table)
                rows += len(table)
        finally:
            if writer is not None:
                writer.close()
    return rows


def _times(times: Sequence[int], length: int) -> np.ndarray:
    if len(times) != length:
        raise DataError(f"the history has {length} items and {len(times)} times: give one time per item.")
    when = np.asarray(times)
    if when.dtype.kind not in "iu":
        raise DataError(f"times are whole seconds, not {when.dtype}: convert them.")
    backward = np.flatnonzero(np.diff(when) < 0)
    if len(backward):
        raise DataError(f"time {when[backward[0] + 1]} follows {when[backward[0]]}: give the history oldest first.")
    return when.astype(np.int64)
