"""Our side of `benchmarks.peers`: the real trainer's steps, batches read from the store, no evaluations.

python -m benchmarks.peers_ours '{"model": "hstu", "store": ..., "threads": 2, "scratch": ...}'
"""

import json
import sys
from pathlib import Path

import torch

from benchmarks.ops_step import config_of, endless
from benchmarks.peers_link import Link
from turbogr.data.store import Store
from turbogr.device import tune_allocator
from turbogr.train.trainer import Trainer


def main(model: str, store: str, threads: int, scratch: str) -> None:
    allocator = tune_allocator()
    torch.set_num_threads(threads)
    trainer = Trainer(config_of(model, Path(store)), Store.open(store), Path(scratch))
    trainer.open_logs()
    facts = {
        "tokens_per_epoch": int(trainer.pairs.sum()),
        "items": trainer.store.num_items,
        "parameters": trainer.table.weight.numel() + sum(one.numel() for one in trainer.task.encoder.parameters()),
        "versions": {"torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "allocator": allocator,
    }
    link = Link(facts)
    link.wait()
    done = 0
    for values in endless(trainer):
        link.step(trainer.progress.epoch_tokens - done, values["train/loss"])
        done = trainer.progress.epoch_tokens


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
