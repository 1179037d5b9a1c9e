"""Row optimizers: they see (distinct ids, summed gradients) and touch those rows only, `adamw` excepted.

N rows of the table, U touched rows, D width
"""

from typing import Protocol

import torch
from torch import Tensor

from turbogr.config import TablesConfig


class RowOptimizer(Protocol):
    def state(self) -> dict[str, Tensor]:
        """Tensors to checkpoint, updated in place."""
        ...

    def update(self, weight: Tensor, ids: Tensor, gradient: Tensor, lr: float) -> None: ...


class RowwiseAdagrad:
    """One accumulator per row:  a += mean(g^2);  w -= lr * g / (sqrt(a) + eps)."""

    def __init__(self, config: TablesConfig, num_rows: int, dim: int, device: torch.device | None) -> None:
        self.eps = config.eps
        self.sum = torch.zeros(num_rows, device=device)

    def state(self) -> dict[str, Tensor]:
        return {"sum": self.sum}

    def update(self, weight: Tensor, ids: Tensor, gradient: Tensor, lr: float) -> None:
        total = self.sum[ids] + gradient.square().mean(1)
        self.sum[ids] = total
        weight[ids] -= lr * gradient / (total.sqrt() + self.eps).unsqueeze(1)


class LazyAdam:
    """Adam whose moments move on touched rows only; the bias correction counts steps of the table."""

    def __init__(self, config: TablesConfig, num_rows: int, dim: int, device: torch.device | None) -> None:
        self.betas, self.eps = config.betas, config.eps
        self.moment1 = torch.zeros(num_rows, dim, device=device)
        self.moment2 = torch.zeros(num_rows, dim, device=device)
        self.step = torch.zeros((), dtype=torch.int64)

    def state(self) -> dict[str, Tensor]:
        return {"moment1": self.moment1, "moment2": self.moment2, "step": self.step}

    def update(self, weight: Tensor, ids: Tensor, gradient: Tensor, lr: float) -> None:
        self.step += 1
        moment1 = torch.lerp(gradient, self.moment1[ids], self.betas[0])
        moment2 = torch.lerp(gradient.square(), self.moment2[ids], self.betas[1])
        self.moment1[ids], self.moment2[ids] = moment1, moment2
        weight[ids] -= self._change(moment1, moment2, lr)

    def _change(self, moment1: Tensor, moment2: Tensor, lr: float) -> Tensor:
        step = int(self.step)
        unbias1, unbias2 = 1 - self.betas[0] ** step, 1 - self.betas[1] ** step
        return (lr / unbias1) * moment1 / ((moment2 / unbias2).sqrt() + self.eps)


class DenseAdamW(LazyAdam):
    """AdamW on every row every step, rows without a gradient included: what dense training of a table does."""

    def __init__(self, config: TablesConfig, num_rows: int, dim: int, device: torch.device | None) -> None:
        super().__init__(config, num_rows, dim, device)
        self.weight_decay = config.weight_decay

    def update(self, weight: Tensor, ids: Tensor, gradient: Tensor, lr: float) -> None:
        self.step += 1
        self.moment1 *= self.betas[0]
        self.moment2 *= self.betas[1]
        self.moment1[ids] += (1 - self.betas[0]) * gradient
        self.moment2[ids] += (1 - self.betas[1]) * gradient.square()
        weight *= 1 - lr * self.weight_decay
        weight -= self._change(self.moment1, self.moment2, lr)


ROW_OPTIMIZERS: dict[str, type[RowwiseAdagrad] | type[LazyAdam]] = {
    "adagrad": RowwiseAdagrad,
    "lazy-adam": LazyAdam,
    "adamw": DenseAdamW,
}
