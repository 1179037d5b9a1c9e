"""What a model must beat: popularity, first-order item-to-item, and chance. All know the training region only.

Counts are gathered chunk by chunk over the store. Scores are places in an order, so that float32 holds them exactly and
ties are true ties.

Legend: B users, N items, E events, P distinct pairs of neighbouring items.
"""

from collections.abc import Iterator

import numpy as np
import torch

from turbogr.data.queries import Queries
from turbogr.data.split import Split, training_chunks, training_counts
from turbogr.data.store import Store

PAIR_BUDGET = 1 << 24


class PopularityScorer:
    """Every user gets the items in order of their training counts; equal counts tie."""

    def __init__(self, store: Store, split: Split) -> None:
        counts = training_counts(store, split)
        # the place among the distinct counts keeps order and ties, and is exact in float32 where a count may not be
        levels, level = np.unique(counts, return_inverse=True)
        self.counts = counts
        self.num_items = store.num_items
        self._level = torch.from_numpy(level.astype(np.float32) / len(levels))  # [N], in [0, 1)

    def encode(self, queries: Queries) -> int:
        return len(queries)

    def scores(self, encoded: int, start: int, stop: int) -> torch.Tensor:
        return self._level[start:stop].repeat(encoded, 1)


class MarkovScorer:
    """The items that most often followed the user's last one in training, then the rest by popularity.

    Among successors with one count the more popular comes first. Memory: 8 bytes per distinct pair of neighbours in the
    training region, and PAIR_BUDGET pairs while counting.
    """

    def __init__(self, store: Store, split: Split, pair_budget: int = PAIR_BUDGET) -> None:
        self._popularity = PopularityScorer(store, split)
        self.num_items = store.num_items
        self._offsets, self._next, self._score = _successors(store, split, self._popularity.counts, pair_budget)

    def encode(self, queries: Queries) -> np.ndarray:
        """int64 [B]: the last item of each history, -1 without one."""
        ends = queries.offsets[1:]
        filled = ends > queries.offsets[:-1]
        last = np.full(len(queries), -1, np.int64)
        last[filled] = queries.item[ends[filled] - 1]
        return last

    def scores(self, encoded: np.ndarray, start: int, stop: int) -> torch.Tensor:
        scores = self._popularity.scores(len(encoded), start, stop)
        for row, last in enumerate(encoded):
            if last >= 0:
                begin, end = self._offsets[last : last + 2]
                first, stops = begin + np.searchsorted(self._next[begin:end], (start, stop))
                columns = torch.from_numpy(self._next[first:stops].astype(np.int64) - start)
                scores[row, columns] = torch.from_numpy(self._score[first:stops])
        return scores


class RandomScorer:
    """Every (user, item) gets a random number by its seed, whatever the batch and the chunk."""

    def __init__(self, num_items: int, seed: int = 0) -> None:
        self.num_items = num_items
        self._seed = seed

    def encode(self, queries: Queries) -> torch.Tensor:
        return _mix(torch.from_numpy(queries.users) ^ _mix(torch.tensor(self._seed)))

    def scores(self, encoded: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        mixed = _mix(encoded[:, None] + torch.arange(start, stop))
        return (mixed & 0xFFFFFF).float() / 0x1000000


def _successors(
    store: Store, split: Split, counts: np.ndarray, pair_budget: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(offsets int64 [N+1], next int32 [P], score float32 [P]): each item's successors, ascending, scored 1, 2, 3 ..

    The items are taken in ranges whose transitions fit `pair_budget`, with one pass over the store for each range.
    """
    leaving = np.zeros(store.num_items, np.int64)
    for before, _ in _transitions(store, split):
        leaving += np.bincount(before, minlength=store.num_items)
    part = np.cumsum(leaving) // pair_budget
    kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for chosen in np.unique(part):
        keys = [
            before[part[before] == chosen] * store.num_items + after[part[before] == chosen]
            for before, after in _transitions(store, split)
        ]
        pairs, times = np.unique(np.concatenate(keys or [np.zeros(0, np.int64)]), return_counts=True)
        before, after = np.divmod(pairs, store.num_items)
        kept.append((np.bincount(before, minlength=store.num_items), after, _places(before, times, counts[after])))
    offsets = np.concatenate(([0], np.cumsum(sum(sizes for sizes, _, _ in kept))))
    following = np.concatenate([after.astype(np.int32) for _, after, _ in kept])
    return offsets, following, np.concatenate([score for _, _, score in kept])


def _places(before: np.ndarray, times: np.ndarray, popularity: np.ndarray) -> np.ndarray:
    """float32 [P]: within each `before`, 1 for the lowest (times, popularity), 2 for the next .. (ties share one)."""
    order = np.lexsort((popularity, times, before))
    columns = np.stack((before, times, popularity))[:, order]
    changes = np.diff(columns, axis=1, prepend=columns[:, :1]) != 0
    level = np.cumsum(changes.any(0))
    first = np.maximum.accumulate(np.where(changes[0], level, 0))
    places = np.empty(len(order), np.float32)
    places[order] = 1 + level - first
    return places


def _transitions(store: Store, split: Split) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (before, after) int64: items of neighbouring training events."""
    for start, stop, ends in training_chunks(store, split):
        items = np.asarray(store.item[start : stop + 1], np.int64)
        kept = np.flatnonzero(np.arange(start + 1, stop + 1) < ends)
        yield items[kept], items[kept + 1]


def _mix(values: torch.Tensor) -> torch.Tensor:
    """A fixed scrambling of int64 (multiply and xor-shift, twice), the same on every machine."""
    for factor in (-7046029254386353131, -4658895280553007687):
        values = values * factor
        values = values ^ ((values >> 29) & 0x7FFFFFFFF)
    return values
