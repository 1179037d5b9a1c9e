"""What a trained model consists of, wherever it was loaded from.

N items, D width
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor, nn

from turbogr.config import Config
from turbogr.ops.embedding import distinct
from turbogr.tables import Rows


@dataclass(frozen=True, kw_only=True)
class Parts:
    path: Path
    """The run or the exported folder."""
    config: Config
    encoder: nn.Module
    weight: Tensor
    """float32 [N, D]: the item table."""
    items: pa.Table
    """raw_id, and title where the source has one; row i is item i."""
    latest: int
    """Latest time of the store that it was trained on, in seconds."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Step and epoch of its checkpoint."""


class FrozenTable:
    """Item rows that are read and never updated."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight  # [N, D]

    @property
    def num_rows(self) -> int:
        return len(self.weight)

    def lookup(self, ids: Tensor) -> Rows:
        unique_ids, inverse = distinct(ids, self.num_rows)
        return Rows(unique_ids, inverse, torch.index_select(self.weight, 0, unique_ids))

    def rows(self, start: int, stop: int) -> Tensor:
        return self.weight[start:stop]
