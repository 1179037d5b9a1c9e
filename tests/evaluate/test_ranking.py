from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.evaluate.scorers import TableScorer, random_case
from tests.support.tiny_store import tiny_store
from turbogr.config import SplitConfig
from turbogr.data.split import Targets, make_split
from turbogr.errors import TrainingError
from turbogr.evaluate import Exclude, Queries, RankResult, draw_targets, rank_targets, read_queries, top_k

many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def ranked(scorer, store, targets, *, max_history=5, batch_users=4, item_chunk=7, filter="visible") -> RankResult:
    return rank_targets(
        scorer,
        store,
        targets,
        max_history=max_history,
        batch_users=batch_users,
        item_chunk=item_chunk,
        filter=filter,
    )


def oracle(store, targets, scores: np.ndarray, max_history: int, filter: str) -> list[int]:
    ranks = []
    for user, event in zip(targets.user, targets.event, strict=True):
        goal, history = store.item[event], store.item[store.offsets[user] : event]
        removed = {"visible": history[-max_history:], "history": history, "none": []}[filter]
        rivals = [i for i in range(store.num_items) if i != goal and i not in removed]
        row = scores[user]
        greater = sum(row[i] > row[goal] for i in rivals)
        ranks.append(1 + greater + (1 + sum(row[i] == row[goal] for i in rivals)) // 2)
    return ranks


@given(
    seed=st.integers(0, 10**6),
    max_history=st.integers(1, 13),
    batch_users=st.integers(1, 13),
    item_chunk=st.integers(1, 31),
    filter=st.sampled_from(["visible", "history", "none"]),
)
@many
def test_ranks_agree_with_a_plain_count(
    tmp_path: Path, seed: int, max_history: int, batch_users: int, item_chunk: int, filter: str
) -> None:
    store, split, scorer = random_case(tmp_path, seed)
    result = ranked(
        scorer,
        store,
        split.test,
        max_history=max_history,
        batch_users=batch_users,
        item_chunk=item_chunk,
        filter=filter,
    )
    assert result.ranks.tolist() == oracle(store, split.test, scorer.table, max_history, filter)


def test_a_model_that_scores_everything_alike_lands_in_the_middle(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1], [2, 3]], num_items=101)
    result = ranked(TableScorer(np.zeros((2, 101), np.float32)), store, make_split(store, SplitConfig()).test)
    assert result.ranks.tolist() == [51, 51]  # 99 items tie with the target: 1 + 0 + 50


def test_a_repeated_target_is_ranked_and_counted(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1, 0, 1], [1, 2]], num_items=3)
    scorer = TableScorer(np.array([[9, 5, 1], [9, 5, 1]], np.float32))
    result = ranked(scorer, store, make_split(store, SplitConfig()).test)
    assert result.repeat_targets == 1
    assert result.ranks.tolist() == [1, 2]  # item 0 is removed from the first, item 1 from the second


def test_a_target_repeated_from_beyond_the_visible_history_is_not_counted(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1, 2, 0]], num_items=4)
    scorer = TableScorer(np.zeros((1, 4), np.float32))
    assert ranked(scorer, store, make_split(store, SplitConfig()).test, max_history=2).repeat_targets == 0


def test_a_scorer_never_sees_an_event_at_or_after_the_target(tmp_path: Path) -> None:
    store, split, _ = random_case(tmp_path, 3, repeats=True)

    class Spy(TableScorer):
        def encode(self, queries: Queries) -> torch.Tensor:
            for row, user in enumerate(queries.users):
                event = int(split.test.event[split.test.user == user][0])
                begin = max(int(store.offsets[user]), event - 5)
                part = slice(queries.offsets[row], queries.offsets[row + 1])
                assert queries.item[part].tolist() == store.item[begin:event].tolist()
                assert queries.time[part].tolist() == store.time[begin:event].tolist()
                assert queries.next_time[row] == store.time[event]
                seen.append(user)
            return super().encode(queries)

    seen: list[int] = []
    ranked(Spy(np.zeros((store.num_users, store.num_items), np.float32)), store, split.test)
    assert sorted(seen) == split.test.user.tolist()


def test_times_are_read_in_whole_seconds(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1, 2]], [[999, 1000, 2500]], time_units_per_second=1000)
    queries = read_queries(store, np.array([0]), np.array([2]), 10)
    assert queries.time.tolist() == [0, 1]
    assert queries.next_time.tolist() == [2]


def test_a_score_that_is_nan_stops_with_the_users_name(tmp_path: Path) -> None:
    store, split, scorer = random_case(tmp_path, 0)
    user = int(split.test.user[2])
    scorer.table[user, 11] = np.nan
    with pytest.raises(TrainingError, match=f"user {1000 + user} "):
        ranked(scorer, store, split.test)
    with pytest.raises(TrainingError, match="query 2 "):
        top_k(scorer, _queries(store, split.test), 3, exclude=_none(split.test), item_chunk=7)


def test_no_more_than_a_chunk_is_scored_at_a_time(tmp_path: Path) -> None:
    store, split, _ = random_case(tmp_path, 1)
    widths = []

    class Spy(TableScorer):
        def scores(self, encoded: torch.Tensor, start: int, stop: int) -> torch.Tensor:
            widths.append(stop - start)
            return super().scores(encoded, start, stop)

    spy = Spy(np.zeros((store.num_users, store.num_items), np.float32))
    ranked(spy, store, split.test, item_chunk=7)
    assert max(widths) == 7
    widths.clear()
    ranked(spy, store, split.test, item_chunk=100, batch_users=1000)
    assert widths == [store.num_items]  # one chunk: one product


@given(seed=st.integers(0, 10**6), k=st.integers(1, 40), item_chunk=st.integers(1, 31))
@many
def test_top_k_is_a_full_sort_by_score_and_then_item(tmp_path: Path, seed: int, k: int, item_chunk: int) -> None:
    store, split, scorer = random_case(tmp_path, seed)
    scorer.table[:, ::5] *= -0.0
    scorer.table[0, 4] = -np.inf
    queries = _queries(store, split.test)
    exclude = Exclude.of(queries.offsets, queries.item, everywhere=[3, 8])
    best = top_k(scorer, queries, k, exclude=exclude, item_chunk=item_chunk)
    for row, user in enumerate(split.test.user):
        history = queries.item[queries.offsets[row] : queries.offsets[row + 1]]
        left = [i for i in range(store.num_items) if i not in history and i not in (3, 8)]
        expected = sorted(left, key=lambda i: (-scorer.table[user, i], i))[:k]
        padding = k - len(expected)
        assert best.items[row].tolist() == expected + [-1] * padding
        assert best.scores[row].tolist() == scorer.table[user, expected].tolist() + [-np.inf] * padding


def test_users_are_drawn_by_the_seed_alone_and_stay_in_order() -> None:
    targets = Targets(np.arange(0, 200, 2), np.arange(100) * 7)
    drawn = draw_targets(targets, 30, seed=1)
    assert len(drawn) == 30
    assert (np.diff(drawn.user) > 0).all()
    assert (drawn.event == drawn.user // 2 * 7).all()
    assert drawn.user.tolist() == draw_targets(targets, 30, seed=1).user.tolist()
    assert drawn.user.tolist() != draw_targets(targets, 30, seed=2).user.tolist()
    assert draw_targets(targets, 0, seed=1) is targets
    # a part of the users keeps their lots: those of the larger draw that are present come first
    fewer = draw_targets(targets.take(np.arange(60)), 10, seed=1)
    assert set(draw_targets(targets.take(np.arange(60)), 5, seed=1).user) <= set(fewer.user)


def _queries(store, targets) -> Queries:
    return read_queries(store, targets.user, targets.event, 5)


def _none(targets) -> Exclude:
    return Exclude.of(np.zeros(len(targets) + 1, np.int64), np.zeros(0, np.int64))
