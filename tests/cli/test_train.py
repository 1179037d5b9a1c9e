"""`turbogr train` and `turbogr evaluate` as a user types them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.small_run import chained_store, small_config
from turbogr.cli import main
from turbogr.config import to_dict
from turbogr.tasks.retrieval import RetrievalScorer
from turbogr.train.trainer import train


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, a config and a finished run."""
    folder = tmp_path_factory.mktemp("cli")
    config = small_config(chained_store(folder / "store"), train__epochs=2)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    train(config, folder / "run")
    return folder


def last_words(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_training_prints_the_result_and_what_to_type_next(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(place / "config.json"), "--out", str(tmp_path / "run"), "--train.epochs", "1"]) == 0
    shown = capsys.readouterr()
    assert "ndcg@10" in shown.out
    assert f"turbogr evaluate {tmp_path / 'run'}" in shown.err.replace("\n", "")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["train"]["epochs"] == 1


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(place / "config.json"), "--out", str(tmp_path / "run"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    for fact in ("[model]", "encoder parameters", "table parameters", "gflop per step", "model memory", "step memory"):
        assert fact in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--modle.dim", "8"], "did you mean '--model.dim'"),
        (["--model.heads", "3"], "model.dim 16 is not a multiple of model.heads 3"),
        (["--split.time", "9"], "belong to the protocol global-time"),
        (["--negatives.count", "999"], "negatives.count 999 is not below the catalogue's 40 items"),
        (["--model.name", "hstuu"], "did you mean 'hstu'"),
        (["--train.select-by", "hr@7"], "train.select_by 'hr@7' is not a metric"),
        (["--data.store", "nowhere"], "nowhere is not a store"),
        (["--seeds", "0,x"], "--seeds takes whole numbers"),
    ],
)
def test_impossible_arguments_are_refused_before_any_work(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["train", str(place / "config.json"), "--out", str(tmp_path / "run"), *flags]) == 2
    assert words in last_words(capsys)
    assert not (tmp_path / "run").exists()


def test_ranks_without_a_place_to_meet_are_refused_rather_than_trained_twice(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(place / "config.json"), "--out", str(tmp_path / "run")]) == 2
    assert "no place to meet: start them with torchrun" in last_words(capsys)


def test_ctrl_c_says_how_to_go_on_and_leaves_nothing_half_written(place: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = ["train", str(place / "config.json"), "--out", str(run), "--train.epochs", "5000"]
    process = subprocess.Popen([sys.executable, "-m", "turbogr", *command], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(run.glob("checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume continues from step" in said and "Traceback" not in said
    assert not list(run.rglob(".*partial*"))


def test_seeds_are_trained_each_and_their_spread_is_printed(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(place / "config.json"), "--out", str(tmp_path / "run"), "--train.epochs", "1"]
    assert main([*arguments, "--seeds", "0,1"]) == 0
    shown = capsys.readouterr()
    assert "±" in shown.out
    assert (tmp_path / "run" / "seed-1" / "result.json").exists()
    following = re.search(r"Next: turbogr evaluate (\S+),", shown.err.replace("\n", ""))
    assert following is not None
    assert main(["evaluate", following[1]]) == 0


def test_evaluate_prints_the_model_beside_baselines_with_the_card(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(place / "run")]) == 0
    shown = capsys.readouterr().out
    for words in ("popularity", "markov", "ties in score", "catalogue 40 items", "protocol leave-one-out"):
        assert words in shown


def test_evaluate_agrees_with_what_training_reported(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(place / "run"), "--checkpoint", "last", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    trained = json.loads((place / "run" / "result.json").read_text())
    assert told["metrics"]["model"] == pytest.approx(trained["last"]["metrics"])


def test_a_split_that_training_reached_past_is_refused(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(place / "run"), "--protocol", "global-time", "--time", "300"]) == 2
    assert "past the global split" in last_words(capsys)


def test_another_librarys_lists_are_scored(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lists = tmp_path / "top.csv"
    lists.write_text("user,item,rank\n" + "".join(f"{1000 + user},{500 + user % 40},1\n" for user in range(60)))
    arguments = ["evaluate", "--predictions", str(lists), "--store", str(place / "store"), "--json"]
    assert main(arguments) == 0
    assert set(json.loads(capsys.readouterr().out)["metrics"]["top"]) == {"hr@1", "mrr"}


def evaluated(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["evaluate", *args, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_evaluate_without_baselines_shows_the_model_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert set(evaluated(capsys, str(place / "run"), "--no-baselines")["metrics"]) == {"model"}


def test_evaluate_takes_filter_and_users_from_its_flags(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--no-baselines", "--filter", "none", "--max-users", "7", "--batch-users", "3", "--item-chunk", "5"]
    card = evaluated(capsys, str(place / "run"), *flags)["card"]
    assert (card["filter"], card["users_evaluated"]) == ("none", 7)


def test_evaluates_memory_flags_reach_the_ranking(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []
    scores = RetrievalScorer.scores

    def looked_at(self: RetrievalScorer, encoded: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        shapes.append((len(encoded), stop - start))
        return scores(self, encoded, start, stop)

    monkeypatch.setattr(RetrievalScorer, "scores", looked_at)
    evaluated(capsys, str(place / "run"), "--no-baselines", "--batch-users", "3", "--item-chunk", "5")
    assert max(shapes) == (3, 5) and max(items for _, items in shapes) == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["RUN", "--max-history", "5"], "--max-history belongs to --predictions"),
        (["LISTS", "--checkpoint", "best"], "--checkpoint belongs to a run"),
        (["LISTS", "--no-baselines"], "--no-baselines belongs to a run"),
        (["LISTS", "--item-chunk", "5"], "--item-chunk belongs to a run"),
        (["LISTS", "--batch-users", "0"], "--batch-users belongs to a run"),
        (["LISTS", "--max-history", "-3"], "model.max_history must be at least 1, not -3"),
        (["LISTS", "--max-users", "-3"], "evaluate.max_users must be at least 0, not -3"),
        (["RUN", "--item-chunk", "0"], "evaluate.item_chunk must be at least 1, not 0"),
        (["RUN", "--batch-users", "-2"], "evaluate.batch_users must be at least 1, not -2"),
    ],
)
def test_evaluate_refuses_what_it_would_ignore_or_cannot_do(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    lists = tmp_path / "top.csv"
    lists.write_text("user,item,rank\n1000,500,1\n")
    what = {"RUN": [str(place / "run")], "LISTS": ["--predictions", str(lists), "--store", str(place / "store")]}
    assert main(["evaluate", *what[flags[0]], *flags[1:]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err.splitlines()[-1]
    assert "Traceback" not in captured.err


def test_the_visible_history_of_lists_is_a_flag(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = tmp_path / "top.csv"
    lists.write_text("user,item,rank\n1000,500,1\n")
    arguments = ["--predictions", str(lists), "--store", str(place / "store")]
    assert evaluated(capsys, *arguments)["card"]["max_history"] == 200
    assert evaluated(capsys, *arguments, "--max-history", "3")["card"]["max_history"] == 3


def test_wandb_without_the_package_is_one_sentence(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "wandb" in sys.modules or os.environ.get("WANDB_MODE"):
        pytest.skip("wandb is installed here")
    arguments = ["train", str(place / "config.json"), "--out", str(tmp_path / "run"), "--log.wandb", "true"]
    assert main(arguments) == 2
    assert "pip install 'turbogr[wandb]'" in last_words(capsys)
