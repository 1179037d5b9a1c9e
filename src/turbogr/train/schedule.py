"""Schedules run the stages of a step over a stream of batches. One verb: `progress`.

Sequential: one batch at a time, every stage in order; batch b reads tables updated through batch b - 1 (staleness 0).
"""

from collections.abc import Iterator

from turbogr.train.spans import Spans
from turbogr.train.step import Stage, StepContext, StepSums


class SequentialSchedule:
    def __init__(self, stages: list[Stage], spans: Spans) -> None:
        self.stages = stages
        self.spans = spans

    def progress(self, batches: Iterator[StepContext]) -> StepSums | None:
        """Run batches until one step is complete; its sums, or None when there are no more."""
        for context in batches:
            for stage in self.stages:
                if context.completes or not stage.once:
                    with self.spans.span(stage.name):
                        stage.run(context)
            if context.completes:
                return context.sums
        return None
