"""Row optimizers: the state of each beside its table, and one step on (distinct ids, summed gradients).

They touch the rows of those ids only, `adamw` excepted. The arithmetic is in `turbogr.ops.embedding`.

N rows of the table, D width
"""

from typing import Protocol

import torch
from torch import Tensor

from turbogr.config import TablesConfig
from turbogr.ops.embedding import AdamStep, Gradients, Rounding, dense_adamw, lazy_adam, rowwise_adagrad
from turbogr.tables.storage import zero_rows


class RowOptimizer(Protocol):
    def state(self) -> dict[str, Tensor]:
        """Tensors to checkpoint, updated in place."""
        ...

    def update(self, weight: Tensor, gradients: Gradients, lr: float, rounding: Rounding | None = None) -> None: ...


class RowwiseAdagrad:
    """One accumulator per row:  a += mean(g^2);  w -= lr * g / (sqrt(a) + eps)."""

    def __init__(self, config: TablesConfig, num_rows: int, dim: int, device: torch.device | None) -> None:
        self.eps = config.eps
        self.sum = torch.zeros(num_rows, device=device)

    def state(self) -> dict[str, Tensor]:
        return {"sum": self.sum}

    def update(self, weight: Tensor, gradients: Gradients, lr: float, rounding: Rounding | None = None) -> None:
        rowwise_adagrad(weight, self.sum, gradients, lr=lr, eps=self.eps, rounding=rounding)


class LazyAdam:
    """Adam whose moments move on touched rows only; the bias correction counts steps of the table."""

    def __init__(self, config: TablesConfig, num_rows: int, dim: int, device: torch.device | None) -> None:
        self.betas, self.eps = config.betas, config.eps
        self.weight_decay = config.weight_decay
        self.moment1 = zero_rows(num_rows, dim, device)
        self.moment2 = zero_rows(num_rows, dim, device)
        self.step = torch.zeros((), dtype=torch.int64)  # on the CPU whatever the device: reading it waits for nothing

    def state(self) -> dict[str, Tensor]:
        return {"moment1": self.moment1, "moment2": self.moment2, "step": self.step}

    def update(self, weight: Tensor, gradients: Gradients, lr: float, rounding: Rounding | None = None) -> None:
        lazy_adam(weight, self.moment1, self.moment2, gradients, self._next(lr), rounding=rounding)

    def _next(self, lr: float) -> AdamStep:
        self.step += 1
        return AdamStep(int(self.step), lr, self.betas, self.eps, self.weight_decay)


class DenseAdamW(LazyAdam):
    """AdamW on every row every step, rows without a gradient included: what dense training of a table does."""

    def update(self, weight: Tensor, gradients: Gradients, lr: float, rounding: Rounding | None = None) -> None:
        dense_adamw(weight, self.moment1, self.moment2, gradients, self._next(lr), rounding=rounding)


ROW_OPTIMIZERS: dict[str, type[RowwiseAdagrad] | type[LazyAdam]] = {
    "adagrad": RowwiseAdagrad,
    "lazy-adam": LazyAdam,
    "adamw": DenseAdamW,
}
