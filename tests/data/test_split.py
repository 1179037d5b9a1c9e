from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.tiny_store import tiny_store
from turbogr.config import SplitConfig
from turbogr.data import split as module
from turbogr.data.split import (
    Targets,
    ensure_not_trained_past,
    make_split,
    ties_at_target,
    training_chunks,
    training_counts,
)
from turbogr.data.store import Store
from turbogr.errors import ConfigError, DataError

LAST = SplitConfig()
LAST_TWO = SplitConfig(protocol="leave-one-out-validation")
ROWS = [[0], [0, 1], [2, 3, 4], [4, 3, 2, 1]]


def by_time(time: int, validation: int | None = None) -> SplitConfig:
    return SplitConfig(protocol="global-time", time=time, validation_time=validation)


def pairs(targets: Targets) -> list[tuple[int, int]]:
    return list(zip(targets.user.tolist(), targets.event.tolist(), strict=True))


def test_leave_one_out_tests_the_last_event_and_trains_before_it(tmp_path: Path) -> None:
    split = make_split(tiny_store(tmp_path, ROWS), LAST)
    assert pairs(split.test) == [(1, 2), (2, 5), (3, 9)]
    assert split.train_end.tolist() == [0, 2, 5, 9]
    assert split.validation is None


def test_a_user_with_one_event_is_skipped_and_counted(tmp_path: Path) -> None:
    split = make_split(tiny_store(tmp_path, ROWS), LAST)
    assert 0 not in split.test.user
    assert split.skipped["test"] == {"fewer than two events": 1}


def test_leave_one_out_validation_trains_on_neither_of_the_last_two(tmp_path: Path) -> None:
    split = make_split(tiny_store(tmp_path, ROWS), LAST_TWO)
    assert pairs(split.test) == [(1, 2), (2, 5), (3, 9)]
    assert pairs(split.targets("validation")) == [(2, 4), (3, 8)]
    assert split.train_end.tolist() == [0, 2, 4, 8]


def test_a_user_with_two_events_is_tested_but_has_no_validation(tmp_path: Path) -> None:
    split = make_split(tiny_store(tmp_path, ROWS), LAST_TWO)
    assert split.skipped["validation"] == {"fewer than two events": 1, "two events": 1}


def test_global_time_tests_the_first_event_from_the_moment_on(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1, 2], [0, 1], [0, 1]], [[1, 10, 11], [10, 12], [1, 2]])
    split = make_split(store, by_time(10))
    assert pairs(split.test) == [(0, 1)]
    assert split.train_end.tolist() == [1, 3, 7]
    assert list(split.skipped["test"].values()) == [1, 1]


def test_global_time_with_validation_ends_training_at_the_validation(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1, 2, 3], [0, 1]], [[1, 5, 6, 10], [1, 10]])
    split = make_split(store, by_time(10, validation=5))
    assert pairs(split.targets("validation")) == [(0, 1)]
    assert pairs(split.test) == [(0, 3), (1, 5)]
    assert split.train_end.tolist() == [1, 5]


@given(
    rows=st.lists(st.lists(st.integers(0, 6), max_size=6).map(sorted), min_size=1, max_size=6),
    moment=st.integers(0, 6),
    chunk=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_boundary_in_time_is_that_of_a_search_per_user(
    tmp_path: Path, rows: list[list[int]], moment: int, chunk: int
) -> None:
    store = tiny_store(tmp_path, [[0] * len(row) for row in rows], rows, num_items=1)
    expected = [o + int(np.searchsorted(row, moment)) for o, row in zip(store.offsets[:-1], rows, strict=True)]
    assert module._first_at_or_after(store, moment, chunk).tolist() == expected


@pytest.mark.parametrize("config", [LAST, LAST_TWO, by_time(4), by_time(4, validation=2)])
def test_no_training_event_stands_at_or_after_a_target(tmp_path: Path, config: SplitConfig) -> None:
    times = np.random.default_rng(0).integers(0, 8, (40, 7))
    store = tiny_store(tmp_path, [[0] * 7] * 40, np.sort(times, 1).tolist())
    split = make_split(store, config)
    for targets in filter(None, (split.test, split.validation)):
        assert (split.train_end[targets.user] <= targets.event).all()
        assert (store.offsets[targets.user] < targets.event).all()  # everybody has a history
    if config.protocol == "global-time":
        trained = np.arange(store.num_events) < np.repeat(split.train_end, 7)
        assert store.time[trained].max() < (config.validation_time or config.time)


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_training_chunks_know_each_events_training_end(tmp_path: Path, chunk: int) -> None:
    store = tiny_store(tmp_path, [*ROWS, [], [1, 2]])
    split = make_split(store, LAST)
    ends = np.concatenate([ends for _, _, ends in training_chunks(store, split, chunk)])
    assert ends.tolist() == np.repeat(split.train_end, np.diff(store.offsets)).tolist()


def test_training_counts_leave_out_what_is_predicted(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, ROWS)
    assert training_counts(store, make_split(store, LAST)).tolist() == [1, 0, 2, 2, 1]
    assert training_counts(store, make_split(store, LAST_TWO)).tolist() == [1, 0, 1, 1, 1]


def test_targets_that_share_their_time_with_the_event_before_are_counted(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1], [0, 1], [0, 1]], [[5, 5], [5, 6], [7, 7]])
    assert ties_at_target(store, make_split(store, LAST).test) == 2


def test_a_log_in_which_no_user_has_two_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no user of .* has two events"):
        make_split(tiny_store(tmp_path, [[0], [1]]), LAST)


def test_a_split_time_outside_the_log_is_refused_with_its_times(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="from 0 to 3"):
        make_split(tiny_store(tmp_path, ROWS), by_time(99))


def test_validation_targets_of_a_protocol_without_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no validation"):
        make_split(tiny_store(tmp_path, ROWS), LAST).targets("validation")


@pytest.mark.parametrize(
    ("trained", "wanted", "which"),
    [
        (LAST, LAST_TWO, "validation"),  # its validation item was trained on
        (LAST, by_time(10), "test"),
        (LAST_TWO, by_time(10), "test"),
        (by_time(11), by_time(10), "test"),
        (by_time(11, validation=5), by_time(10), "test"),  # selected on what lies between 5 and 11
        (by_time(10), by_time(10, validation=5), "validation"),
        (by_time(10, validation=6), by_time(10, validation=5), "validation"),
        (by_time(10), LAST, "test"),
    ],
)
def test_evaluating_on_what_was_trained_on_is_refused(trained: SplitConfig, wanted: SplitConfig, which: str) -> None:
    with pytest.raises(ConfigError, match="trained"):
        ensure_not_trained_past(trained, wanted, which)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trained", "wanted", "which"),
    [
        (LAST, LAST, "test"),
        (LAST, LAST_TWO, "test"),  # the same test items
        (LAST_TWO, LAST, "test"),
        (LAST_TWO, LAST_TWO, "validation"),
        (by_time(10), by_time(10), "test"),
        (by_time(9), by_time(10), "test"),
        (by_time(10, validation=5), by_time(10, validation=5), "validation"),
        (by_time(5), by_time(10, validation=5), "validation"),
    ],
)
def test_evaluating_on_what_training_never_saw_is_allowed(
    trained: SplitConfig, wanted: SplitConfig, which: str
) -> None:
    ensure_not_trained_past(trained, wanted, which)  # type: ignore[arg-type]


@pytest.mark.parametrize("item", [5, 99, -1])
def test_an_item_that_the_store_does_not_have_is_said(tmp_path: Path, item: int) -> None:
    store = tiny_store(tmp_path, ROWS)
    column = np.array(store.item)
    column[3] = item
    np.save(tmp_path / "item.npy", column)
    store = Store.open(tmp_path)
    with pytest.raises(DataError, match=rf"item\.npy holds item {item} of 5 items: prepare the store again"):
        training_counts(store, make_split(store, LAST))
