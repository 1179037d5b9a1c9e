"""Which items of the catalogue a scorer scores. Where a table is sharded, each rank of a group scores the items that it
holds, for the same users, and counts and lists are merged.

B users, C items of the catalogue
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from turbogr.evaluate.exclude import Exclude
from turbogr.ranks import ALONE, Ranks
from turbogr.tables.placement import Placement


class Held:
    """The items of one rank: all of them, in the order of their ids, where `placement` is None."""

    def __init__(self, ranks: Ranks = ALONE, placement: Placement | None = None) -> None:
        self.ranks, self.placement = ranks, placement

    def places(self, ids: Tensor) -> Tensor:
        """Where items stand among those held here; -1 for another rank's."""
        if self.placement is None:
            return ids
        found = self.placement.positions(ids)
        inside = (found >= self.placement.begin) & (found < self.placement.end)
        return torch.where(inside, found - self.placement.begin, -1)

    def ids(self, places: Tensor) -> Tensor:
        return places if self.placement is None else self.placement.ids(places + self.placement.begin)

    def goal_places(self, goal: np.ndarray) -> np.ndarray:
        places: np.ndarray = self.places(torch.from_numpy(goal)).numpy()
        return places

    def exclusions(self, exclude: Exclude) -> Exclude:
        """Those that concern the items held here, by their places."""
        if self.placement is None:
            return exclude
        places, everywhere = self.places(exclude.items), self.places(exclude.everywhere)
        here = places >= 0
        pairs = (exclude.rows[here].numpy(), places[here].numpy())
        return Exclude.pairs(*pairs, everywhere[everywhere >= 0].numpy())

    def best(self, keys: Tensor, k: int) -> Tensor:
        """[B, k] the greatest of every rank's keys [B, k], which are unique."""
        if self.ranks.alone:
            return keys
        every = self.ranks.gather(keys)  # [W, B, k]
        return every.transpose(0, 1).flatten(1).topk(k, dim=1).values


def held_by(scorer: Any) -> Held:
    """What a scorer holds: it says so by `ranks` and `placement`, or scores the whole catalogue."""
    return Held(getattr(scorer, "ranks", ALONE), getattr(scorer, "placement", None))
