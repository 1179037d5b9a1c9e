"""The sequential schedule: one verb, every stage in order."""

from collections.abc import Callable

import numpy as np

from turbogr.data.batching import Selection
from turbogr.train.schedule import SequentialSchedule
from turbogr.train.spans import Spans
from turbogr.train.step import Stage, StepContext, StepSums


def recorder() -> tuple[list[tuple[str, int]], list[Stage]]:
    """Stages that note (their name, number of the batch)."""
    seen: list[tuple[str, int]] = []

    def note(name: str) -> Callable[[StepContext], None]:
        return lambda context: seen.append((name, len(context.rows)))

    stages = [Stage("a", note("a")), Stage("b", note("b")), Stage("u", note("u"), once=True)]
    return seen, stages


def rows_of(count: int) -> Selection:
    """As many rows as the batch's number says."""
    return Selection.of(np.zeros(count, np.int64), np.zeros(count, np.int64))


def batches(*completes: bool) -> list[StepContext]:
    sums = StepSums()
    return [StepContext(0, rows_of(number), done, sums) for number, done in enumerate(completes)]


def test_stages_run_in_order_per_batch_and_updates_once_per_step() -> None:
    """Catches: an update after every micro-batch, or a batch read before the one before it is done."""
    seen, stages = recorder()
    contexts = batches(False, True, True)
    stream = iter(contexts)
    schedule = SequentialSchedule(stages, Spans())
    assert schedule.progress(stream) is contexts[1].sums
    assert seen == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("u", 1)]
    assert schedule.progress(stream) is contexts[2].sums
    assert seen[5:] == [("a", 2), ("b", 2), ("u", 2)]
    assert schedule.progress(stream) is None


def test_a_batch_is_taken_only_when_its_turn_comes() -> None:
    """Catches: a schedule called sequential that reads ahead."""
    _, stages = recorder()
    stream = iter(batches(True, True, True))
    SequentialSchedule(stages, Spans()).progress(stream)
    assert len(list(stream)) == 2


def test_every_stage_that_ran_has_a_span() -> None:
    """Catches: a stage whose time is missing from the step's account."""
    _, stages = recorder()
    spans = Spans()
    schedule, stream = SequentialSchedule(stages, spans), iter(batches(False, True))
    schedule.progress(stream)
    assert sorted(spans.take()) == ["a", "b", "u"] and spans.take() == {}
