"""Stores of a few events, written by hand: for tests that read a store and do not prepare one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from turbogr.data.store import Manifest, Store
from turbogr.files import write_json


def tiny_store(
    folder: Path,
    items: Sequence[Sequence[int]],
    times: Sequence[Sequence[int]] | None = None,
    *,
    num_items: int | None = None,
    time_units_per_second: int = 1,
) -> Store:
    """One list of item indices per user (and of times; 0, 1, 2 .. without). Raw ids are 1000 + user and 500 + item."""
    times = times if times is not None else [range(len(row)) for row in items]
    lengths = np.array([len(row) for row in items], np.int64)
    item = np.array([one for row in items for one in row], np.int32)
    time = np.array([one for row in times for one in row], np.int64)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    owner = np.repeat(np.arange(len(items)), lengths)
    num_items = num_items or int(item.max()) + 1
    folder.mkdir(parents=True, exist_ok=True)
    for name, column in (("offsets", offsets), ("item", item), ("time", time)):
        np.save(folder / f"{name}.npy", column)
    pq.write_table(pa.table({"raw_id": pa.array(range(1000, 1000 + len(items)), pa.int64())}), folder / "users.parquet")
    pq.write_table(pa.table({"raw_id": pa.array(range(500, 500 + num_items), pa.int64())}), folder / "items.parquet")
    manifest = Manifest(
        source="tiny",
        time_units_per_second=time_units_per_second,
        users=len(items),
        items=num_items,
        events=len(item),
        single_event_users=int(np.count_nonzero(lengths == 1)),
        tied_gaps=int(np.count_nonzero((np.diff(time) == 0) & (np.diff(owner) == 0))),
        ties="file",
    )
    write_json(folder / "manifest.json", manifest.to_json())
    return Store.open(folder)
