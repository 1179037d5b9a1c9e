"""A small store with structure and a config that trains on it in seconds."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_store import tiny_store
from turbogr.config import Config, from_dict, to_dict
from turbogr.data.store import Store


def chained_store(folder: Path, users: int = 60, items: int = 40, length: int = 12, seed: int = 0) -> Store:
    """Every user walks along the catalogue from a random item: what comes next is the item after."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, items, users)
    lengths = rng.integers(3, length + 1, users)
    rows = [[int((start + i) % items) for i in range(n)] for start, n in zip(starts, lengths, strict=True)]
    times = [[int(60 * i + user) for i in range(len(row))] for user, row in enumerate(rows)]
    return tiny_store(folder, rows, times, num_items=items)


def small_config(store: Store, **changes: Any) -> Config:
    """`changes` are dotted names with two underscores for the dot: train__epochs=3."""
    config = Config(
        data=dataclasses.replace(Config().data, store=str(store.path)),
        model=dataclasses.replace(Config().model, dim=16, heads=2, max_history=10, dropout=0.1),
        negatives=dataclasses.replace(Config().negatives, count=16),
        tables=dataclasses.replace(Config().tables, lr=1e-2),
        dense=dataclasses.replace(Config().dense, lr=1e-2),
        train=dataclasses.replace(Config().train, epochs=2, batch_users=16),
        device=dataclasses.replace(Config().device, name="cpu", threads=1),
        log=dataclasses.replace(Config().log, tensorboard=False),
    )
    raw = to_dict(config)
    for name, value in changes.items():
        *sections, key = name.split("__")
        part = raw
        for section in sections:
            part = part[section]
        part[key] = value
    return from_dict(Config, raw, "test")
