"""`torchrun -m turbogr train` as a user types it, on two ranks of this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.small_run import small_config
from tests.support.tiny_store import tiny_store
from turbogr.config import load, to_dict
from turbogr.data.store import Store
from turbogr.train import checkpoint
from turbogr.train.metrics import read_lines
from turbogr.train.trainer import Trainer

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


def started(ranks: int, *arguments: object, restarts: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.Popen(
        [*command, "--max-restarts", str(restarts), "-m", "turbogr", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def torchrun(ranks: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    process = started(ranks, *arguments)
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def rank_process(launcher: subprocess.Popen[str], rank: int) -> int:
    """The process that torchrun started as that rank."""
    for child in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no rank {rank}")


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() or len(steps(run)) <= step:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """The newest checkpoint as one process reads it."""
    newest = checkpoint.latest(run)
    assert newest is not None
    config = load(run / "config.json")
    alone = replace(config, tables=replace(config.tables, groups=0), dense=replace(config.dense, sharding="replicated"))
    trainer = Trainer(alone, Store.open(config.data.store), run)
    trainer.restore(newest)
    return trainer.state()


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
        (["--seeds", "0,0"], "--seeds names a seed twice"),
        (["--out", "/proc/nothing/run"], "/proc/nothing"),
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


def test_ctrl_c_is_one_sentence_that_says_how_to_go_on(place: Path, tmp_path: Path) -> None:
    """Catches: a sentence or a traceback per rank, a rank that stays behind."""
    process = started(2, "train", place / "config.json", "--out", tmp_path / "run", *LONG)
    wait_for_step(tmp_path / "run", 9)
    for rank in (0, 1):
        os.kill(rank_process(process, rank), signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode != 0
    (words,) = [line for line in err.splitlines() if line.startswith("turbogr: interrupted")]
    assert "interrupted; stopped at step" in words and "--resume continues from step" in words


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


LONG = ("--train.epochs", 12, "--train.checkpoint-every", 4)


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    """A run long enough to be disturbed."""
    assert torchrun(2, "train", place / "config.json", "--out", place / "calm", *LONG).returncode == 0
    return place / "calm"


def test_a_rank_that_is_killed_is_named_and_torchrun_goes_on_from_the_checkpoint(
    place: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """Catches: ranks that hang when one is gone; a restart that begins anew, or repeats or loses steps."""
    process = started(2, "train", place / "config.json", "--out", tmp_path / "run", *LONG, restarts=1)
    wait_for_step(tmp_path / "run", 9)
    os.kill(rank_process(process, 1), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    # rank 0 says so unless torchrun, which names it too, ended it before it noticed
    assert "rank 0 lost rank 1" in err or "local_rank: 1" in err
    numbers = [step["step"] for step in steps(tmp_path / "run")]
    assert numbers == [step["step"] for step in steps(undisturbed)]
    wanted = tensors(undisturbed)
    assert all(torch.equal(value, wanted[name]) for name, value in tensors(tmp_path / "run").items())


def test_a_rank_that_stands_still_for_five_seconds_changes_no_bit(
    place: Path, tmp_path: Path, undisturbed: Path
) -> None:
    """Catches: a sum that depends on who comes first, a wait that is given up too soon."""
    process = started(2, "train", place / "config.json", "--out", tmp_path / "run", *LONG)
    wait_for_step(tmp_path / "run", 9)
    late = rank_process(process, 1)
    os.kill(late, signal.SIGSTOP)
    time.sleep(5.0)
    os.kill(late, signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    wanted = tensors(undisturbed)
    assert all(torch.equal(value, wanted[name]) for name, value in tensors(tmp_path / "run").items())


def test_groups_shard_the_table_and_a_run_goes_on_with_others(place: Path) -> None:
    """Catches: tables.groups read and ignored; a sharded run that cannot be evaluated, saved, or resumed otherwise."""
    config = place / "config.json"
    sharding = ("--tables.groups", 2, "--dense.sharding", "fsdp")
    done = torchrun(4, "train", config, "--out", place / "sharded", *sharding, "--train.epochs", 1)
    assert done.returncode == 0, done.stderr
    spans = {name for step in steps(place / "sharded") for name in step if name.startswith("span_ms/")}
    assert {"span_ms/exchange_ids", "span_ms/wait_unique", "span_ms/exchange_grads", "span_ms/sync_replicas"} <= spans
    assert steps(place / "sharded")[0]["tables/held_rows_share"] == 0.5
    for world, groups in ((3, 1), (1, 1)):
        name = f"on-{world}"
        shutil.copytree(place / "sharded", place / name)
        flags = ("--train.epochs", 2, "--tables.groups", groups, "--dense.sharding", "replicated")
        done = torchrun(world, "train", place / name, "--resume", *flags)
        assert done.returncode == 0, done.stderr
    whole = torchrun(2, "train", config, "--out", place / "whole", "--tables.groups", 2)
    assert whole.returncode == 0, whole.stderr
    assert_same_run(place / "whole", place / "on-3")
    assert_same_run(place / "whole", place / "on-1")
    refused = torchrun(3, "train", config, "--out", place / "uneven", "--tables.groups", 2)
    assert said(refused) == [
        "turbogr: tables.groups 2 does not divide the 3 ranks: take a number that does, or start another number of "
        "ranks."
    ]
