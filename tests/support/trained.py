"""A small prepared store and a model trained on it for one epoch: for tests of what comes after training."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from turbogr.config import Config, from_dict
from turbogr.data.prepare import prepare_frame
from turbogr.train.trainer import train

ITEMS = 60


def small_log(users: int = 40, seed: int = 0) -> pa.Table:
    """Raw ids u0, u1, ... and 100, 101, ...; milliseconds; titles; every item occurs."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 25, users)
    lengths[0] = ITEMS - 10
    owner = np.repeat(np.arange(users), lengths)
    item = rng.integers(0, ITEMS, len(owner))
    item[: lengths[0]] = rng.permutation(ITEMS)[: lengths[0]]
    item[-ITEMS:] = rng.permutation(ITEMS)
    return pa.table(
        {
            "who": [f"u{user}" for user in owner],
            "what": item + 100,
            "when": 1_600_000_000_000 + rng.integers(0, 10**9, len(owner)),
            "name": [f"film [{one}]" for one in item],
        }
    )


def small_store(folder: Path) -> Path:
    prepare_frame(small_log(), folder, user="who", item="what", time="when", time_unit="ms", title="name")
    return folder


def small_config(store: Path, model: str = "hstu", epochs: int = 1) -> Config:
    """A history of 12 events, so that some users are cut."""
    settings = {
        "data": {"store": str(store)},
        "model": {"name": model, "dim": 16, "heads": 2, "max_history": 12},
        "negatives": {"count": 16},
        "train": {"epochs": epochs, "batch_users": 8},
        "evaluate": {"batch_users": 7, "item_chunk": 17},
        "device": {"name": "cpu", "threads": 1},
        "log": {"tensorboard": False},
    }
    return from_dict(Config, settings, "test")


def small_run(folder: Path, model: str = "hstu", epochs: int = 1) -> Path:
    """A trained run; its store lies beside it."""
    store = folder.parent / "store"
    train(small_config(store if store.exists() else small_store(store), model, epochs), folder)
    return folder
