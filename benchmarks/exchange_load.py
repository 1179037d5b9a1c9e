"""Batches of ids as a rank of a KuaiRand run looks them up; part of `exchange`.

ids of a batch = [history T | targets T | negatives T * R]. Events are drawn by KuaiRand-27K's packaged curve of
popularity, stretched over N items, for users of USER_TOKENS events each; negatives are uniform over the N items, with
replacement. Hot ids are scattered over the catalogue.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from turbogr.data.sources.shape import popularity_shares

USER_TOKENS = 512


@dataclass(frozen=True)
class Load:
    items: int = 65_536
    tokens: int = 512
    """Of a rank."""
    negatives: int = 128
    """Of a token."""
    dim: int = 128
    seed: int = 0

    @property
    def ids_per_rank(self) -> int:
        return self.tokens * (2 + self.negatives)

    def ids(self, rank: int, step: int) -> Tensor:
        """int64 [T * (2 + R)]"""
        generator = np.random.default_rng([self.seed, step, rank])
        users = -(-self.tokens // USER_TOKENS)
        events = draw(generator, self.items, users * (USER_TOKENS + 1)).reshape(users, -1)
        history, targets = (part.reshape(-1)[: self.tokens] for part in (events[:, :-1], events[:, 1:]))
        negatives = generator.integers(0, self.items, self.tokens * self.negatives)
        return torch.from_numpy(np.concatenate([history, targets, negatives]))


def draw(generator: np.random.Generator, items: int, count: int) -> np.ndarray:
    """int64 [count] items by popularity."""
    edges, item_of_place = _catalogue(items)
    return item_of_place[np.minimum(np.searchsorted(edges, generator.random(count), side="right"), items - 1)]


@cache
def _catalogue(items: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each popularity rank's share ends, and whose it is."""
    shares = popularity_shares("kuairand-27k", items)
    return np.cumsum(shares), np.random.default_rng(items).permutation(items)
