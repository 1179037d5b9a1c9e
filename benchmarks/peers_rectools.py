"""RecTools' side of `benchmarks.peers`: its own `fit` on the same events, held at the batches' ends.

    .venv-peers/bin/python -m benchmarks.peers_rectools '{"model": "HSTUModel", "events": "events.npz", ...}'

Runs in an environment that has RecTools and not this package's dependencies; `turbogr.device` needs torch alone.
"""

import json
import sys
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
import pytorch_lightning as lightning
import torch
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import HSTUModel, SASRecModel

from benchmarks.peers_link import Link
from turbogr.device import tune_allocator

MODELS = {"HSTUModel": HSTUModel, "SASRecModel": SASRecModel}


class Held(lightning.Callback):
    """Trains on when it is asked to; the link is made late, for RecTools copies its trainer deeply before."""

    link: Link

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.link = Link(facts_of(module))
        self.link.wait()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: dict[str, Any], index: int) -> None:
        # a target that is not padding has a loss
        self.link.step(int((batch["y"] != 0).sum()), float(outputs["loss"]))


def facts_of(module: Any) -> dict[str, Any]:
    events = module.data_preparator.train_dataset.interactions.df
    layers = module.torch_model.transformer_layers
    facts: dict[str, Any] = {
        "tokens_per_epoch": int((events.groupby(Columns.User).size() - 1).sum()),
        "items": int(module.torch_model.item_model.n_items) - len(module.item_extra_tokens),
        "parameters": sum(one.numel() for one in module.parameters()),
        "versions": {name: version(name) for name in ("rectools", "torch", "pytorch-lightning", "numpy", "pandas")},
        "threads": torch.get_num_threads(),
        "allocator": ALLOCATOR,
    }
    if hasattr(layers, "stu_blocks"):
        times = torch.tensor(events["unix_ts"].to_numpy())
        buckets = layers.stu_blocks[0].rel_attn._quantization_func(times - times[0])
        facts["time_buckets"] = len(buckets.unique())
    return facts


def held_trainer() -> lightning.Trainer:
    """RecTools' own default trainer, but without an end."""
    return lightning.Trainer(
        max_epochs=-1,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        enable_checkpointing=False,
        devices=1,
        accelerator="cpu",
        callbacks=[Held()],
    )


def dataset(events: str) -> Dataset:
    columns = np.load(events)
    frame = pd.DataFrame({Columns.User: columns["user"], Columns.Item: columns["item"], Columns.Weight: 1.0})
    # as nanoseconds: RecTools divides by 10**9, and plain numbers of seconds would all fall into one time bucket
    frame[Columns.Datetime] = pd.to_datetime(columns["second"], unit="s").astype("datetime64[ns]")
    return Dataset.construct(frame)


def main(model: str, events: str, threads: int, temperature: float, **sizes: Any) -> None:
    torch.set_num_threads(threads)
    made = MODELS[model](
        loss="sampled_softmax",
        lightning_module_kwargs={"logits_t": temperature},
        similarity_module_kwargs={"distance": "cosine"},
        get_trainer_func=held_trainer,
        **sizes,
    )
    made.fit(dataset(events))


if __name__ == "__main__":
    ALLOCATOR = tune_allocator()
    lightning.seed_everything(0, verbose=False)
    main(**json.loads(sys.argv[1]))
