import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tests.evaluate.scorers import TableScorer, random_case
from tests.support.tiny_store import tiny_store
from turbogr.config import EvaluateConfig, SplitConfig
from turbogr.data.split import make_split
from turbogr.evaluate import METRICS, RandomScorer, baselines, evaluate, rank_targets, retrieval_metrics


def rendered(evaluation) -> str:
    text = io.StringIO()
    Console(width=200, file=text).print(evaluation.render())
    return text.getvalue()


def test_scorers_stand_side_by_side_with_the_metrics_of_their_ranks(tmp_path: Path) -> None:
    store, split, scorer = random_case(tmp_path, 0)
    config = EvaluateConfig(batch_users=5, item_chunk=8)
    found = evaluate({"model": scorer, **baselines(store, split)}, store, split, config=config, max_history=5)
    ranks = rank_targets(scorer, store, split.test, max_history=5, batch_users=5, item_chunk=8).ranks
    assert found.metrics["model"] == retrieval_metrics(ranks)
    assert list(found.metrics) == ["model", "popularity", "markov"]


def test_the_card_states_protocol_catalogue_filter_and_rules(tmp_path: Path) -> None:
    store, _, scorer = random_case(tmp_path, 0)
    split = make_split(store, SplitConfig(protocol="leave-one-out-validation"))
    found = evaluate({"model": scorer}, store, split, "validation", config=EvaluateConfig(), max_history=5)
    card = found.card
    assert card["protocol"] == "leave-one-out-validation"
    assert card["which"] == "validation"
    assert card["catalogue_items"] == store.num_items
    assert card["users_evaluated"] == len(split.targets("validation"))
    assert card["users_skipped"] == split.skipped["validation"]
    assert card["filter"] == "visible"
    assert card["max_history"] == 5
    assert card["time_ties_at_target"] == 0
    text = rendered(found)
    for words in ("leave-one-out-validation", "30 items", "half of the other items", "share their time", *METRICS):
        assert words in text
    assert json.loads(json.dumps(found.to_json())) == found.to_json()


def test_repeat_targets_stand_on_the_card(tmp_path: Path) -> None:
    store, split, scorer = random_case(tmp_path, 2, num_items=4)
    goal = store.item[split.test.event]
    starts = np.maximum(store.offsets[split.test.user], split.test.event - 5)
    visible = [store.item[a:b] for a, b in zip(starts, split.test.event, strict=True)]
    expected = sum(one in history for one, history in zip(goal, visible, strict=True))
    assert expected > 0
    found = evaluate({"model": scorer}, store, split, config=EvaluateConfig(), max_history=5)
    assert found.card["repeat_targets"] == expected


def test_a_drawn_part_of_the_users_is_said_on_the_card(tmp_path: Path) -> None:
    store, split, scorer = random_case(tmp_path, 0)
    config = EvaluateConfig(max_users=4)
    found = evaluate({"model": scorer}, store, split, config=config, max_history=5, seed=7)
    assert found.card["users_evaluated"] == 4
    assert found.card["users_drawn_by_seed"] == 7
    assert "drawn by seed 7" in rendered(found)


@pytest.mark.parametrize(("batch_users", "item_chunk"), [(1, 1), (3, 7), (100, 100)])
def test_batch_and_chunk_sizes_change_nothing(tmp_path: Path, batch_users: int, item_chunk: int) -> None:
    store, split, scorer = random_case(tmp_path, 9)
    scorers = {"model": scorer, "random": RandomScorer(store.num_items), **baselines(store, split)}
    usual = evaluate(scorers, store, split, config=EvaluateConfig(), max_history=5)
    config = EvaluateConfig(batch_users=batch_users, item_chunk=item_chunk)
    assert evaluate(scorers, store, split, config=config, max_history=5).to_json() == usual.to_json()


def test_progress_is_told_which_scorer_is_how_far(tmp_path: Path) -> None:
    store, split, scorer = random_case(tmp_path, 0)
    notes: list[str] = []
    evaluate({"model": scorer}, store, split, config=EvaluateConfig(), max_history=5, progress=notes.append)
    assert notes == [f"evaluate model {len(split.test)}/{len(split.test)}"]


def test_targets_tied_in_time_stand_on_the_card(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1], [1, 2]], [[5, 5], [5, 6]])
    split = make_split(store, SplitConfig())
    found = evaluate({"random": RandomScorer(3)}, store, split, config=EvaluateConfig(), max_history=5)
    assert found.card["time_ties_at_target"] == 1


def test_the_configured_filter_is_the_one_that_ranks(tmp_path: Path) -> None:
    store = tiny_store(tmp_path, [[0, 1, 2]], num_items=4)
    scorer = TableScorer(np.array([[9, 8, 5, 1]], np.float32))
    split = make_split(store, SplitConfig())
    ranks = {}
    for filter in ("visible", "history", "none"):
        config = EvaluateConfig(filter=filter)
        found = evaluate({"model": scorer}, store, split, config=config, max_history=1)
        ranks[filter] = round(1 / found.metrics["model"]["mrr"])
    assert ranks == {"visible": 2, "history": 1, "none": 3}
