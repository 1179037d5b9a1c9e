from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.evaluate.scorers import TableScorer, random_case
from tests.support.tiny_store import tiny_store
from turbogr.config import EvaluateConfig, SplitConfig
from turbogr.data.split import make_split
from turbogr.errors import DataError
from turbogr.evaluate import Exclude, evaluate, evaluate_predictions, read_queries, top_k
from turbogr.evaluate.card import card_lines
from turbogr.evaluate.ranking import Filter

CONFIG = EvaluateConfig()


def write(path: Path, **columns: Any) -> Path:
    table = pa.table(columns)
    if path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("order_by", ["rank", "score"])
@pytest.mark.parametrize("history_left_in", [False, True])
def test_a_models_own_lists_score_as_the_model_does(
    tmp_path: Path, suffix: str, order_by: str, history_left_in: bool
) -> None:
    store, split, scorer = random_case(tmp_path / "store", 4, num_items=80, repeats=False)
    scorer.table = np.random.default_rng(0).permuted(np.arange(12 * 80, dtype=np.float32).reshape(12, 80), axis=1)
    queries = read_queries(store, split.test.user, split.test.event, 5)
    none = Exclude.of(np.zeros(len(queries) + 1, np.int64), np.zeros(0, np.int64))
    exclude = none if history_left_in else Exclude.of(queries.offsets, queries.item)
    best = top_k(scorer, queries, 60, exclude=exclude, item_chunk=7)
    value = np.tile(np.arange(60), (len(queries), 1)) if order_by == "rank" else best.scores.numpy()
    shuffled = np.random.default_rng(1).permutation(best.items.numel())
    path = write(
        tmp_path / f"theirs{suffix}",
        user=(1000 + np.repeat(queries.users, 60))[shuffled],
        item=(500 + best.items.numpy().ravel())[shuffled],
        **{order_by: value.ravel()[shuffled]},
    )
    found = evaluate_predictions(path, store, split, config=CONFIG, max_history=5)
    model = evaluate({"model": scorer}, store, split, config=CONFIG, max_history=5)
    for name in ("hr@1", "hr@10", "hr@50", "ndcg@10", "ndcg@50"):
        assert found.metrics["theirs"][name] == model.metrics["model"][name]
    assert 0 < model.metrics["model"]["hr@50"] < 1
    assert (found.card["predictions"]["history_items_removed"] > 0) == history_left_in
    own = ("predictions", "next_time")
    assert {key: value for key, value in found.card.items() if key not in own} == {
        key: value for key, value in model.card.items() if key not in own
    }


@pytest.fixture
def case(tmp_path: Path):
    """Users 1000, 1001 and 1003 are tested on items 502, 503 and 500; user 1002 has one event."""
    store = tiny_store(tmp_path / "store", [[0, 1, 2], [1, 3], [4], [4, 0]], num_items=6)
    return store, make_split(store, SplitConfig())


def test_absent_targets_and_absent_users_are_misses_and_stated(case, tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", user=[1000, 1000, 1001, 1002], item=[505, 502, 504, 505], rank=[1, 2, 1, 1])
    found = evaluate_predictions(path, *case, config=CONFIG, max_history=5)
    assert found.metrics["p"]["mrr"] == pytest.approx(0.5 / 3)
    assert found.card["predictions"] == {
        "file": "p.csv",
        "longest_list": 2,
        "shorter_lists_after_the_filter": 1,
        "users_missing_counted_as_misses": 1,
        "users_without_target_ignored": 1,
        "history_items_removed": 0,
    }


def test_cutoffs_beyond_the_longest_list_are_left_out(case, tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", user=[1000, 1000], item=[505, 502], rank=[1, 2])
    found = evaluate_predictions(path, *case, config=CONFIG, max_history=5)
    assert set(found.metrics["p"]) == {"hr@1", "mrr"}


def test_history_in_a_list_is_removed_before_places_are_counted(case, tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", user=[1000] * 3, item=[500, 501, 502], rank=[1, 2, 3])
    found = evaluate_predictions(path, *case, config=CONFIG, max_history=5)
    assert found.metrics["p"]["hr@1"] == pytest.approx(1 / 3)
    assert found.card["predictions"]["history_items_removed"] == 2
    unfiltered = evaluate_predictions(path, *case, config=EvaluateConfig(filter="none"), max_history=5)
    assert unfiltered.metrics["p"]["hr@1"] == 0


def test_equal_scores_in_a_list_follow_the_tie_rule(case, tmp_path: Path) -> None:
    path = write(tmp_path / "p.csv", user=[1000] * 3, item=[503, 504, 502], score=[1.0, 1.0, 1.0])
    found = evaluate_predictions(path, *case, config=CONFIG, max_history=5)
    assert found.metrics["p"]["mrr"] == pytest.approx(0.5 / 3)  # two others tie: 1 + 0 + 1


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"user": [7], "item": [500], "rank": [1]}, "unknown user 7"),
        ({"user": [1000], "item": [7], "rank": [1]}, "unknown item 7"),
        ({"user": [1000, 1000], "item": [500, 500], "rank": [1, 2]}, "user 1000 with item 500 stands there twice"),
        ({"user": [1000, 1000], "item": [500, 501], "rank": [1, 1]}, "shares rank 1"),
        ({"user": [1000], "item": [500]}, "lacks a column 'rank' or 'score'"),
        ({"item": [500], "rank": [1]}, "lacks column 'user'"),
        ({"user": [1000], "item": [500], "score": [None]}, "row 1 has no score"),
        ({"user": [1000], "item": [500], "score": ["high"]}, "'score' is not a number"),
        ({"user": ["anna"], "item": [500], "rank": [1]}, "anna"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_file_that_cannot_be_meant_is_refused(
    case, tmp_path: Path, columns: dict[str, list[Any]], sentence: str, suffix: str
) -> None:
    path = write(tmp_path / f"p{suffix}", **columns)
    with pytest.raises(DataError, match=sentence):
        evaluate_predictions(path, *case, config=CONFIG, max_history=5)


def test_a_file_that_is_absent_or_of_another_kind_is_refused(case, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        evaluate_predictions(tmp_path / "none.csv", *case, config=CONFIG, max_history=5)
    with pytest.raises(DataError, match="neither .csv nor .parquet"):
        evaluate_predictions(tmp_path / "none.pkl", *case, config=CONFIG, max_history=5)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_folder_in_the_files_place_is_refused(case, tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"x{suffix}").mkdir()
    with pytest.raises(DataError, match=f"x{suffix} is a folder: name one file of predictions"):
        evaluate_predictions(tmp_path / f"x{suffix}", *case, config=CONFIG, max_history=5)


@pytest.mark.parametrize("filter", ["visible", "history", "none"])
def test_the_card_of_lists_claims_nothing_of_a_model(case, tmp_path: Path, filter: Filter) -> None:
    path = write(tmp_path / "p.csv", user=[1000], item=[502], rank=[1])
    found = evaluate_predictions(path, *case, config=EvaluateConfig(filter=filter), max_history=5)
    lines = card_lines(found.card)
    assert [line for line in lines if "model" in line] == []
    assert "next time: unknown: the file does not say what its lists were made from" in lines


def test_a_users_repeated_target_is_not_removed_from_its_list(tmp_path: Path) -> None:
    store = tiny_store(tmp_path / "store", [[0, 1, 0]], num_items=3)
    split = make_split(store, SplitConfig())
    path = write(tmp_path / "p.csv", user=[1000, 1000], item=[501, 500], rank=[1, 2])
    found = evaluate_predictions(path, store, split, config=CONFIG, max_history=5)
    scorer = TableScorer(np.array([[2, 3, 1]], np.float32))
    model = evaluate({"model": scorer}, store, split, config=CONFIG, max_history=5)
    assert found.metrics["p"]["hr@1"] == model.metrics["model"]["hr@1"] == 1
    assert found.card["repeat_targets"] == model.card["repeat_targets"] == 1
