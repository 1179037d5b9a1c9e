"""What the best possible recommender would reach on a synthetic log: the generator itself ranks each last event.

The generating process is known, so every item has a known chance to be next. The oracle ranks the whole catalogue by
it, the visible history removed; an item that the user has seen already can then never be hit. It knows what a model can
only guess (the user's favourites, the session's topic), so it is an upper bound.

Shapes: n users with a target, K topics, M items, H events in their visible histories.
"""

from dataclasses import dataclass, field

import numpy as np

from turbogr.data.sources.synthetic_world import Catalogue

CUTOFFS = (1, 10, 50, 200, 500, 1000)
NDCG_CUTOFFS = (10, 50, 200)


def ranks(
    world: Catalogue, topic_scores: np.ndarray, target: np.ndarray, history_user: np.ndarray, history_item: np.ndarray
) -> np.ndarray:
    """Rank (from 1) of `target` [n] by the score topic_scores[u, topic of i] * weight_i, int64 [n].

    `topic_scores` is [n, K]; `history_user` and `history_item` [H] are the events to remove, by row of `target`.
    A target that stands in its own history gets the rank M + 1.
    """
    n, items = len(target), len(world.weight)
    weight, topic = world.weight, world.topic
    rows = np.arange(n)
    threshold = (topic_scores[rows, topic[target]] * weight[target])[:, None] / topic_scores
    threshold[rows, topic[target]] = weight[target]  # exact, where a rounding error would count the target itself
    rank = np.ones(n, np.int64)
    for k in range(len(world.flow)):
        rising = weight[world.by_topic[world.starts[k] : world.starts[k + 1]]][::-1]
        rank += len(rising) - np.searchsorted(rising, threshold[:, k], side="right")
    better = weight[history_item] > threshold[history_user, topic[history_item]]
    removed = np.unique(history_user[better].astype(np.int64) * items + history_item[better]) // items
    rank -= np.bincount(removed, minlength=n)
    rank[history_user[history_item == target[history_user]]] = items + 1
    return rank


@dataclass
class Score:
    """Sums of metrics over users."""

    users: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, rank: np.ndarray) -> None:
        self.users += len(rank)
        for k in CUTOFFS:
            self._add(f"HR@{k}", rank <= k)
        for k in NDCG_CUTOFFS:
            self._add(f"NDCG@{k}", np.where(rank <= k, 1 / np.log2(rank + 1), 0))

    def means(self) -> dict[str, float]:
        return {"users": self.users, **{name: round(total / self.users, 6) for name, total in self.sums.items()}}

    def _add(self, name: str, values: np.ndarray) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + float(values.sum())
