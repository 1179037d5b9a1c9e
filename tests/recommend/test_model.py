"""Asking a model: users of the store, pasted histories, everybody; what is left out; what is refused."""

import copy
import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from tests.support.trained import ITEMS
from turbogr.config import SplitConfig
from turbogr.data.queries import Queries
from turbogr.data.store import Store
from turbogr.errors import CheckpointError, ConfigError, DataError, UserError
from turbogr.recommend.model import Model


def history_of(model: Model, user: str) -> tuple[list[int], list[int]]:
    """Raw items and seconds of a user's whole history."""
    store = model.store
    assert store is not None
    place = store.user_indices([user])[0]
    start, stop = store.offsets[place], store.offsets[place + 1]
    return store.raw_items(store.item[start:stop].tolist()), store.seconds(start, stop).tolist()


def latest_of(store: Store) -> int:
    return int(np.asarray(store.time).max()) // 1000


def test_an_answer_is_a_table_of_raw_ids_titles_and_falling_scores(model: Model) -> None:
    answer = model.recommend(["u3", "u1"], k=4)
    assert answer.column_names == ["user", "rank", "item", "title", "score"]
    assert answer["user"].to_pylist() == ["u3"] * 4 + ["u1"] * 4
    assert answer["rank"].to_pylist() == [1, 2, 3, 4] * 2
    assert [f"film [{item - 100}]" for item in answer["item"].to_pylist()] == answer["title"].to_pylist()
    scores = answer["score"].to_numpy().reshape(2, 4)
    assert (np.diff(scores) <= 0).all() and (scores <= 1).all()


def test_the_answer_is_the_best_of_a_plain_computation(model: Model) -> None:
    items, times = history_of(model, "u5")
    store, seen = model.store, {item - 100 for item in items}
    kept = model.config.model.max_history
    dense = store.item_indices(items)
    queries = Queries(
        np.array([5]),
        np.array([0, min(len(items), kept)]),
        dense[-kept:],
        np.array(times[-kept:]),
        np.array([latest_of(store)]),
    )
    scorer = model._scorer
    scores = scorer.scores(scorer.encode(queries), 0, ITEMS)[0].numpy()
    wanted = [100 + int(item) for item in np.argsort(-scores, kind="stable") if item not in seen][:10]
    answer = model.recommend("u5")
    assert answer["item"].to_pylist() == wanted
    np.testing.assert_allclose(answer["score"].to_numpy(), [scores[item - 100] for item in wanted], atol=1e-6)


def test_one_user_and_several_are_answered_alike(model: Model) -> None:
    users = [f"u{number}" for number in range(20)]  # three batches
    together = model.recommend(users, k=5)
    alone = pa.concat_tables(model.recommend(user, k=5) for user in users)
    assert together["item"].to_pylist() == alone["item"].to_pylist()
    np.testing.assert_allclose(together["score"].to_numpy(), alone["score"].to_numpy(), atol=1e-6)


def test_a_pasted_history_is_answered_like_the_user_who_has_it(model: Model) -> None:
    for user in ("u0", "u7"):  # u0 has more events than the model sees, and all of them count as seen
        items, times = history_of(model, user)
        pasted = model.recommend_history(items, times, k=8)
        stored = model.recommend(user, k=8)
        assert pasted["item"].to_pylist() == stored["item"].to_pylist()
        np.testing.assert_allclose(pasted["score"].to_numpy(), stored["score"].to_numpy(), atol=1e-6)


def test_the_held_out_event_is_seen_too(model: Model) -> None:
    items, _ = history_of(model, "u7")
    assert items[-1] not in model.recommend("u7", k=ITEMS)["item"].to_pylist()


def test_seen_items_are_left_out_unless_allowed(model: Model) -> None:
    items, times = history_of(model, "u0")
    rest = model.recommend("u0", k=ITEMS)["item"].to_pylist()
    assert len(rest) == ITEMS - len(set(items)) and not set(rest) & set(items)
    assert len(model.recommend("u0", k=ITEMS, allow_seen=True)) == ITEMS
    assert len(model.recommend_history(items, times, k=ITEMS)) == ITEMS - len(set(items))
    assert len(model.recommend_history(items, times, k=ITEMS, allow_seen=True)) == ITEMS


def test_excluded_items_go_to_nobody(model: Model) -> None:
    best = model.recommend(["u1", "u2"], k=3)["item"].to_pylist()
    rest = model.recommend(["u1", "u2"], k=3, exclude=best)["item"].to_pylist()
    assert len(rest) == 6 and not set(rest) & set(best)
    first = model.recommend_history([101], k=1)["item"].to_pylist()
    assert model.recommend_history([101], k=1, exclude=first)["item"].to_pylist() != first


def test_everybody_is_answered_in_the_order_of_the_store(model: Model) -> None:
    tables = list(model.recommend_all(k=2, batch_users=9))
    assert max(len(table) for table in tables) == 18
    every = pa.concat_tables(tables)
    assert every["user"].to_pylist()[::2] == model.store.users["raw_id"].to_pylist()
    assert (
        every["item"].to_pylist() == model.recommend(model.store.users["raw_id"].to_pylist(), k=2)["item"].to_pylist()
    )


def test_without_now_the_moment_is_the_stores_latest(model: Model) -> None:
    latest = latest_of(model.store)
    default = model.recommend("u4", k=ITEMS)
    assert default.equals(model.recommend("u4", k=ITEMS, now=latest))
    assert not default.equals(model.recommend("u4", k=ITEMS, now=latest + 10**7))  # the time bias sees it
    assert model.recommend_history([101, 102]).equals(model.recommend_history([101, 102], [latest] * 2, now=latest))
    assert model.recommend_history([101], [latest + 99]).equals(
        model.recommend_history([101], [latest + 99], now=latest + 99)
    )


def test_no_users_are_no_rows(model: Model) -> None:
    assert model.recommend([]).num_rows == 0
    assert model.recommend([]).column_names == ["user", "rank", "item", "title", "score"]


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        (lambda model: model.recommend(["u1", "nobody"]), "unknown user 'nobody'"),
        (lambda model: model.recommend_history([101, 7]), "unknown item 7:"),
        (lambda model: model.recommend_history([101.5]), "item ids of .* are integers"),
        (lambda model: model.recommend_history([2**70]), "item ids of .* are integers"),
        (lambda model: model.recommend_history([]), "the history is empty"),
        (lambda model: model.recommend_history([101, 102], [5]), "2 items and 1 times"),
        (lambda model: model.recommend_history([101, 102], [5, 4]), "time 4 follows 5"),
        (lambda model: model.recommend_history([101], [0.5]), "whole seconds"),
        (lambda model: model.recommend_history([101], [50], now=49), "now is 49 and a history reaches to 50"),
        (lambda model: model.recommend("u1", now=3), "now is 3 and a history reaches to"),
        (lambda model: model.recommend("u1", k=0), "k must be at least 1"),
        (lambda model: model.recommend("u1", exclude=["7"]), "unknown item '7'"),
    ],
)
def test_what_cannot_be_answered_is_said(model: Model, question, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        question(model)


def test_evaluation_uses_the_split_of_training_and_refuses_one_that_was_trained_on(model: Model) -> None:
    found = model.evaluate(beside_baselines=True)
    assert list(found.metrics) == ["model", "popularity", "markov"]
    assert found.card["protocol"] == "leave-one-out"
    with pytest.raises(ConfigError, match="leave-one-out"):
        model.evaluate("validation", split=SplitConfig(protocol="leave-one-out-validation"))


def test_a_checkpoint_is_chosen_by_name_or_step(run: Path) -> None:
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").iterdir())
    last, first = Model.load(run, checkpoint="last"), Model.load(run, checkpoint=steps[0])
    assert last.parts.origin == {"step": steps[-1], "epoch": 2}
    assert first.parts.origin == {"step": steps[0], "epoch": 1}
    assert not first.parts.weight.equal(last.parts.weight)
    assert Model.load(run).parts.weight.equal(last.parts.weight)  # nothing was selected
    with pytest.raises(CheckpointError, match=f"no checkpoint of step 99999: it has {steps[0]}, {steps[1]}"):
        Model.load(run, checkpoint=99999)
    with pytest.raises(CheckpointError, match="'newest' is none"):
        Model.load(run, checkpoint="newest")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no model"):
        Model.load(tmp_path)


def test_a_run_whose_store_is_gone_or_another_is_refused(run: Path, tmp_path: Path) -> None:
    from tests.support.tiny_store import tiny_store

    with pytest.raises(DataError, match="is not there"):
        Model.load(run, store=tmp_path / "gone")
    tiny_store(tmp_path / "other", [[0, 1, 2]])
    with pytest.raises(CheckpointError, match="trained on another store"):
        Model.load(run, store=tmp_path / "other")


@pytest.mark.parametrize("end", [b"", b"PAR1"])
def test_a_stores_vocabulary_of_garbage_is_named(run: Path, model: Model, tmp_path: Path, end: bytes) -> None:
    moved = Path(shutil.copytree(model.store.path, tmp_path / "store"))
    size = (moved / "items.parquet").stat().st_size
    (moved / "items.parquet").write_bytes(b"\x07" * (size - len(end)) + end)
    with pytest.raises(DataError, match="items.parquet .*: prepare the store again"):
        Model.load(run, store=moved)


def test_the_device_is_the_configs_or_where_it_is_absent_what_there_is(
    model: Model, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pick(name: str) -> torch.device:
        if name == "npu":
            raise ConfigError("no such")
        return torch.device({"auto": "meta", "cpu": "cpu"}[name])

    def on(name: str) -> str:
        device = dataclasses.replace(model.config.device, name=name)
        config = dataclasses.replace(model.config, device=device)
        parts = dataclasses.replace(model.parts, config=config, encoder=copy.deepcopy(model.parts.encoder))
        return Model(parts, None)._scorer.device.type

    monkeypatch.setattr("turbogr.recommend.model.pick_device", pick)
    assert on("cpu") == "cpu" and capsys.readouterr().err == ""
    assert on("npu") == "meta"
    assert "device.name npu is not available here: the model answers on meta" in capsys.readouterr().err
