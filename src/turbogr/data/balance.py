"""Which rank takes which users of a global batch, so that every rank has the same work.

The cost of a user comes from outside: FLOPs (train/flops.py), or what was measured (cost_fit.py).

n users of one global batch, R ranks; `part` int64 [n] is the rank of every user
"""

from dataclasses import dataclass

import numpy as np

from turbogr.data.exchange_plan import fewest_moves, moved_tokens_bound
from turbogr.ops.partition import Goal, partition_users

__all__ = ["UserCost", "imbalance", "largest_first", "moved_tokens_bound", "partition", "rebalance"]

# A thousandth of what step times vary by themselves; below it the freedom left is used for equal tokens.
COST_GOAL, TOKEN_GOAL = 1e-4, 1e-3
# Combinations of users looked at, per user and at least: about a nanosecond each.
COST_WORK, TOKEN_WORK, LEAST_WORK = 300, 100, 300_000
SMALL = 0.01  # imbalance for which no more tokens are moved
RESOLUTION = 1 << 36  # of the costliest user, in whole numbers


@dataclass(frozen=True)
class UserCost:
    """Cost of a user with L tokens: linear * L + pair * L (L + 1) / 2, the pairs that causal attention has."""

    linear: float
    pair: float

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """float64, one cost per length."""
        tokens = lengths.astype(np.float64)
        cost: np.ndarray = self.linear * tokens + self.pair * (tokens * (tokens + 1) / 2)
        return cost


def imbalance(per_rank: np.ndarray) -> float:
    """(max - min) / max over ranks; 0 where there is nothing."""
    most = float(np.max(per_rank, initial=0))
    return (most - float(np.min(per_rank))) / most if most > 0 else 0.0


def partition(costs: np.ndarray, tokens: np.ndarray, ranks: int, token_limit: int = 0) -> np.ndarray:
    """`part` with equal cost per rank, and with near-equal tokens as far as that leaves room for it.

    No rank gets above `token_limit` tokens (0: no limit) if a partition into equal tokens finds room for all; else the
    limit is passed by as little as that partition passes it. Users stay whole; with n < R some ranks have none.
    """
    whole, sizes = _whole(costs), tokens.astype(np.int64)
    part = _sorted_partition(whole, sizes, ranks, token_limit)
    if (part < 0).any():
        by_tokens = _sorted_partition(sizes, sizes, ranks, 0)
        part = _sorted_partition(whole, sizes, ranks, token_limit, by_tokens)
    return part


def largest_first(costs: np.ndarray, ranks: int) -> np.ndarray:
    """`part` by the plain greedy rule, where `partition` begins: the costliest user left joins the lightest rank."""
    whole = _whole(costs)
    order = _costliest_first(whole)
    part = np.empty(len(order), np.int64)
    anything = Goal(load=1 << 60, tokens=1 << 60, load_work=0, token_work=0)
    part[order] = partition_users(whole[order], np.zeros_like(whole), ranks, 0, anything)
    return part


def rebalance(
    costs: np.ndarray, tokens: np.ndarray, owners: np.ndarray, ranks: int, token_limit: int = 0
) -> np.ndarray:
    """int64 [n]: a new rank for every user, for users that lie on `owners`: equal cost, few tokens moved.

    The imbalance aimed at is SMALL, or half more than `partition` leaves. Where no such exchange holds the token limit,
    a partition made afresh does, each part on the rank that holds most of it; where that passes it too, nobody moves.
    """
    owners, sizes = owners.astype(np.int64), tokens.astype(np.int64)
    if not len(owners) or ranks == 1:
        return owners
    afresh = partition(costs, sizes, ranks, token_limit)
    allowed = max(SMALL, 1.5 * imbalance(np.bincount(afresh, costs, ranks)))
    moved = fewest_moves(costs, sizes, owners, ranks, token_limit, allowed)
    if moved is not None:
        return moved
    if np.bincount(afresh, sizes, ranks).max() > token_limit:
        return owners
    return _at_home(afresh, sizes, owners, ranks)


def _at_home(part: np.ndarray, tokens: np.ndarray, owners: np.ndarray, ranks: int) -> np.ndarray:
    """The same parts, numbered so that each is on the rank that holds most of it."""
    shared = np.zeros((ranks, ranks), np.int64)
    np.add.at(shared, (part, owners), tokens)
    home = np.full(ranks, -1, np.int64)
    for _ in range(ranks):
        one, where = np.unravel_index(int(shared.argmax()), shared.shape)
        home[one] = where
        shared[one, :] = shared[:, where] = -1
    at_home: np.ndarray = home[part]
    return at_home


def _whole(costs: np.ndarray) -> np.ndarray:
    """Costs as int64: sums are then the same in any order, and every rank plans the same without asking."""
    most = float(np.max(costs, initial=0))
    scale = RESOLUTION / most if most > 0 else 0.0
    whole: np.ndarray = np.rint(costs * scale).astype(np.int64)
    return whole


def _sorted_partition(
    costs: np.ndarray, tokens: np.ndarray, ranks: int, limit: int, start: np.ndarray | None = None
) -> np.ndarray:
    n = len(costs)
    goal = Goal(
        load=int(int(costs.sum()) / ranks * COST_GOAL),
        tokens=int(int(tokens.sum()) / ranks * TOKEN_GOAL),
        load_work=max(COST_WORK * n, LEAST_WORK),
        token_work=max(TOKEN_WORK * n, LEAST_WORK // 3),
    )
    order = _costliest_first(costs)
    part = np.empty(n, np.int64)
    begin = None if start is None else start[order]
    part[order] = partition_users(costs[order], tokens[order], ranks, limit, goal, begin)
    return part


def _costliest_first(costs: np.ndarray) -> np.ndarray:
    """Equal costs in the order of the users."""
    numbered = len(costs) < 1 << 20
    # one key that holds the place too: the plain sort is then stable, and several times faster than the stable one
    return np.argsort(np.arange(len(costs)) - (costs << 20)) if numbered else np.argsort(-costs, kind="stable")
