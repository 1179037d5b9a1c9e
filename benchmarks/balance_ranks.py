"""Two gloo ranks, one pinned thread each, train on KuaiRand's lengths with and without balance; part of `balance`.

Both ways take turns, step by step, over the same global steps. A step begins when both ranks are there; waiting is the
time from a rank's own end of compute, where it comes to the first collective, to the slower rank's.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.balance_lengths import kuairand_lengths
from benchmarks.common import ROOT
from turbogr.config import (
    BalanceConfig,
    Config,
    DataConfig,
    DeviceConfig,
    LogConfig,
    ModelConfig,
    NegativesConfig,
    TrainConfig,
)
from turbogr.data.balance import UserCost
from turbogr.data.prepare import prepare_frame

RANKS, USERS_PER_RANK, CAP, ITEMS = 2, 4, 8192, 20_000
WAYS = ("none", "global")


def run(data: Path, *, steps: int, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures, details) of `steps` steps of each way."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        users = RANKS * USERS_PER_RANK * min(steps, 50)
        make_store(folder / "store", kuairand_lengths(data, "clicks"), users, seed)
        measured = _run_ranks(folder, steps)
    return figures_of(measured), {"waiting": {"steps": steps, "seed": seed, "ranks": measured}}


def make_store(folder: Path, lengths: np.ndarray, users: int, seed: int) -> None:
    """Users drawn from the real lengths, with random events a minute apart."""
    generator = np.random.default_rng(seed)
    drawn = (
        np.minimum(generator.choice(lengths[lengths > 1], users), CAP) + 2
    )  # one event is the test, one only a target
    owners = np.repeat(np.arange(users), drawn)
    items = generator.integers(0, ITEMS, len(owners))
    log = pa.table({"user": owners, "item": items, "time": np.arange(len(owners)) * 60})
    prepare_frame(log, folder, user="user", item="item", time="time")


def config_of(store: Path, way: Any) -> Config:
    return Config(
        data=DataConfig(store=str(store)),
        model=ModelConfig(dim=64, blocks=1, heads=1, max_history=CAP),
        negatives=NegativesConfig(count=16),
        train=TrainConfig(batch_users=USERS_PER_RANK),
        balance=BalanceConfig(strategy=way),
        device=DeviceConfig(name="cpu", threads=1),
        log=LogConfig(tensorboard=False),
    )


def _run_ranks(folder: Path, steps: int) -> list[dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = []
    cores = sorted(os.sched_getaffinity(0))
    for rank in range(RANKS):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "LOCAL_WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        core = cores[rank % len(cores)]
        command = [sys.executable, "-m", "benchmarks.balance_ranks", str(folder), str(steps), str(core)]
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise RuntimeError("a rank failed; see its message above")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def worker(folder: Path, steps: int, core: int) -> None:
    """One rank: the ways in turns, `steps` times; prints what it measured."""
    os.sched_setaffinity(0, {core})
    from turbogr.data.store import Store
    from turbogr.device import tune_allocator
    from turbogr.ranks import joined
    from turbogr.train.trainer import Trainer

    tune_allocator()
    store = Store.open(folder / "store")
    with joined() as ranks:
        ways = {way: Trainer(config_of(store.path, way), store, folder / way, ranks) for way in WAYS}
        streams = {way: endless(trainer) for way, trainer in ways.items()}
        found: dict[str, dict[str, list[float]]] = {
            way: {key: [] for key in ("tokens", "pairs", "cost", "compute_s", "slowest_s", "step_s")} for way in WAYS
        }
        for turn in range(steps + 2):  # two to warm up
            for way in WAYS if turn % 2 else reversed(WAYS):
                ranks.barrier()
                begin = time.perf_counter()
                sums = next(streams[way])
                seconds = time.perf_counter() - begin
                if turn < 2:
                    continue
                facts, kept = sums.total, found[way]
                for key in ("tokens", "pairs", "cost", "compute_s"):
                    kept[key].append(float(getattr(facts, key)[ranks.rank]))
                kept["slowest_s"].append(float(facts.compute_s.max()))
                kept["step_s"].append(seconds)
        ranks.barrier()
    print(json.dumps(found))


def endless(trainer: Any) -> Iterator[Any]:
    """Steps of one epoch after the other."""
    epoch, step = 0, 0
    while True:
        contexts = trainer.feed.contexts(trainer.plan(epoch), 0, step)
        while (sums := trainer.schedule.progress(contexts)) is not None:
            step += 1
            yield sums
        epoch += 1


def figures_of(measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the ranks' measurements: waiting and step times, beside what the cost predicts."""
    every = {way: {key: np.array([rank[way][key] for rank in measured]) for key in measured[0][way]} for way in WAYS}
    waits = {way: (one["slowest_s"] - one["compute_s"]).mean(0) for way, one in every.items()}  # [steps]
    step = {way: one["step_s"].mean(0) for way, one in every.items()}
    predicted = {way: one["cost"].max(0).mean() for way, one in every.items()}
    return {
        "wait_reduction_x": float(waits["none"].mean() / waits["global"].mean()),
        "wait_none_ms": 1e3 * float(waits["none"].mean()),
        "wait_global_ms": 1e3 * float(waits["global"].mean()),
        "wait_none_share": float(waits["none"].mean() / step["none"].mean()),
        "wait_global_share": float(waits["global"].mean() / step["global"].mean()),
        "step_balanced_x": float(step["none"].mean() / step["global"].mean()),
        "step_balanced_median_x": statistics.median(step["none"]) / statistics.median(step["global"]),
        "step_predicted_x": float(predicted["none"] / predicted["global"]),
        "cost_imbalance_none": _imbalance(every["none"]["cost"]),
        "cost_imbalance_global": _imbalance(every["global"]["cost"]),
        "cost_fit_error": fit_error(every),
    }


def _imbalance(cost: np.ndarray) -> float:
    return float(((cost.max(0) - cost.min(0)) / cost.max(0)).mean())


def fit_error(every: dict[str, dict[str, np.ndarray]]) -> float | None:
    """The cost fitted to the first half of the steps, on the second half: median relative error of a rank's time."""
    from turbogr.data.cost_fit import CostFit

    half = every["none"]["tokens"].shape[1] // 2
    fit = CostFit()
    for step in range(half):
        for one in every.values():
            fit.observe(one["tokens"][:, step], one["pairs"][:, step], one["compute_s"][:, step])
    cost = fit.fitted()
    if cost is None:
        return None
    errors = [
        np.abs(_seconds(cost, fit, one["tokens"][:, half:], one["pairs"][:, half:]) / one["compute_s"][:, half:] - 1)
        for one in every.values()
    ]
    return float(np.median(np.concatenate(errors)))


def _seconds(cost: UserCost, fit: Any, tokens: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    return fit.constant + cost.linear * tokens + cost.pair * pairs


if __name__ == "__main__":
    worker(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
