"""Embedding tables: rows that are looked up, given a gradient and updated, outside of autograd's module tree.

N rows of the table, D width, n ids of a batch, U distinct ids
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from turbogr.config import TablesConfig
from turbogr.ops.embedding import (
    Gradients,
    all_finite,
    distinct,
    embedding_lookup,
    group,
    merge_rows,
)
from turbogr.ops.philox import Key, Purpose, normal_rows
from turbogr.tables.optimizer import ROW_OPTIMIZERS, RowOptimizer

INITIAL_STD, INITIAL_BOUND = 0.02, 2.0
INITIAL_CHUNK = 1 << 16


@dataclass(frozen=True)
class RowGradients:
    """What leaves a step: one summed gradient per distinct id."""

    ids: Tensor  # int64 [U] ascending
    values: Tensor  # [U, D]

    @classmethod
    def merged(cls, parts: list["RowGradients"], num_rows: int) -> "RowGradients":
        """The sum of several micro-batches, in their order."""
        if len(parts) == 1:
            return parts[0]
        return cls(*merge_rows([part.ids for part in parts], [part.values for part in parts], num_rows))

    def finite(self) -> bool:
        """Whether no gradient is infinite or NaN."""
        return all_finite(self.values)


@dataclass(frozen=True)
class Rows:
    """The distinct rows of a batch; autograd fills weight.grad."""

    unique_ids: Tensor  # int64 [U] ascending
    inverse: Tensor  # int64 [n] place of every looked-up id in unique_ids
    weight: Tensor  # [U, D] leaf
    whole: Tensor | None = None
    """[N, D] leaf: the table itself, for what reads rows in place, where it can be; its gradient is sparse."""

    def gradients(self) -> RowGradients:
        """Of the looked-up rows and of those that were read in place."""
        grad = self.weight.grad
        own = RowGradients(self.unique_ids, torch.zeros_like(self.weight) if grad is None else grad)
        if self.whole is None or self.whole.grad is None:
            return own
        in_place = self.whole.grad  # coalesced as it was made, which autograd forgets
        rest = RowGradients(in_place._indices()[0], in_place._values())
        return RowGradients.merged([own, rest], len(self.whole))


class ReadableTable(Protocol):
    """What evaluation and recommendation ask of a table."""

    @property
    def num_rows(self) -> int: ...

    def lookup(self, ids: Tensor) -> Rows: ...

    def rows(self, start: int, stop: int) -> Tensor: ...


class LocalTable:
    """A whole table in this process. Initial rows are a pure function of (seed, table, id)."""

    def __init__(
        self,
        num_rows: int,
        dim: int,
        config: TablesConfig,
        *,
        seed: int,
        number: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.num_rows, self.dim = num_rows, dim
        self.row_clip = config.row_clip
        self.weight = torch.empty(num_rows, dim, device=device)
        key = Key(seed, 0, Purpose.TABLE_ROWS, number)
        for begin in range(0, num_rows, INITIAL_CHUNK):
            ids = torch.arange(begin, min(begin + INITIAL_CHUNK, num_rows))
            self.weight[begin : begin + len(ids)] = normal_rows(key, ids, dim, INITIAL_STD, INITIAL_BOUND)
        self.optimizer: RowOptimizer = ROW_OPTIMIZERS[config.optimizer](config, num_rows, dim, device)

    def lookup(self, ids: Tensor) -> Rows:
        """The rows of `ids` [n], each distinct one once."""
        unique_ids, inverse = distinct(ids, self.num_rows)
        (rows,) = embedding_lookup([self.weight], unique_ids, torch.tensor([0, len(unique_ids)], device="cpu"))
        return Rows(unique_ids, inverse, rows.requires_grad_(), self.weight.detach().requires_grad_())

    def apply(self, gradients: RowGradients, lr: float, *, scale: float = 1.0) -> None:
        """One optimizer step on the rows that have a gradient; every gradient counts `scale` times."""
        summed = Gradients(gradients.ids, gradients.values, scale=scale, row_clip=self.row_clip)
        self.optimizer.update(self.weight, summed, lr)

    def apply_occurrences(self, ids: Tensor, gradients: Tensor, lr: float, *, scale: float = 1.0) -> None:
        """The same step from gradients [n, D] of ids [n] with repeats, which the update itself sums by id."""
        unique_ids, places = distinct(ids, self.num_rows)
        apart = Gradients(unique_ids, gradients, group(places, len(unique_ids)), scale, self.row_clip)
        self.optimizer.update(self.weight, apart, lr)

    def scan(self, chunk: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (first id, rows [c, D]) over the whole table, in order."""
        for begin in range(0, self.num_rows, chunk):
            yield begin, self.rows(begin, min(begin + chunk, self.num_rows))

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start .. stop, [stop - start, D]."""
        return self.weight[start:stop]

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer state, by name; a checkpoint loads into these tensors in place."""
        return {"weight": self.weight, **{f"optimizer.{name}": value for name, value in self.optimizer.state().items()}}
