"""What every backend of the embedding operators offers, and which one is taken.

n ids or occurrences, U distinct ids, N rows of a table, D width
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from turbogr.errors import ConfigError
from turbogr.ops import native
from turbogr.ops.checks import check_whole_numbers, kind
from turbogr.ops.philox import Key
from turbogr.ops.registry import Backend, register
from turbogr.ops.triton_support import rejects_triton


@dataclass(frozen=True)
class Groups:
    """Occurrences sorted by their place among the distinct ids, in their own order within one."""

    order: Tensor
    """int32 [n]: the occurrences of place u are order[starts[u] : starts[u+1]]."""
    starts: Tensor
    """int64 [U+1]."""

    def check(self, count: int) -> None:
        """Refuse groups of other occurrences or of another number of ids than `count`."""
        order, starts = self.order, self.starts
        if order.dtype != torch.int32 or order.dim() != 1:
            raise ValueError(f"groups.order is {kind(order)}, wanted int32 [n].")
        check_whole_numbers("groups.starts", starts, count + 1)
        if starts.is_cpu and (int(starts[0]), int(starts[-1])) != (0, len(order)):
            raise ValueError(f"groups.starts go from {int(starts[0])} to {int(starts[-1])}, wanted 0 to {len(order)}.")


@dataclass(frozen=True)
class Gradients:
    """What a row optimizer is given."""

    ids: Tensor
    """int64 [U] distinct, ascending."""
    values: Tensor
    """[U, D] summed by id; with `groups` [n, D], one for each occurrence, which the optimizer sums itself."""
    groups: Groups | None = None
    scale: float = 1.0
    """Every gradient counts so many times."""
    row_clip: float = 0.0
    """Largest norm of a row's scaled gradient; 0 is off."""
    distinct: bool = False
    """The ids are known to be distinct rows of the table and may come in any order, but for AdamW; nobody looks."""


@dataclass(frozen=True)
class AdamStep:
    """The scalars of one step of Adam; `number` counts from 1."""

    number: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float = 0.0

    @property
    def unbias(self) -> tuple[float, float]:
        """What each moment is divided by."""
        return 1 - self.betas[0] ** self.number, 1 - self.betas[1] ** self.number


@dataclass(frozen=True)
class Rounding:
    """How a bf16 table stores what was computed in fp32: up or down by chance, so that small steps are not lost.

    A number goes up with the probability of the bits that are cut off, drawn for (key, name of the row, column).
    """

    key: Key
    names: Tensor | None = None
    """int64 [N] what every row of the table is called, whichever rank or slot it lies in; None: its number."""


class Kernels(Protocol):
    """A backend's module. Tensors of one call have one device and one type."""

    def lookup(self, tables: Sequence[Tensor], ids: Tensor, offsets: list[int]) -> list[Tensor]: ...

    def distinct(self, ids: Tensor, num_rows: int | None) -> tuple[Tensor, Tensor]: ...

    def group(self, places: Tensor, count: int) -> Groups: ...

    def sum_groups(self, values: Tensor, groups: Groups) -> Tensor: ...

    def merge(self, places: list[Tensor], values: list[Tensor], count: int) -> Tensor: ...

    def all_finite(self, values: Tensor) -> bool: ...

    def round_rows(self, values: Tensor, rounding: Rounding) -> Tensor: ...

    def adagrad(
        self, weight: Tensor, total: Tensor, gradients: Gradients, lr: float, eps: float, rounding: Rounding | None
    ) -> None: ...

    def lazy_adam(
        self,
        weight: Tensor,
        moment1: Tensor,
        moment2: Tensor,
        gradients: Gradients,
        step: AdamStep,
        rounding: Rounding | None,
    ) -> None: ...

    def adamw(
        self,
        weight: Tensor,
        moment1: Tensor,
        moment2: Tensor,
        gradients: Gradients,
        step: AdamStep,
        rounding: Rounding | None,
    ) -> None: ...


def _compiled() -> Kernels:
    from turbogr.ops.embedding import cpu

    return cpu


def _triton() -> Kernels:
    from turbogr.ops.embedding import triton

    return triton


def _reference() -> Kernels:
    from turbogr.ops.embedding import reference

    return reference


def _rejects(device: torch.device) -> str | None:
    return native.rejects("embedding")(device) or native.rejects("embedding_update")(device)


OPERATOR = register(
    "embedding",
    Backend("triton", _triton, rejects_triton),
    Backend("cpu", _compiled, _rejects),
    Backend("reference", _reference),
)
TAKEN = {
    "triton": (torch.float32, torch.bfloat16, torch.float16, torch.int64),
    "cpu": (torch.float32, torch.bfloat16, torch.int64),
}
"""Types of rows, and of ids, that a backend has kernels for."""


def kernels(values: Tensor, backend: str | None = None) -> Kernels:
    """The backend for tensors like `values`; the reference takes the types that it does not."""
    chosen, _ = OPERATOR.pick(values.device, backend)
    if values.dtype not in TAKEN.get(chosen.name, (values.dtype,)):
        if backend is not None:
            taken = " or ".join(str(dtype).removeprefix("torch.") for dtype in TAKEN[chosen.name][:-1])
            raise ConfigError(f"backend {backend!r} of embedding takes {taken} rows, not {values.dtype}.")
        return _reference()
    module: Kernels = chosen.run()
    return module
