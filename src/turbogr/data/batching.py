"""Which rows stand in which batch of an epoch. A row is a user, or one window of a user with a long history.

U users, `pairs` [U]: training tokens of a user; n rows
"""

from dataclasses import dataclass

import numpy as np

from turbogr.config import BalanceConfig, TrainConfig
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import ConfigError, DataError
from turbogr.ops.philox import random_order


def training_pairs(store: Store, split: Split, max_history: int) -> np.ndarray:
    """int64 [U]: (event, next event) pairs that a user gives, at most max_history."""
    pairs: np.ndarray = np.clip(split.train_end - np.asarray(store.offsets[:-1]) - 1, 0, max_history)
    return pairs


@dataclass(frozen=True)
class Selection:
    """Rows that are computed together."""

    users: np.ndarray  # int64 [n] index in the store
    skips: np.ndarray  # int64 [n] training tokens of the user before this row
    tokens: np.ndarray  # int64 [n]
    numbers: np.ndarray  # int64 [n] number of the row in the global step, which keys its random numbers

    def __len__(self) -> int:
        return len(self.users)

    def take(self, places: np.ndarray) -> "Selection":
        return Selection(self.users[places], self.skips[places], self.tokens[places], self.numbers[places])

    @classmethod
    def of(cls, users: np.ndarray, tokens: np.ndarray, first_number: int = 0) -> "Selection":
        """Whole users, numbered from `first_number` on."""
        numbers = np.arange(first_number, first_number + len(users))
        return cls(users, np.zeros_like(users), tokens, numbers)


@dataclass(frozen=True)
class EpochPlan:
    """Batches of one epoch as slices of a list of rows."""

    users: np.ndarray  # int64 [n], shuffled; the windows of a user stand together
    skips: np.ndarray  # int64 [n]
    tokens: np.ndarray  # int64 [n]
    bounds: np.ndarray  # int64 [batches + 1]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def batches(self, begin: int, end: int, first_number: int = 0) -> Selection:
        """The rows of batches begin .. end, numbered from `first_number` on."""
        rows = slice(self.bounds[begin], self.bounds[end])
        numbers = np.arange(first_number, first_number + rows.stop - rows.start)
        return Selection(self.users[rows], self.skips[rows], self.tokens[rows], numbers)


def plan_epoch(pairs: np.ndarray, epoch: int, config: TrainConfig, balance: BalanceConfig | None = None) -> EpochPlan:
    """Every user with a training pair once, in an order drawn by (seed, epoch)."""
    balance = balance or BalanceConfig()
    users = np.flatnonzero(pairs)
    if not len(users):
        raise DataError("no user has two training events under this split: there is nothing to train on.")
    users = users[random_order(config.seed, epoch, len(users)).numpy()]
    users, skips, tokens = _windows(users, pairs[users], balance.window)
    if config.batch_users and balance.strategy != "token-aware":
        bounds = np.append(np.arange(0, len(users), config.batch_users), len(users))
    else:
        bounds = token_bounds(tokens, _token_threshold(tokens, config))
    return EpochPlan(users, skips, tokens, bounds)


def ensure_enough_rows(plan: EpochPlan, ranks: int) -> None:
    if len(plan.users) < ranks:
        raise ConfigError(
            f"{len(plan.users)} users can be trained on, fewer than the {ranks} ranks: start at most "
            f"{len(plan.users)} ranks."
        )


def ensure_rows_fit(plan: EpochPlan, limit: int, store: Store) -> None:
    """Refuse a limit of tokens per rank below the longest row, naming its user."""
    longest = int(plan.tokens.argmax())
    if limit and plan.tokens[longest] > limit:
        user = store.raw_users([int(plan.users[longest])])[0]
        raise ConfigError(
            f"balance.rank_tokens {limit} is below the {plan.tokens[longest]} tokens of user {user!r}: raise it, cut "
            f"histories by model.max_history {limit}, or cut them into windows by balance.window {limit}."
        )


def _windows(users: np.ndarray, tokens: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(users, skips, tokens) of rows: users longer than `window` in as few pieces of like length as that allows."""
    if not window:
        return users, np.zeros_like(users), tokens
    pieces = -(-tokens // window)
    owner = np.repeat(np.arange(len(users)), pieces)
    piece = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    skips = piece * tokens[owner] // pieces[owner]
    return users[owner], skips, (piece + 1) * tokens[owner] // pieces[owner] - skips


def _token_threshold(tokens: np.ndarray, config: TrainConfig) -> int:
    """As many tokens as batch_users rows have on average, where batches are given by users."""
    if not config.batch_users:
        return config.batch_tokens
    return max(round(config.batch_users * float(tokens.mean())), 1)


def token_bounds(lengths: np.ndarray, budget: int) -> np.ndarray:
    """Where batches of whole rows begin and end, of up to `budget` tokens each; a longer row is one of its own."""
    ends = np.cumsum(lengths)
    bounds = [0]
    while bounds[-1] < len(lengths):
        done = ends[bounds[-1] - 1] if bounds[-1] else 0
        bounds.append(max(bounds[-1] + 1, int(np.searchsorted(ends, done + budget, side="right"))))
    return np.array(bounds)
