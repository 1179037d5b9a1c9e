"""What a scorer is asked: each user's visible history and the moment to predict for, and the items that do not count.

Legend: B users, T visible events of all of them, N items, X exclusions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from turbogr.data.store import Store


@dataclass(frozen=True)
class Queries:
    """Histories as one jagged batch, oldest event first."""

    users: np.ndarray
    """int64 [B]: index in the store, -1 for a history that belongs to none of its users."""
    offsets: np.ndarray
    """int64 [B+1]: row b's events are offsets[b] .. offsets[b+1]."""
    item: np.ndarray
    """int64 [T]"""
    time: np.ndarray
    """int64 [T], seconds"""
    next_time: np.ndarray
    """int64 [B], seconds: when the target happens, or now."""

    def __len__(self) -> int:
        return len(self.users)


def read_queries(store: Store, users: np.ndarray, events: np.ndarray, max_history: int | None) -> Queries:
    """The latest `max_history` (None: all) events of each user before `events`, in store order; next_time is the event's."""
    starts = np.asarray(store.offsets[users])
    if max_history is not None:
        starts = np.maximum(starts, events - max_history)
    lengths = events - starts
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    place = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
    unit = store.manifest.time_units_per_second
    return Queries(
        users=np.asarray(users, np.int64),
        offsets=offsets,
        item=store.item[place].astype(np.int64),
        time=store.time[place] // unit,
        next_time=store.time[events] // unit,
    )


@dataclass(frozen=True)
class Exclude:
    """Items that count as absent: (row, item) pairs in order of item, and items absent for every row."""

    rows: torch.Tensor
    """int64 [X]"""
    items: torch.Tensor
    """int64 [X], ascending"""
    everywhere: torch.Tensor
    """int64 [G]"""

    @classmethod
    def of(cls, offsets: np.ndarray, items: np.ndarray, everywhere: Sequence[int] | np.ndarray = ()) -> "Exclude":
        """Row b excludes items[offsets[b] : offsets[b+1]]; `everywhere` is excluded from all rows."""
        return cls.pairs(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), items, everywhere)

    @classmethod
    def pairs(cls, rows: np.ndarray, items: np.ndarray, everywhere: Sequence[int] | np.ndarray = ()) -> "Exclude":
        order = np.argsort(items, kind="stable")
        columns = (rows[order], items[order], np.asarray(everywhere))
        return cls(*(torch.from_numpy(np.array(column, np.int64)) for column in columns))

    def fill(self, scores: torch.Tensor, start: int, stop: int, value: float) -> None:
        """Write `value` over what is excluded from scores [B, stop-start] of items start .. stop."""
        first, last = torch.searchsorted(self.items, torch.tensor([start, stop])).tolist()
        rows, columns = self.rows[first:last].to(scores.device), (self.items[first:last] - start).to(scores.device)
        scores[rows, columns] = value
        inside = self.everywhere[(self.everywhere >= start) & (self.everywhere < stop)] - start
        scores[:, inside.to(scores.device)] = value
