"""The whole step through the real trainer, on the nodes of a made network; part of `exchange`."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from benchmarks.balance_ranks import endless
from benchmarks.exchange_load import USER_TOKENS, Load, draw
from benchmarks.network import link_bytes
from turbogr.config import (
    Config,
    DataConfig,
    DeviceConfig,
    LogConfig,
    ModelConfig,
    NegativesConfig,
    TablesConfig,
    TrainConfig,
)
from turbogr.data.prepare import prepare_frame
from turbogr.data.store import Store
from turbogr.ranks import Ranks

USERS = 600
WARM_UP, FEWEST = 2, 3
LOAD = Load()
USERS_PER_RANK = LOAD.tokens // USER_TOKENS


def make_store(folder: Path, seed: int = 0) -> None:
    """USERS users of USER_TOKENS training tokens, drawn by popularity; every item occurs once at least."""
    generator = np.random.default_rng(seed)
    events = USERS * (USER_TOKENS + 2)  # one event is the test, one only a target
    drawn = draw(generator, LOAD.items, events - LOAD.items)
    items = generator.permutation(np.concatenate([np.arange(LOAD.items), drawn]))
    owners = np.repeat(np.arange(USERS), USER_TOKENS + 2)
    log = pa.table({"user": owners, "item": items, "time": np.arange(events) * 60})
    prepare_frame(log, folder, user="user", item="item", time="time")


def config_of(store: Path, groups: int) -> Config:
    """HSTU of two blocks, D = 128 in 8 heads: the paper's tiny model."""
    return Config(
        data=DataConfig(store=str(store)),
        model=ModelConfig(dim=LOAD.dim, blocks=2, heads=8, max_history=USER_TOKENS),
        negatives=NegativesConfig(count=LOAD.negatives),
        tables=TablesConfig(optimizer="adagrad", groups=groups),
        train=TrainConfig(batch_users=USERS_PER_RANK),
        device=DeviceConfig(name="cpu", threads=1),
        log=LogConfig(tensorboard=False),
    )


def train_steps(
    ranks: Ranks, variants: dict[str, int], store_path: Path, folder: Path, steps: int, seconds: float
) -> dict[str, Any]:
    """Variant -> by step: the slowest rank's ms, this node's bytes both ways, ms of every stage here, loss."""
    from turbogr.train.trainer import Trainer

    store = Store.open(store_path)
    trainers = {
        name: Trainer(config_of(store.path, groups), store, folder / name, ranks) for name, groups in variants.items()
    }
    streams = {name: endless(trainer) for name, trainer in trainers.items()}
    found: dict[str, dict[str, list[Any]]] = {
        name: {key: [] for key in ("ms", "sent", "received", "stages", "loss")} for name in variants
    }
    names, begin = list(variants), time.monotonic()
    for turn in range(steps + WARM_UP):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            ranks.barrier()
            before, start = link_bytes(), time.perf_counter()
            sums = next(streams[name])
            own = torch.tensor([time.perf_counter() - start, time.monotonic() - begin], dtype=torch.float64)
            took, elapsed = ranks.gather(own).max(0).values.tolist()
            stages = {stage: 1e3 * value for stage, value in trainers[name].spans.take().items()}
            after, kept = link_bytes(), found[name]
            kept["loss"].append(float(sums.total.loss.sum() / sums.total.tokens.sum()))
            if turn >= WARM_UP:
                kept["ms"].append(1e3 * took)
                kept["sent"].append(after[0] - before[0])
                kept["received"].append(after[1] - before[1])
                kept["stages"].append(stages)
        if turn >= WARM_UP + FEWEST and elapsed > seconds:
            break
    losses = np.array([one["loss"] for one in found.values()])
    if not np.allclose(losses, losses[0], rtol=1e-4):
        raise RuntimeError(f"the variants do not train the same model: losses {losses.tolist()}")
    return found
