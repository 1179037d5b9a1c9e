"""What a model is asked: each user's visible history and the moment to predict for.

Legend: B users, T visible events of all of them.
"""

from dataclasses import dataclass

import numpy as np

from turbogr.data.store import Store, places_of


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


def read_queries(
    store: Store, users: np.ndarray, events: np.ndarray, max_history: int | None, now: int | None = None
) -> Queries:
    """The latest `max_history` (None: all) events of each user before `events`, in store order.

    The moment to predict for is that of `events`, or `now` (seconds) for everybody.
    """
    starts = np.asarray(store.offsets[users])
    if max_history is not None:
        starts = np.maximum(starts, events - max_history)
    offsets, place = places_of(starts, events - starts)
    unit = store.manifest.time_units_per_second
    return Queries(
        users=np.asarray(users, np.int64),
        offsets=offsets,
        item=store.item[place].astype(np.int64),
        time=store.time[place] // unit,
        next_time=store.time[events] // unit if now is None else np.full(len(users), now),
    )
