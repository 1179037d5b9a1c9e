"""`torchrun -m turbogr train` as a user types it, on two ranks of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support.small_run import small_config
from tests.support.tiny_store import tiny_store
from turbogr.config import to_dict
from turbogr.train import checkpoint
from turbogr.train.metrics import read_lines

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of users of very different length, and a config."""
    folder = tmp_path_factory.mktemp("torchrun")
    generator = np.random.default_rng(0)
    lengths = np.concatenate((generator.integers(3, 9, 50), generator.integers(25, 40, 14)))
    store = tiny_store(folder / "store", [generator.integers(0, 60, length).tolist() for length in lengths])
    config = small_config(store, model__max_history=40, train__batch_users=4, train__epochs=2, balance__batches=2)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    return folder


def torchrun(ranks: int, *arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [*command, "-m", "turbogr", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
        check=False,
    )


def tensors(run: Path) -> dict[str, torch.Tensor]:
    newest = checkpoint.latest(run)
    assert newest is not None
    return {name: value for path in newest.glob("*.safetensors") for name, value in load_file(path).items()}


def steps(run: Path) -> list[dict[str, Any]]:
    return list(read_lines(run / "metrics.jsonl"))


def mean(run: Path, name: str) -> float:
    return float(np.mean([step[name] for step in steps(run)]))


def said(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("turbogr:")]


def test_two_ranks_train_balance_evaluate_and_go_on_as_one(place: Path) -> None:
    """Catches: a strategy that is silently off; a run that two ranks cannot save, evaluate or resume, or that one rank
    goes on with differently; a result or a log that is written twice."""
    config = place / "config.json"
    for strategy in ("none", "token-aware", "global"):
        done = torchrun(2, "train", config, "--out", place / strategy, "--balance.strategy", strategy)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("ndcg@10") == 1 and done.stderr.count("Next: turbogr evaluate") == 1
        numbers = [step["step"] for step in steps(place / strategy)]
        assert numbers == list(range(len(numbers)))
    imbalance = {name: mean(place / name, "balance/cost_imbalance") for name in ("none", "global")}
    assert imbalance["global"] < 0.5 * imbalance["none"]
    assert mean(place / "token-aware", "balance/token_gap") < 0.7 * mean(place / "none", "balance/token_gap")
    for name in ("balance/token_imbalance", "balance/time_imbalance", "balance/wait_ms", "balance/wait_share"):
        assert name in steps(place / "global")[0]

    alone = subprocess.run(
        [sys.executable, "-m", "turbogr", "train", config, "--out", place / "alone"], capture_output=True, check=False
    )
    assert alone.returncode == 0, alone.stderr
    assert_same_run(place / "alone", place / "global")

    assert torchrun(2, "train", config, "--out", place / "parts", "--train.epochs", 1).returncode == 0
    done = torchrun(3, "train", place / "parts", "--resume", "--train.epochs", 2)
    assert done.returncode == 0, done.stderr
    assert_same_run(place / "alone", place / "parts")


def assert_same_run(one: Path, other: Path) -> None:
    """The same curve and parameters, but for rounding."""
    losses = [[step["train/loss"] for step in steps(run)] for run in (one, other)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    first, second = tensors(one), tensors(other)
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=1e-3, atol=1e-4)
    results = [json.loads((run / "result.json").read_text())["last"]["metrics"] for run in (one, other)]
    assert results[0]["hr@10"] == pytest.approx(results[1]["hr@10"], abs=0.05)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--balance.rank-tokens", "30"], "balance.rank_tokens 30 is below the 37 tokens of user"),
        (["--balance.strateegy", "none"], "did you mean '--balance.strategy'"),
        (["--data.store", "nowhere"], "nowhere is not a store"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence_and_every_rank_ends(
    place: Path, tmp_path: Path, flags: list[str], sentence: str
) -> None:
    """Catches: a sentence per rank, ranks that hang when another one has ended, a folder left behind."""
    done = torchrun(2, "train", place / "config.json", "--out", tmp_path / "run", *flags)
    assert done.returncode != 0
    (words,) = said(done)
    assert sentence in words
    assert not (tmp_path / "run").exists()


def test_fewer_users_than_ranks_are_refused(tmp_path: Path) -> None:
    store = tiny_store(tmp_path / "store", [[1, 2, 3, 4], [2, 3, 4, 5]], num_items=60)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(small_config(store))))
    done = torchrun(3, "train", tmp_path / "config.json", "--out", tmp_path / "run")
    assert done.returncode != 0
    assert said(done) == [
        "turbogr: 2 users can be trained on, fewer than the 3 ranks: start at most 2 ranks.",
    ]


def test_other_verbs_say_that_they_are_one_process(place: Path) -> None:
    done = torchrun(2, "doctor")
    assert done.returncode != 0
    assert said(done) == ["turbogr: `turbogr doctor` runs as one process: start it without torchrun."]
