from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.evaluate.scorers import random_case
from tests.support.tiny_store import tiny_store
from turbogr.config import SplitConfig
from turbogr.data import split as split_module
from turbogr.data.split import make_split
from turbogr.evaluate import Exclude, MarkovScorer, PopularityScorer, Queries, RandomScorer, read_queries, top_k

SPLITS = [
    SplitConfig(),
    SplitConfig(protocol="leave-one-out-validation"),
    SplitConfig(protocol="global-time", time=5),
    SplitConfig(protocol="global-time", time=7, validation_time=4),
]


def trained_rows(store, split) -> list[list[int]]:
    ranges = zip(store.offsets[:-1], split.train_end, strict=True)
    return [store.item[start:end].tolist() for start, end in ranges]


def ending_in(items: list[int]) -> Queries:
    count = len(items)
    return Queries(
        users=np.full(count, -1),
        offsets=np.arange(count + 1),
        item=np.array(items, np.int64),
        time=np.zeros(count, np.int64),
        next_time=np.zeros(count, np.int64),
    )


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module.training_chunks, "__defaults__", (5,))


@pytest.mark.parametrize("config", SPLITS, ids=str)
def test_popularity_orders_by_training_counts_only(tmp_path: Path, config: SplitConfig) -> None:
    store, _, _ = random_case(tmp_path, 5)
    split = make_split(store, config)
    counts = Counter(item for row in trained_rows(store, split) for item in row)
    scorer = PopularityScorer(store, split)
    assert scorer.counts.tolist() == [counts[i] for i in range(store.num_items)]
    row = scorer.scores(scorer.encode(ending_in([0])), 0, store.num_items)[0]
    for one in range(store.num_items):
        for other in range(store.num_items):
            assert (row[one] > row[other]) == (counts[one] > counts[other])


@pytest.mark.parametrize("pair_budget", [1, 4, 1000])
@pytest.mark.parametrize("config", SPLITS, ids=str)
def test_markov_orders_by_training_transitions_then_popularity(
    tmp_path: Path, config: SplitConfig, pair_budget: int
) -> None:
    store, _, _ = random_case(tmp_path, 6, users=30, num_items=9)
    split = make_split(store, config)
    rows = trained_rows(store, split)
    counts = Counter(item for row in rows for item in row)
    follows = Counter((a, b) for row in rows for a, b in zip(row, row[1:], strict=False))
    scorer = MarkovScorer(store, split, pair_budget)
    encoded = scorer.encode(ending_in(list(range(9))))
    scores = torch.cat([scorer.scores(encoded, start, min(start + 4, 9)) for start in (0, 4, 8)], 1)
    for last in range(9):
        keys = [(follows[last, item], counts[item]) for item in range(9)]
        for one in range(9):
            for other in range(9):
                assert (scores[last, one] > scores[last, other]) == (keys[one] > keys[other])


def test_markov_without_a_history_is_popularity(tmp_path: Path) -> None:
    store, split, _ = random_case(tmp_path, 7)
    none = Queries(
        np.array([-1]), np.array([0, 0]), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(1, np.int64)
    )
    scorers = MarkovScorer(store, split), PopularityScorer(store, split)
    best = [
        top_k(one, none, 9, exclude=Exclude.of(none.offsets, none.item), item_chunk=4).items.tolist() for one in scorers
    ]
    assert best[0] == best[1]


def test_markov_follows_the_last_item_of_the_history(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1, 2, 5], [3, 1, 2, 5], [4, 3, 4, 5], [2, 0, 1, 5]])
    split = make_split(store, SplitConfig())
    scorer = MarkovScorer(store, split)
    queries = read_queries(store, split.test.user[3:], split.test.event[3:], 2)
    assert scorer.scores(scorer.encode(queries), 0, 6)[0].argmax() == 2


def test_random_scores_depend_on_seed_user_and_item_only() -> None:
    def scores(users: list[int], start: int, stop: int, seed: int = 0) -> torch.Tensor:
        count = len(users)
        zero = np.zeros(count, np.int64)
        scorer = RandomScorer(1000, seed)
        empty = np.zeros(0, np.int64)
        queries = Queries(np.array(users), np.zeros(count + 1, np.int64), empty, empty, zero)
        return scorer.scores(scorer.encode(queries), start, stop)

    whole = scores([4, 9], 0, 1000)
    assert torch.equal(whole[1:, 300:420], scores([9], 300, 420))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole, scores([4, 9], 0, 1000, seed=1))
    assert 0.45 < whole.mean() < 0.55
    assert abs(np.corrcoef(whole.numpy())[0, 1]) < 0.1
