"""Which users stand in which batch of an epoch.

U users, `pairs` [U]: training tokens of a user
"""

from dataclasses import dataclass

import numpy as np

from turbogr.config import TrainConfig
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import DataError
from turbogr.ops.philox import random_order


def training_pairs(store: Store, split: Split, max_history: int) -> np.ndarray:
    """int64 [U]: (event, next event) pairs that a user gives, at most max_history."""
    pairs: np.ndarray = np.clip(split.train_end - np.asarray(store.offsets[:-1]) - 1, 0, max_history)
    return pairs


@dataclass(frozen=True)
class EpochPlan:
    """Batches of one epoch as slices of a list of users."""

    users: np.ndarray  # int64 [trained users], shuffled
    bounds: np.ndarray  # int64 [batches + 1]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batch(self, number: int) -> np.ndarray:
        return self.users[self.bounds[number] : self.bounds[number + 1]]


def plan_epoch(pairs: np.ndarray, epoch: int, config: TrainConfig) -> EpochPlan:
    """Every user with a training pair once, in an order drawn by (seed, epoch)."""
    users = np.flatnonzero(pairs)
    if not len(users):
        raise DataError("no user has two training events under this split: there is nothing to train on.")
    users = users[random_order(config.seed, epoch, len(users)).numpy()]
    if config.batch_users:
        bounds = np.append(np.arange(0, len(users), config.batch_users), len(users))
    else:
        bounds = _token_bounds(pairs[users], config.batch_tokens)
    return EpochPlan(users, bounds)


def _token_bounds(lengths: np.ndarray, budget: int) -> np.ndarray:
    """Whole users up to `budget` tokens a batch; a user longer than that is a batch of its own."""
    ends = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(lengths):
        done = ends[bounds[-1] - 1] if bounds[-1] else 0
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(ends, done + budget, side="right"))))
    return np.array(bounds)
