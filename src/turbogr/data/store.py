"""The store: a user log as memory-mapped columns, grouped by user, in time order within a user.

A store is a folder (U users, N items, E events):

    manifest.json   format version, source, time unit, counts, filters, size and checksum of every file
    offsets.npy     int64  [U+1]  user u's events are offsets[u] .. offsets[u+1]
    item.npy        int32  [E]    dense item index, 0 .. N-1
    time.npy        int64  [E]    in the source's unit; seconds = time // time_units_per_second
    actions.npy     uint16 [E]    bit a: the event had action manifest.actions[a] (only where the source has actions)
    users.parquet   raw_id and the source's user features; row u is user u
    items.parquet   raw_id, title where the source has one, item features; row i is item i (also items without events)

`prepare` writes it; everything else only reads it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from turbogr.errors import DataError
from turbogr.files import read_versioned, sha256

FORMAT = "turbogr-store"
VERSION = 1
COUNTS = ("time_units_per_second", "users", "items", "events", "single_event_users", "tied_gaps", "rejected_rows")
COLUMNS: dict[str, type[np.generic]] = {
    "offsets.npy": np.int64,
    "item.npy": np.int32,
    "time.npy": np.int64,
    "actions.npy": np.uint16,
}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    source: str
    time_units_per_second: int
    users: int
    items: int
    events: int
    single_event_users: int
    """Users with one event: kept, never trained on, never evaluated."""
    tied_gaps: int
    """Neighbouring events of one user with the same time."""
    ties: str
    """How such ties are ordered: `file` (order in the source) or `shuffled-SEED`."""
    rejected_rows: int = 0
    actions: tuple[str, ...] = ()
    filters: dict[str, Any] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """name -> {"bytes": size, "sha256": checksum}"""
    format: str = FORMAT
    version: int = VERSION

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Store:
    """Read access to one prepared store; columns stay on disk until they are touched."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.offsets = self._column("offsets.npy", manifest.users + 1)
        self.item = self._column("item.npy", manifest.events)
        self.time = self._column("time.npy", manifest.events)
        self.actions = self._column("actions.npy", manifest.events) if manifest.actions else None

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        path = Path(path)
        if not (path / "manifest.json").exists():
            raise DataError(f"{path} is not a store (no manifest.json): make one with `turbogr data prepare`.")
        return cls(path, _read_manifest(path))

    @property
    def num_users(self) -> int:
        return self.manifest.users

    @property
    def num_items(self) -> int:
        return self.manifest.items

    @property
    def num_events(self) -> int:
        return self.manifest.events

    def seconds(self, start: int, stop: int) -> np.ndarray:
        """Times of events start .. stop in whole seconds, int64."""
        return np.asarray(self.time[start:stop]) // self.manifest.time_units_per_second

    @cached_property
    def users(self) -> pa.Table:
        return self._features("users.parquet", self.num_users)

    @cached_property
    def items(self) -> pa.Table:
        return self._features("items.parquet", self.num_items)

    def user_indices(self, raw_ids: Sequence[Any]) -> np.ndarray:
        return indices_of(self.users, raw_ids, "user", self.path)

    def item_indices(self, raw_ids: Sequence[Any]) -> np.ndarray:
        return indices_of(self.items, raw_ids, "item", self.path)

    def raw_items(self, indices: Iterable[int]) -> list[Any]:
        return list(self.items["raw_id"].take(pa.array(list(indices), pa.int64())).to_pylist())

    def raw_users(self, indices: Iterable[int]) -> list[Any]:
        return list(self.users["raw_id"].take(pa.array(list(indices), pa.int64())).to_pylist())

    def titles(self, indices: Iterable[int]) -> list[str | None]:
        indices = list(indices)
        if "title" not in self.items.column_names:
            return [None] * len(indices)
        return list(self.items["title"].take(pa.array(indices, pa.int64())).to_pylist())

    def verify(self) -> None:
        """Compare every file with its checksum; raises DataError naming the first that differs."""
        for name, facts in sorted(self.manifest.files.items()):
            if sha256(self.path / name) != facts["sha256"]:
                raise DataError(f"{self.path / name} does not match its checksum: prepare the store again.")

    def _features(self, name: str, rows: int) -> pa.Table:
        try:
            table = pq.read_table(self.path / name)
        except (OSError, pa.ArrowException) as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{self.path / name} cannot be read ({reason}): prepare the store again.") from None
        if "raw_id" not in table.column_names or table.num_rows != rows:
            raise DataError(
                f"{self.path / name} does not hold {rows} rows with a column raw_id: prepare the store again."
            )
        return table

    def _column(self, name: str, length: int) -> np.ndarray:
        try:
            # numpy cannot map an empty file
            column: np.ndarray = np.load(self.path / name, mmap_mode="r" if length else None, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{self.path / name} cannot be read ({error}): prepare the store again.") from None
        if column.dtype != COLUMNS[name] or column.shape != (length,):
            raise DataError(
                f"{self.path / name} holds {column.dtype}{list(column.shape)} where the manifest says "
                f"{np.dtype(COLUMNS[name])}[{length}]: prepare the store again."
            )
        return column


def places_of(first: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [B+1], event indices [T]) of the runs of `lengths` [B] events from `first` [B] on, packed."""
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return offsets, np.repeat(first - offsets[:-1], lengths) + np.arange(offsets[-1])


def _read_manifest(path: Path) -> Manifest:
    remedy = "prepare it again with this version"
    raw = read_versioned(path / "manifest.json", FORMAT, VERSION, DataError, remedy)
    try:
        manifest = Manifest(**{**raw, "actions": tuple(raw["actions"])})
        sizes = {name: int(facts["bytes"]) for name, facts in manifest.files.items()}
        _require_types(manifest)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise DataError(f"{path / 'manifest.json'} is damaged ({error}): prepare the store again.") from None
    for name, expected in sizes.items():
        size = (path / name).stat().st_size if (path / name).exists() else None
        if size != expected:
            found = "is missing" if size is None else f"has {size} bytes instead of {expected}"
            raise DataError(f"{path / name} {found}: the store is truncated, prepare it again.")
    return manifest


def _require_types(manifest: Manifest) -> None:
    for name in COUNTS:
        value = getattr(manifest, name)
        if type(value) is not int or value < (name == "time_units_per_second"):
            raise TypeError(f"{name} is {value!r}")
    for action in manifest.actions:
        if not isinstance(action, str):
            raise TypeError(f"an action is {action!r}")


def indices_of(table: pa.Table, raw_ids: Sequence[Any], what: str, path: Path) -> np.ndarray:
    """int64 [n]: the rows of `table` with these in its column raw_id; raises DataError naming the first unknown one."""
    column = table["raw_id"]
    try:
        convert = str if pa.types.is_string(column.type) else _whole
        wanted = pa.array([convert(raw) for raw in raw_ids], column.type)
    except (ValueError, TypeError, OverflowError):
        raise DataError(f"{what} ids of {path} are integers, got {list(raw_ids)[:3]}.") from None
    found = pc.index_in(wanted, value_set=column)
    if found.null_count:
        unknown = [raw for raw, place in zip(raw_ids, found.to_pylist(), strict=True) if place is None]
        raise DataError(
            f"unknown {what} {unknown[0]!r}: it is not in {path} ({len(unknown)} of {len(wanted)} unknown)."
        )
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)


def _whole(raw: Any) -> int:
    """An integer id given as text or as any number; a fraction is none."""
    whole = int(raw)
    if not isinstance(raw, str) and whole != raw:
        raise ValueError(raw)
    return whole
