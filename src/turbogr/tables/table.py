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
    take_rows,
)
from turbogr.tables.exchange import Request
from turbogr.tables.optimizer import ROW_OPTIMIZERS, RowOptimizer
from turbogr.tables.storage import DTYPES, StepRounding, empty_rows, fill_initial


@dataclass(frozen=True)
class RowGradients:
    """What leaves a step: one summed gradient per distinct id."""

    ids: Tensor  # int64 [U] ascending
    values: Tensor  # [U, D]

    @classmethod
    def merged(cls, parts: list["RowGradients"], num_rows: int | None) -> "RowGradients":
        """The sum of several micro-batches, in their order; `num_rows` is the table's `id_bound`."""
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

    def at(self, places: Tensor) -> Tensor:
        """The rows [n, D] of `places` int64 [n], which are `inverse` or a part of it."""
        return take_rows(self.weight, places)

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

    @property
    def in_place(self) -> bool:
        """Whether rows can be read and given gradients where they lie: the whole table is in this process."""
        ...

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
    """A whole table in this process, or a rank's own rows of one that is spread over several.

    Initial rows are a pure function of (seed, table, id), and so is the rounding of a bf16 table's update, with the
    number of the update. `names` int64 [N] says which id every row is; None: its number. Callers speak of rows by
    their number in either case.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        config: TablesConfig,
        *,
        seed: int,
        number: int = 0,
        device: torch.device | None = None,
        names: Tensor | None = None,
    ) -> None:
        assert names is None or len(names) == num_rows
        self.num_rows, self.dim, self.names = num_rows, dim, names
        self.row_clip = config.row_clip
        self.weight = empty_rows(num_rows, dim, DTYPES[config.dtype], device)
        fill_initial(self.weight, seed, number, names)
        self.rounding = StepRounding(seed, number) if config.dtype == "bf16" else None
        self.optimizer: RowOptimizer = ROW_OPTIMIZERS[config.optimizer](config, num_rows, dim, device)

    @property
    def id_bound(self) -> int | None:
        """Ids are below it; None where any int64 is one."""
        return self.num_rows

    @property
    def local_rows(self) -> int:
        return self.num_rows

    @property
    def in_place(self) -> bool:
        """The loss reads fp32."""
        return self.weight.dtype != torch.bfloat16

    def request(self, ids: Tensor) -> Lookup:
        return Lookup(*distinct(ids, self.num_rows))

    def wait(self, lookup: Lookup) -> None:
        """Nobody is asked."""

    def answer(self, lookup: Lookup) -> Rows:
        rows = self.gathered(lookup.places)
        whole = self.weight.detach().requires_grad_() if self.in_place else None
        return Rows(lookup.places, lookup.inverse, rows.requires_grad_(), whole)

    def lookup(self, ids: Tensor) -> Rows:
        """The rows of `ids` [n], each distinct one once."""
        return self.answer(self.request(ids))

    def gathered(self, places: Tensor) -> Tensor:
        """The rows [n, D] at `places`; those of a bf16 table in fp32."""
        (rows,) = embedding_lookup([self.weight], places, torch.tensor([0, len(places)], device="cpu"))
        return rows.float() if rows.dtype == torch.bfloat16 else rows

    def collect(self, lookup: Lookup, rows: Rows) -> RowGradients:
        return rows.gradients()

    def apply(self, gradients: RowGradients, lr: float, *, scale: float = 1.0) -> None:
        """One optimizer step on the rows that have a gradient; every gradient counts `scale` times."""
        summed = Gradients(gradients.ids, gradients.values, scale=scale, row_clip=self.row_clip)
        self._update(summed, lr)

    def apply_occurrences(self, ids: Tensor, gradients: Tensor, lr: float, *, scale: float = 1.0) -> None:
        """The same step from gradients [n, D] of ids [n] with repeats, which the update itself sums by id."""
        unique_ids, places = distinct(ids, self.num_rows)
        apart = Gradients(unique_ids, gradients, group(places, len(unique_ids)), scale, self.row_clip)
        self._update(apart, lr)

    def _update(self, gradients: Gradients, lr: float) -> None:
        rounding = None if self.rounding is None else self.rounding.next(self.names)
        self.optimizer.update(self.weight, gradients, lr, rounding)

    def scan(self, chunk: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (first id, rows [c, D]) over the whole table, in order."""
        for begin in range(0, self.num_rows, chunk):
            yield begin, self.rows(begin, min(begin + chunk, self.num_rows))

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start .. stop, [stop - start, D]; those of a bf16 table in fp32."""
        rows = self.weight[start:stop]
        return rows.float() if rows.dtype == torch.bfloat16 else rows

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer state, by name; a checkpoint fills these very tensors."""
        state = {f"optimizer.{name}": value for name, value in self.optimizer.state().items()}
        if self.rounding is not None:
            state["rounding.step"] = self.rounding.step
        return {"weight": self.weight, **state}

    def restored(self, state: dict[str, Tensor]) -> None:
        """`state` are the table's own tensors."""
