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
from turbogr.tables.exchange import Request
from turbogr.tables.optimizer import ROW_OPTIMIZERS, RowOptimizer
from turbogr.tables.placement import Placement

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


@dataclass(frozen=True)
class Lookup:
    """A lookup on its way."""

    places: Tensor
    """int64 [U] the distinct rows that are wanted: ids ascending, or their places in a sharded table's order."""
    inverse: Tensor  # int64 [n] place of every looked-up id among them
    request: Request | None = None
    """What other ranks were asked for."""


class Table(Protocol):
    """What a training step asks of a table, in this order. Ranks that share one call each of it together."""

    in_place: bool
    """Whether rows can be read and given gradients where they lie: the whole table is in this process."""

    @property
    def num_rows(self) -> int: ...

    @property
    def local_rows(self) -> int:
        """Rows that this process holds."""
        ...

    def request(self, ids: Tensor) -> Lookup: ...

    def wait(self, lookup: Lookup) -> None: ...

    def answer(self, lookup: Lookup) -> Rows: ...

    def lookup(self, ids: Tensor) -> Rows:
        """request, wait, answer."""
        ...

    def collect(self, lookup: Lookup, rows: Rows) -> RowGradients:
        """The gradients of this process's rows, by their place here."""
        ...

    def apply(self, gradients: RowGradients, lr: float, *, scale: float = 1.0) -> None: ...

    def rows(self, start: int, stop: int) -> Tensor: ...

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer state in the order of ids, to be saved, or to be filled and then `restored`."""
        ...

    def restored(self, state: dict[str, Tensor]) -> None:
        """Take over what a checkpoint has filled `state` with."""
        ...


class ReadableTable(Protocol):
    """What evaluation and recommendation ask of a table."""

    @property
    def num_rows(self) -> int: ...

    def lookup(self, ids: Tensor) -> Rows: ...

    def rows(self, start: int, stop: int) -> Tensor: ...


class LocalTable:
    """Rows in this process: a whole table, or one rank's run of it. Initial rows are a pure function of (seed, table,
    id)."""

    in_place = True

    def __init__(
        self,
        num_rows: int,
        dim: int,
        config: TablesConfig,
        *,
        seed: int,
        number: int = 0,
        device: torch.device | None = None,
        placement: Placement | None = None,
    ) -> None:
        """`placement`: which rows of a table of `num_rows` are held here; all without it, in the order of ids."""
        self.num_rows, self.dim = num_rows, dim
        self.row_clip = config.row_clip
        first, last = (placement.begin, placement.end) if placement else (0, num_rows)
        self.local_rows = last - first
        self.weight = torch.empty(self.local_rows, dim, device=device)
        key = Key(seed, 0, Purpose.TABLE_ROWS, number)
        for begin in range(first, last, INITIAL_CHUNK):
            places = torch.arange(begin, min(begin + INITIAL_CHUNK, last))
            ids = placement.ids(places) if placement else places
            rows = normal_rows(key, ids, dim, INITIAL_STD, INITIAL_BOUND)
            self.weight[begin - first : begin - first + len(ids)] = rows
        self.optimizer: RowOptimizer = ROW_OPTIMIZERS[config.optimizer](config, self.local_rows, dim, device)

    def request(self, ids: Tensor) -> Lookup:
        return Lookup(*distinct(ids, self.num_rows))

    def wait(self, lookup: Lookup) -> None:
        """Nobody is asked."""

    def answer(self, lookup: Lookup) -> Rows:
        places = lookup.places
        (rows,) = embedding_lookup([self.weight], places, torch.tensor([0, len(places)], device="cpu"))
        return Rows(places, lookup.inverse, rows.requires_grad_(), self.weight.detach().requires_grad_())

    def lookup(self, ids: Tensor) -> Rows:
        """The rows of `ids` [n], each distinct one once."""
        return self.answer(self.request(ids))

    def collect(self, lookup: Lookup, rows: Rows) -> RowGradients:
        return rows.gradients()

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
        """Weights and optimizer state, by name; a checkpoint fills these very tensors."""
        return {"weight": self.weight, **{f"optimizer.{name}": value for name, value in self.optimizer.state().items()}}

    def restored(self, state: dict[str, Tensor]) -> None:
        """`state` are the table's own tensors."""
