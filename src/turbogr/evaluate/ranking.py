"""Rank one target per user among the whole catalogue, and the best k items of a user, item chunk by item chunk.

No buffer is larger than batch_users x item_chunk, however many items there are.

Ties in score: a target tied with m other items has rank 1 + (items with a greater score) + (m + 1) // 2, the middle of
the tie rounded up, so that a model which scores everything alike lands in the middle of the catalogue. The target's own
score is read from a chunk of scores like its rivals', never computed apart, so that rounding does not break ties.

Legend: B users of a batch, N items, C items of a chunk, n targets.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from turbogr.data.queries import Queries, read_queries
from turbogr.data.split import Targets
from turbogr.data.store import Store
from turbogr.errors import TrainingError
from turbogr.evaluate.exclude import Exclude
from turbogr.evaluate.held import held_by
from turbogr.ranks import ALONE, Ranks

Filter = Literal["visible", "history", "none"]
FILTERS: dict[Filter, str] = {
    "visible": "the items of the user's latest max_history events before the target are removed",
    "history": "the items of all the user's events before the target are removed",
    "none": "nothing is removed",
}
TIE_RULE = "rank = 1 + items with a greater score + half of the other items with the same score, rounded up"
ABSENT = torch.iinfo(torch.int64).min


class Scorer(Protocol):
    """Anything that scores items for histories: a model, a baseline."""

    @property
    def num_items(self) -> int: ...

    def encode(self, queries: Queries) -> Any:
        """What `scores` needs of a batch of histories, computed once per batch."""
        ...

    def scores(self, encoded: Any, start: int, stop: int) -> torch.Tensor:
        """[B, stop-start], float32 or narrower: scores of items start .. stop, which the caller may overwrite."""
        ...


@dataclass(frozen=True)
class RankResult:
    ranks: np.ndarray
    """int64 [n], 1-based, in the order of the targets."""
    repeat_targets: int
    """Targets that stand in their own visible history; they are ranked all the same."""


@dataclass(frozen=True)
class TopK:
    """Best first; among equal scores the smaller item index comes first."""

    items: torch.Tensor
    """int64 [B, k], -1 where a row has fewer than k items left"""
    scores: torch.Tensor
    """float32 [B, k], -inf there"""


def draw_targets(targets: Targets, max_users: int, seed: int) -> Targets:
    """`max_users` targets drawn by `seed` (0: all), users ascending; a user's lot depends on its index and the seed."""
    if max_users == 0 or max_users >= len(targets):
        return targets
    lot = np.random.Philox(key=seed).random_raw(int(targets.user[-1]) + 1)[targets.user]
    return targets.take(np.sort(np.argsort(lot, kind="stable")[:max_users]))


@torch.no_grad()
def rank_targets(
    scorer: Scorer,
    store: Store,
    targets: Targets,
    *,
    max_history: int,
    batch_users: int,
    item_chunk: int,
    filter: Filter = "visible",
    progress: Callable[[int], None] = lambda done: None,
    ranks: Ranks = ALONE,
) -> RankResult:
    """The rank of every target among all items of the store; `progress` is told how many are done.

    Several `ranks` take whole batches in turns, so that a target is scored beside the same ones as by one process;
    where each of them stands for a group that shares a catalogue, the ranks of a group rank the same batch together.
    """
    goal = store.item[targets.event].astype(np.int64)
    # users whose targets share a chunk are ranked together, so that few chunks are scored twice
    order = np.argsort(goal // item_chunk, kind="stable")
    found = np.zeros(len(targets) + 1, np.int64)  # and the repeats, last
    with ranks.agreed():
        for begin in range(ranks.rank * batch_users, len(order), ranks.world * batch_users):
            rows = order[begin : begin + batch_users]
            queries = read_queries(store, targets.user[rows], targets.event[rows], max_history)
            seen = np.repeat(goal[rows], np.diff(queries.offsets)) == queries.item
            found[-1] += len(np.unique(np.repeat(rows, np.diff(queries.offsets))[seen]))
            exclude = history_exclusion(store, queries, targets.take(rows), goal[rows], filter)
            found[rows] = _rank_batch(scorer, store, queries, goal[rows], exclude, item_chunk)
            progress(begin + len(rows))
    total = ranks.sum(torch.from_numpy(found)).numpy()
    return RankResult(total[:-1], int(total[-1]))


def history_exclusion(store: Store, queries: Queries, targets: Targets, goal: np.ndarray, filter: Filter) -> Exclude:
    """What the protocol removes: the history by `filter`, but never the target itself (`goal` [B])."""
    if filter == "none":
        return Exclude.of(np.zeros(len(queries) + 1, np.int64), np.zeros(0, np.int64))
    seen = queries if filter == "visible" else read_queries(store, targets.user, targets.event, None)
    rows = np.repeat(np.arange(len(queries)), np.diff(seen.offsets))
    kept = seen.item != goal[rows]
    return Exclude.pairs(rows[kept], seen.item[kept])


@torch.no_grad()
def top_k(scorer: Scorer, queries: Queries, k: int, *, exclude: Exclude, item_chunk: int) -> TopK:
    """The k best items of every row among those that `exclude` leaves, merged chunk by chunk."""
    best: torch.Tensor | None = None
    guard, held = _NanGuard(queries, device_of(scorer)), held_by(scorer)
    exclude = held.exclusions(exclude)
    encoded = scorer.encode(queries)
    for start, stop in _chunks(scorer.num_items, item_chunk):
        scores = guard.look(scorer.scores(encoded, start, stop))
        exclude.fill(scores, start, stop, torch.nan)
        items = held.ids(torch.arange(start, stop, device=scores.device)).expand_as(scores)
        if best is None:
            best = _sort_keys(scores, items)
        else:
            best = torch.cat((best, _sort_keys(*_rising(scores, items, _from_sort_keys(best).scores[:, -1]))), 1)
        best = best.topk(min(k, best.shape[1]), dim=1).values
        best = torch.nn.functional.pad(best, (0, k - best.shape[1]), value=ABSENT)
    guard.check(held.ranks)
    if best is None:  # this rank holds no item
        best = torch.full((len(queries), k), ABSENT, device=device_of(scorer))
    return _from_sort_keys(held.best(best, k))


def _rank_batch(
    scorer: Scorer, store: Store, queries: Queries, goal: np.ndarray, exclude: Exclude, item_chunk: int
) -> np.ndarray:
    """int64 [B]: greater and equal scores counted chunk by chunk, after a first pass over the chunks with targets."""
    guard, held = _NanGuard(queries, device_of(scorer), store), held_by(scorer)
    exclude, place = held.exclusions(exclude), held.goal_places(goal)
    encoded = scorer.encode(queries)
    home = np.where(place >= 0, place // item_chunk * item_chunk, -1)  # -1: another rank's
    homes = [int(start) for start in np.unique(home) if start >= 0]
    own: torch.Tensor | None = None
    for start in homes:
        scores = scorer.scores(encoded, start, min(start + item_chunk, scorer.num_items))
        own = scores.new_zeros(len(queries)) if own is None else own
        rows = torch.from_numpy(np.flatnonzero(home == start)).to(scores.device)
        own[rows] = scores[rows, torch.from_numpy(place).to(scores.device)[rows] - start]
    # each target is scored by the rank that holds it, the others add nothing
    own = held.ranks.sum(torch.zeros(len(queries), device=device_of(scorer)) if own is None else own)
    counts = torch.zeros(2, len(queries), dtype=torch.int64, device=own.device)  # greater, equal
    # the last chunk with targets is still at hand, so that a catalogue of one chunk is scored once
    kept = homes[-1] if homes else -1
    for start, stop in sorted(_chunks(scorer.num_items, item_chunk), key=lambda chunk: chunk[0] != kept):
        if start != kept:
            scores = scorer.scores(encoded, start, stop)
        guard.look(scores)
        exclude.fill(scores, start, stop, torch.nan)  # NaN is neither greater nor equal
        counts[0] += (scores > own[:, None]).sum(1, dtype=torch.int32)
        counts[1] += (scores == own[:, None]).sum(1, dtype=torch.int32)
    guard.check(held.ranks)
    greater, equal = held.ranks.sum(counts)
    ranks: np.ndarray = (1 + greater + equal // 2).cpu().numpy()  # `equal` counts the target too: (others + 1) // 2
    return ranks


class _NanGuard:
    """Remembers which rows had a NaN among their scores, without waiting for the device at every chunk."""

    def __init__(self, queries: Queries, device: torch.device, store: Store | None = None) -> None:
        self._queries, self._device = queries, device
        self._store = store
        self._bad: torch.Tensor | None = None

    def look(self, scores: torch.Tensor) -> torch.Tensor:
        bad = scores.amax(1).isnan()
        self._bad = bad if self._bad is None else self._bad | bad
        return scores

    def check(self, ranks: Ranks) -> None:
        """Raises on every rank that shares the catalogue where one of them saw a NaN."""
        none = torch.zeros(len(self._queries), dtype=torch.bool, device=self._device)
        mine = none if self._bad is None else self._bad
        self._bad = ranks.sum(mine.int()) > 0
        if not bool(self._bad.any()):
            return
        row = int(self._bad.nonzero()[0])
        name = f"query {row}"
        if self._store is not None:
            name = f"user {self._store.raw_users([int(self._queries.users[row])])[0]!r}"
        raise TrainingError(
            f"the scores of {name} contain NaN and have no order: the model diverged, take an earlier checkpoint."
        )


def device_of(scorer: Scorer) -> torch.device:
    """Where scores lie, also on a rank that has none: ranks talk of tensors on the same kind of device."""
    device: torch.device = getattr(scorer, "device", torch.device("cpu"))
    return device


def _chunks(num_items: int, item_chunk: int) -> Iterator[tuple[int, int]]:
    for start in range(0, num_items, item_chunk):
        yield start, min(start + item_chunk, num_items)


def _rising(scores: torch.Tensor, items: torch.Tensor, least: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The few columns [B, W] of a chunk that can still enter a list: greater than its last (ties go to earlier ones).

    `least` float [B] is the last score of each list, -inf where the list is not full; rows are filled up with NaN.
    """
    least = least.masked_fill(least == -torch.inf, torch.nan)  # not below NaN: everything enters
    rows, columns = (scores <= least[:, None]).logical_not_().nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(scores))
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    shape = (len(scores), int(counts.max()))
    kept, named = scores.new_full(shape, torch.nan), items.new_zeros(shape)
    kept[rows, place], named[rows, place] = scores[rows, columns], items[rows, columns]
    return kept, named


def _sort_keys(scores: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """int64 [B, C] that orders by (score descending, item ascending) and is unique; ABSENT where the score is NaN.

    The bits of a float32 read as an integer order like the float when it is positive, and in reverse when negative.
    """
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(torch.int64)
    return torch.where(scores.isnan(), ABSENT, (ordered << 32) | (0xFFFFFFFF - items))


def _from_sort_keys(keys: torch.Tensor) -> TopK:
    ordered = (keys >> 32).to(torch.int32)
    scores = torch.where(ordered >= 0, ordered, ordered ^ 0x7FFFFFFF).view(torch.float32)
    absent = keys == ABSENT
    return TopK((0xFFFFFFFF - (keys & 0xFFFFFFFF)).masked_fill(absent, -1), scores.masked_fill(absent, -torch.inf))
