"""A part of `benchmarks.ops`: the whole training step of the ML-1M recipes against the public padded one.

Ours is the real trainer's step: reading the batch from the store, negatives, loss, both optimizers, logging. The padded
one gets the same batches, padded beforehand. MovieLens-1M where the data is, else random events of its lengths.
"""

import dataclasses
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from benchmarks.baselines.padded_step import PaddedBatch, PaddedHstu, PaddedRecipe
from benchmarks.common import ROOT
from benchmarks.ml1m import store_of
from benchmarks.ops_measure import Part, Settings, milliseconds, relative_error, seconds_of
from benchmarks.ops_shapes import Shape, event_times
from turbogr.config import Config, load
from turbogr.data.loader import Batch, read_batch
from turbogr.data.prepare import prepare_frame
from turbogr.data.store import Store
from turbogr.device import tune_allocator
from turbogr.jagged import position_in_row
from turbogr.models import Sequences
from turbogr.models.hstu import Hstu
from turbogr.train.trainer import Trainer

MODELS = {"hstu": "step_hstu", "hstu-large": "step_hstu_large"}
ITEMS, USERS = 3883, 6040
STEPS, STEPS_QUICK = 8, 4
"""Of ours in a round; the padded one does one."""


def check(settings: Settings) -> dict[str, float]:
    """Error of the real encoder on real batches against the padded one in float64, no dropout, the same parameters."""
    errors = {}
    with tempfile.TemporaryDirectory() as scratch:
        store = store_like_ml1m(settings, Path(scratch))
        for model, name in MODELS.items():
            config = config_of(model, store)
            trainer = Trainer(config, Store.open(store), Path(scratch) / model)
            batch = _batches(trainer, 1, users=8)[0]
            padded = _padded(config, trainer.store.num_items).model.double().eval()
            _give_parameters(padded, trainer)
            sequences = Sequences(batch.offsets, _positions(batch), batch.times, batch.next_times, None)
            with torch.no_grad():
                got = trainer.task.encoder(trainer.table.weight[batch.items], sequences)
                errors[f"{name} {got.dtype}"] = relative_error(got, padded(_padded_batch(batch)))
    return errors


def measure(settings: Settings) -> Part:
    part = Part()
    tune_allocator()
    with tempfile.TemporaryDirectory() as scratch:
        store = store_like_ml1m(settings, Path(scratch))
        for model, name in MODELS.items():
            _measure_model(model, name, store, Path(scratch), settings, part)
    return part


def _measure_model(model: str, name: str, store: Path, scratch: Path, settings: Settings, part: Part) -> None:
    config = config_of(model, store)
    trainer = Trainer(config, Store.open(store), scratch / model)
    trainer.open_logs()
    steps = STEPS_QUICK if settings.quick else STEPS
    try:
        running = endless(trainer)
        recipe = _padded(config, trainer.store.num_items)
        padded = itertools.cycle([_padded_batch(batch) for batch in _batches(trainer, steps)])
        logged: list[dict[str, Any]] = []
        variants: dict[str, Callable[[], Any]] = {
            "ours": lambda: logged.extend(itertools.islice(running, steps)),
            "padded": lambda: recipe.step(next(padded)),
        }
        seconds = seconds_of(variants, 1 if settings.quick else 9)
    finally:
        trainer.close_logs()
    seconds["ours"] = [one / steps for one in seconds["ours"]]
    # the first round warms up
    spans = {key: statistics.median(one[key] for one in logged[steps:]) for key in logged[-1] if "span_ms" in key}
    part.figures[f"{name}_x"] = statistics.median(seconds["padded"]) / statistics.median(seconds["ours"])
    part.figures[f"{name}_ms"] = 1e3 * statistics.median(seconds["ours"])
    part.details[name] = {
        "ms": milliseconds(seconds),
        "spans": spans,
        "store": store.name,
        "tokens_per_s": statistics.median(one["speed/tokens_per_s"] for one in logged[steps:]),
        "peak_gib": logged[-1]["memory/peak_gib"],
    }


def endless(trainer: Trainer) -> Iterator[dict[str, Any]]:
    """The run's steps, one epoch after the other, without their evaluations."""
    while True:
        yield from trainer.steps(trainer.plan(trainer.progress.epoch))
        trainer.progress.epoch, trainer.progress.batches = trainer.progress.epoch + 1, 0


def config_of(model: str, store: Path) -> Config:
    config = load(ROOT / "configs" / "ml-1m" / f"{model}.toml")
    threads = torch.get_num_threads()
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, store=str(store)),
        device=dataclasses.replace(config.device, name="cpu", threads=threads),
    )


def store_like_ml1m(settings: Settings, folder: Path) -> Path:
    """MovieLens-1M, or a store of its size and its users' lengths."""
    if settings.data is not None and (settings.data / "movielens-1m" / "ml-1m.zip").exists():
        return store_of(settings.data, folder, "file")
    return random_store(folder, USERS)


def random_store(folder: Path, users: int) -> Path:
    """Random events of users as long as MovieLens-1M's."""
    lengths = Shape("ml-1m", cap=1 << 30, users=users, heads=1, dim=1).lengths()
    times, _ = event_times(lengths)
    owners = np.repeat(np.arange(users), lengths.numpy())
    items = np.random.default_rng(0).integers(0, ITEMS, len(owners))
    log = pa.table({"user": owners, "item": items, "time": times.numpy()})
    prepare_frame(log, folder / "random-ml-1m", user="user", item="item", time="time")
    return folder / "random-ml-1m"


def _batches(trainer: Trainer, count: int, users: int | None = None) -> list[Batch]:
    """The first batches of the run."""
    plan = trainer.plan(0)
    history = trainer.config.model.max_history
    chosen = [plan.batches(n, n + 1) for n in range(count)]
    first = [rows.take(np.arange(len(rows))[:users]) for rows in chosen]
    return [read_batch(trainer.store, trainer.split, rows, history) for rows in first]


def _positions(batch: Batch) -> Tensor:
    return position_in_row(batch.offsets, batch.tokens)


def _padded_batch(batch: Batch) -> PaddedBatch:
    return PaddedBatch.of(batch.offsets, batch.items, batch.targets, batch.times, batch.next_times)


def _padded(config: Config, items: int) -> PaddedRecipe:
    model, dense = config.model, config.dense
    made = PaddedHstu(items, model.dim, model.blocks, model.heads, model.max_len, model.dropout)
    return PaddedRecipe(made, config.negatives.count, config.task.temperature, dense.lr, dense.betas)


@torch.no_grad()
def _give_parameters(padded: PaddedHstu, trainer: Trainer) -> None:
    """The trainer's parameters for the padded model."""
    encoder = cast(Hstu, trainer.task.encoder)
    padded.items.weight[1:] = trainer.table.weight
    padded.positions.weight.copy_(encoder.input.table)
    for layer, block in zip(padded.layers, encoder.blocks, strict=True):
        layer.uvqk.copy_(block.uvqk)
        layer.out.weight.copy_(block.out_weight)
        layer.out.bias.copy_(block.out_bias)
        layer.position[: len(block.position_bias)] = block.position_bias.flip(0)
        layer.time.copy_(block.time_bias)
