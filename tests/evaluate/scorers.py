"""Scorers whose every score a test knows."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from tests.support.tiny_store import tiny_store
from turbogr.config import SplitConfig
from turbogr.data.split import Split, make_split
from turbogr.data.store import Store
from turbogr.evaluate import Queries


@dataclass
class TableScorer:
    """Scores read from a table [U, N]."""

    table: np.ndarray

    @property
    def num_items(self) -> int:
        return self.table.shape[1]

    def encode(self, queries: Queries) -> torch.Tensor:
        return torch.from_numpy(self.table[queries.users])

    def scores(self, encoded: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        return encoded[:, start:stop].clone()


def random_case(
    folder: Path, seed: int, *, users: int = 12, num_items: int = 30, levels: int = 6, repeats: bool = True
) -> tuple[Store, Split, TableScorer]:
    """Random histories of 1 to 12 items, and scores with few levels, so that many tie."""
    draw = np.random.default_rng(seed)
    lengths = [2, *draw.integers(1, 13, users - 1)]
    rows = [draw.choice(num_items, length, replace=repeats).tolist() for length in lengths]
    store = tiny_store(folder, rows, num_items=num_items)
    scores = draw.integers(-levels, levels, (users, num_items)).astype(np.float32)
    return store, make_split(store, SplitConfig()), TableScorer(scores)
