"""Which items do not count for a query.

Legend: B users, N items, X exclusions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Exclude:
    """Items that count as absent: (row, item) pairs in order of item, and items absent for every row."""

    rows: torch.Tensor
    """int64 [X]"""
    items: torch.Tensor
    """int64 [X], ascending"""
    everywhere: torch.Tensor
    """int64 [G]"""

    @classmethod
    def of(cls, offsets: np.ndarray, items: np.ndarray, everywhere: Sequence[int] | np.ndarray = ()) -> "Exclude":
        """Row b excludes items[offsets[b] : offsets[b+1]]; `everywhere` is excluded from all rows."""
        return cls.pairs(np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)), items, everywhere)

    @classmethod
    def pairs(cls, rows: np.ndarray, items: np.ndarray, everywhere: Sequence[int] | np.ndarray = ()) -> "Exclude":
        order = np.argsort(items, kind="stable")
        columns = (rows[order], items[order], np.asarray(everywhere))
        return cls(*(torch.from_numpy(np.array(column, np.int64)) for column in columns))

    def fill(self, scores: torch.Tensor, start: int, stop: int, value: float) -> None:
        """Write `value` over what is excluded from scores [B, stop-start] of items start .. stop."""
        first, last = torch.searchsorted(self.items, torch.tensor([start, stop])).tolist()
        rows, columns = self.rows[first:last].to(scores.device), (self.items[first:last] - start).to(scores.device)
        scores[rows, columns] = value
        inside = self.everywhere[(self.everywhere >= start) & (self.everywhere < stop)] - start
        scores[:, inside.to(scores.device)] = value
