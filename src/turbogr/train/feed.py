"""The steps of an epoch as this rank meets them: which rows it computes, in which turns."""

from collections.abc import Iterator

from turbogr.config import Config
from turbogr.data.batching import EpochPlan, Selection
from turbogr.data.dealing import Dealer, Pool
from turbogr.train.step import StepContext, StepSums


class Feed:
    def __init__(self, config: Config, dealer: Dealer, *, together: bool = False) -> None:
        """`together`: the ranks go through every micro-batch side by side, those that have none without rows."""
        self.together = together
        self.step_batches = config.train.accumulate * config.balance.batches
        """Batches of the plan that a global step takes."""
        self.exchanged = config.balance.users == "exchanged"
        # where ranks read for themselves each brings one batch at a time
        self.pool_batches = min(config.balance.batches, dealer.world) if self.exchanged else config.balance.batches
        self.dealer = dealer

    def steps_of(self, plan: EpochPlan) -> int:
        return -(-len(plan) // self.step_batches)

    def contexts(self, plan: EpochPlan, done: int, step: int) -> Iterator[StepContext]:
        """This rank's micro-batches from batch `done` of the plan on, which begins global step `step`.

        Rows are numbered through the whole global step, in the order of the plan, whoever computes them.
        """
        for begin in range(done, len(plan), self.step_batches):
            sums = StepSums()
            turns = self._turns(plan, begin, sums)
            for number, rows in enumerate(turns, 1):
                yield StepContext(step, rows, completes=number == len(turns), sums=sums)
            step += 1

    def _turns(self, plan: EpochPlan, begin: int, sums: StepSums) -> list[Selection]:
        """This rank's rows of the step that begins at batch `begin`."""
        turns: list[Selection] = []
        number, pool_batches = 0, self.pool_batches
        for micro in range(begin, begin + self.step_batches, self.dealer.config.batches):
            end = min(micro + self.dealer.config.batches, len(plan))
            for first in range(micro, end, pool_batches):
                pool = Pool.of(plan, first, min(first + pool_batches, end), pool_batches, number)
                number += len(pool.rows)
                sums.oversized += self.dealer.oversized(pool)
                turns += self.dealer.deal(pool, together=self.together)
        if self.exchanged or self.together:
            return turns
        return [rows for rows in turns if len(rows)] or turns[:1]
