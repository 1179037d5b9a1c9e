"""Which rows of a global batch each rank computes.

The pool of a global batch is `balance.batches` consecutive batches of the epoch's plan. Every rank knows all lengths
from the store, so that each works out the same deal without a word to the others.

n rows of the pool, W ranks
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from turbogr.config import BalanceConfig
from turbogr.data.balance import partition
from turbogr.data.batching import EpochPlan, Selection, token_bounds

Cost = Callable[[np.ndarray], np.ndarray]
"""Lengths [n] -> what rows of that many tokens cost, float64 [n]."""


@dataclass(frozen=True)
class Pool:
    """The rows of one global batch, and the batch of the plan that each was drawn in."""

    rows: Selection
    batch: np.ndarray  # int64 [n] 0 .. batches - 1
    batches: int

    @classmethod
    def of(cls, plan: EpochPlan, begin: int, end: int, batches: int, first_number: int) -> "Pool":
        """Batches begin .. end of the plan; at an epoch's end they are fewer than `batches`."""
        sizes = np.diff(plan.bounds[begin : end + 1])
        return cls(plan.batches(begin, end, first_number), np.repeat(np.arange(end - begin), sizes), batches)


class Dealer:
    """Deals pools out to the ranks of a run."""

    def __init__(self, config: BalanceConfig, rank: int, world: int, cost: Cost) -> None:
        self.config, self.rank, self.world = config, rank, world
        self.cost = cost

    def deal(self, pool: Pool, *, together: bool = False) -> list[Selection]:
        """This rank's rows of the pool, in turns that hold balance.rank_tokens; one without rows where it has none.

        `together`: as many turns as the rank with the most of them has.
        """
        owners = self.owners(pool)
        mine = pool.rows.take(np.flatnonzero(owners == self.rank))
        if self.config.users == "exchanged":
            return [mine]  # the ranks swap rows afterwards, once for every pool
        limit = self.config.rank_tokens or self._memory_of_a_batch(pool)
        own = turns(mine, limit)
        if not together or not limit:
            return own
        others = (len(turns(pool.rows.take(np.flatnonzero(owners == rank)), limit)) for rank in range(self.world))
        return own + [mine.take(np.zeros(0, np.int64))] * (max(others) - len(own))

    def _memory_of_a_batch(self, pool: Pool) -> int:
        """Where ranks do the work of several, they do it in turns, so that none holds more than it would have to."""
        if pool.batches <= self.world:
            return 0
        tokens = pool.rows.tokens
        return max(-(-int(tokens.sum()) // pool.batches), int(tokens.max()))

    def owners(self, pool: Pool) -> np.ndarray:
        """int64 [n]: the rank of every row."""
        if self.world > 1 and self.config.strategy == "global" and self.config.users == "planned":
            costs = self.cost(pool.rows.tokens)
            return partition(costs, pool.rows.tokens, self.world, self.config.rank_tokens)
        return drawn_owners(pool, self.world)

    def oversized(self, pool: Pool) -> int:
        """Rows that alone cost more than a rank's fair share of the pool."""
        if self.world == 1:
            return 0
        costs = self.cost(pool.rows.tokens)
        return int(np.count_nonzero(costs * self.world > costs.sum() * (1 + 1e-9)))


def drawn_owners(pool: Pool, world: int) -> np.ndarray:
    """int64 [n]: ranks take the batches as they were drawn, neighbours where there are more batches than ranks."""
    return pool.batch * world // pool.batches


def turns(rows: Selection, limit: int) -> list[Selection]:
    """`rows` in as few pieces of at most `limit` tokens as their order allows (0: one piece)."""
    if not limit or rows.tokens.sum() <= limit:
        return [rows]
    return [rows.take(np.arange(*one)) for one in pairwise(token_bounds(rows.tokens, limit))]
