"""A table whose ids are any int64: rows are created when their ids first train, up to a capacity.

`lookup` changes nothing. An id without a row is answered by its initial row, a pure function of (seed, table, id), so
that looking up a new id is the same before and after its row is made. Only `apply` changes the table: there an id
without a row is

    refused    while it was in fewer than `admit_after` updates, or where every row is of this very update;
               its gradient is dropped
    admitted   otherwise: it gets its initial row and a fresh optimizer state, and its gradient is applied

When there is no room the rows of lowest worth are evicted, a share of the table at once: those longest without an
update (`age`), or of the lowest count of updates, an older one worth half after `half_life` updates of the table
(`score`). Everything is counted: see `Counts`. A row that stays is never touched by what happens to the others.

C slots, D width, n ids of a batch, U distinct ids
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from turbogr.config import TablesConfig
from turbogr.errors import ConfigError
from turbogr.ops.embedding import Gradients, distinct, embedding_lookup, group, sum_groups
from turbogr.tables.id_map import IdMap
from turbogr.tables.optimizer import ROW_OPTIMIZERS, RowOptimizer
from turbogr.tables.sightings import MOST, Sightings
from turbogr.tables.storage import DTYPES, StepRounding, empty_rows, initial_rows
from turbogr.tables.table import RowGradients, Rows

SHARE = 64
"""One slot in so many is freed at once: finding the least worthy looks at all of them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    capacity: int
    """Rows that there can be."""
    admit_after: int = 1
    """Updates that an id must occur in to get a row, that one included; 1 admits at first sight."""
    evict: Literal["age", "score"] = "age"
    half_life: int = 1000
    """score: updates of the table after which an update of a row counts half."""

    def check(self) -> None:
        if not 0 < self.capacity < 1 << 31:
            raise ConfigError(f"capacity {self.capacity} of an unbounded table must be between 1 and 2^31 - 1.")
        if not 1 <= self.admit_after <= MOST:
            raise ConfigError(f"admit_after {self.admit_after} must be between 1 and {MOST}.")
        if self.half_life < 1:
            raise ConfigError(f"half_life {self.half_life} must be at least 1.")


@dataclass(frozen=True)
class Counts:
    """Since the table was made; unknown = admitted + refused_new + refused_full, rows = admitted - evicted."""

    unknown: int
    """Ids of updates that had no row, once for each update."""
    admitted: int
    refused_new: int
    """Seen too seldom."""
    refused_full: int
    """An update brought more ids than there are rows."""
    evicted: int


class UnboundedTable:
    """Answers the calls of `LocalTable`; ids are any int64, rows() and scan() go over the ids that have a row."""

    def __init__(
        self,
        limits: Limits,
        dim: int,
        config: TablesConfig,
        *,
        seed: int,
        number: int = 0,
        device: torch.device | None = None,
    ) -> None:
        limits.check()
        if config.optimizer == "adamw":
            raise ConfigError("tables.optimizer adamw moves every row in every step: take lazy-adam or adagrad.")
        self.limits, self.dim = limits, dim
        self.row_clip = config.row_clip
        self.seed, self.number = seed, number
        self.map = IdMap(limits.capacity, device)
        self.weight = empty_rows(limits.capacity, dim, DTYPES[config.dtype], device).zero_()
        self.rounding = StepRounding(seed, number) if config.dtype == "bf16" else None
        self.optimizer: RowOptimizer = ROW_OPTIMIZERS[config.optimizer](config, limits.capacity, dim, device)
        self.sightings = Sightings(limits.capacity, device) if limits.admit_after > 1 else None
        self._last = torch.zeros(limits.capacity, dtype=torch.int32, device=device)  # number of the last update
        self._score = torch.zeros(limits.capacity if limits.evict == "score" else 0, device=device)
        self._step = torch.zeros((), dtype=torch.int64)
        self._counts = torch.zeros(5, dtype=torch.int64)  # in the order of Counts

    @property
    def num_rows(self) -> int:
        """Ids that have a row."""
        return len(self.map)

    @property
    def id_bound(self) -> int | None:
        """None: any int64 is an id."""
        return None

    def counts(self) -> Counts:
        return Counts(*self._counts.tolist())

    def lookup(self, ids: Tensor) -> Rows:
        """The rows of `ids` [n], each distinct one once."""
        unique, inverse = distinct(ids, None)
        return Rows(unique, inverse, self._rows_of(unique).requires_grad_())

    def _rows_of(self, ids: Tensor) -> Tensor:
        slots = self.map.find(ids)
        offsets = torch.tensor([0, len(ids)], device="cpu")
        rows = embedding_lookup([self.weight], slots.clamp(min=0), offsets)[0].float()
        unknown = (slots < 0).nonzero().squeeze(1)
        if len(unknown):
            rows[unknown] = self._initial(ids[unknown]).float()
        return rows

    def _initial(self, ids: Tensor) -> Tensor:
        return initial_rows(self.seed, self.number, ids, self.dim).to(self.weight.dtype)

    def apply(self, gradients: RowGradients, lr: float, *, scale: float = 1.0) -> None:
        """One optimizer step on the ids that have a row or get one; every gradient counts `scale` times."""
        self._step += 1
        rounding = None if self.rounding is None else self.rounding.next(self.map.names)
        ids, values = gradients.ids, gradients.values
        slots = self.map.find(ids)
        unknown = (slots < 0).nonzero().squeeze(1)
        self._touch(slots if not len(unknown) else slots[slots >= 0])
        if len(unknown):
            slots[unknown] = self._admit(ids[unknown])
            kept = (slots >= 0).nonzero().squeeze(1)
            if len(kept) < len(slots):
                slots, values = slots[kept], values.index_select(0, kept)
        summed = Gradients(slots, values, scale=scale, row_clip=self.row_clip, distinct=True)
        self.optimizer.update(self.weight, summed, lr, rounding)

    def apply_occurrences(self, ids: Tensor, gradients: Tensor, lr: float, *, scale: float = 1.0) -> None:
        """The same step from gradients [n, D] of ids [n] with repeats."""
        unique, places = distinct(ids, None)
        self.apply(RowGradients(unique, sum_groups(gradients, group(places, len(unique)))), lr, scale=scale)

    def _touch(self, slots: Tensor) -> None:
        if len(self._score):
            self._score[slots] = self._worth(slots) + 1
        self._last[slots] = int(self._step)

    def _worth(self, slots: Tensor) -> Tensor:
        """fp32 [n] what is kept longest has most of: updates, older ones counting less; or the last update's number."""
        if not len(self._score):
            return self._last[slots]
        age = (int(self._step) - self._last[slots]).float()
        return self._score[slots] * torch.exp2(-age / self.limits.half_life)

    def _admit(self, ids: Tensor) -> Tensor:
        """int64 [n] the slots of ids that had no row, -1 where one is refused."""
        slots = torch.full_like(ids, -1)
        ready = torch.arange(len(ids), device=ids.device)
        if self.sightings is not None:
            ready = (self.sightings.add(ids) >= self.limits.admit_after).nonzero().squeeze(1)
        missing = len(ready) - (self.limits.capacity - self.num_rows)
        evicted = self._evict(max(missing, self.limits.capacity // SHARE)) if missing > 0 else 0
        given = ready[: self.limits.capacity - self.num_rows]
        if len(given):
            slots[given] = self._create(ids[given])
        counted = [len(ids), len(given), len(ids) - len(ready), len(ready) - len(given), evicted]
        self._counts += torch.tensor(counted, device="cpu")
        return slots

    def _create(self, ids: Tensor) -> Tensor:
        slots = self.map.insert(ids)
        self.weight[slots] = self._initial(ids)
        for state in self.optimizer.state().values():
            if state.dim():
                state[slots] = 0
        self._last[slots] = int(self._step)
        if len(self._score):
            self._score[slots] = 1
        return slots

    def _evict(self, count: int) -> int:
        """Frees the slots of `count` rows, the least worthy of those that this update does not touch; answers how many.

        Of equally worthy ones the lowest ids go.
        """
        slots = (self.map.taken & (self._last < int(self._step))).nonzero().squeeze(1)
        count = min(count, len(slots))
        if count:
            worth = self._worth(slots)
            edge = worth.kthvalue(count).values
            below, equal = slots[worth < edge], slots[worth == edge]
            equal = equal[self.map.names[equal].argsort()][: count - len(below)]
            self.map.remove(torch.cat((below, equal)))
        return count

    def ids(self) -> Tensor:
        """int64 [num_rows] the ids that have a row, ascending."""
        return self.map.names[self.map.slots()]

    def rows(self, start: int, stop: int) -> Tensor:
        """The rows of ids()[start:stop], fp32 [stop - start, D]."""
        return self.weight[self.map.slots()[start:stop]].float()

    def scan(self, chunk: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (place in ids() of the first, rows [c, D]) over all rows."""
        slots = self.map.slots()
        for begin in range(0, len(slots), chunk):
            yield begin, self.weight[slots[begin : begin + chunk]].float()

    def state(self) -> dict[str, Tensor]:
        """All there is, by name; a checkpoint loads into these tensors in place."""
        state = {"weight": self.weight, "step": self._step, "counts": self._counts, "last": self._last}
        if len(self._score):
            state["score"] = self._score
        parts = {"map": self.map.state(), "optimizer": self.optimizer.state()}
        if self.sightings is not None:
            parts["sightings"] = self.sightings.state()
        for name, part in parts.items():
            state |= {f"{name}.{key}": value for key, value in part.items()}
        if self.rounding is not None:
            state["rounding.step"] = self.rounding.step
        return state
