"""Inputs of FuXi attention for its tests: a jagged case, a decay in place of its time table, weights of every channel.

T tokens, H heads, C channels
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.jagged_cases import Case, make_case
from turbogr.ops.fuxi_attention import fuxi_attention
from turbogr.ops.fuxi_attention.reference import Maps

TIMES = ("buckets", "decay", "none")
LOST = 1e6 * torch.finfo(torch.float32).tiny
"""gamma ** power below the smallest normal number is nothing to fp32, nor is what it is multiplied by: a decay's
gradients have factors up to power * log, which stay below a million."""


@dataclass(frozen=True)
class Inputs:
    """A case, the decay in place of its time table where there is one, and weights: the loss is sum(weights * y)."""

    case: Case
    decay: Tensor | None
    weights: Tensor  # [T, C, H, dv]
    max_len: int

    @property
    def maps(self) -> Maps:
        return Maps(self.case.position, self.case.time, self.decay, self.case.times, self.case.next_times, 0.301)

    def attend(self, backend: str | None, **changed: Any) -> Tensor:
        case = self.case
        arguments = {
            "max_len": self.max_len,
            "position_table": case.position,
            "time_table": case.time,
            "time_decay": self.decay,
            "times": case.times,
            "next_times": case.next_times,
        }
        return fuxi_attention(*case.parts, case.offsets, **(arguments | changed), backend=backend)

    def leaves(self) -> list[Tensor]:
        return self.case.leaves() + ([] if self.decay is None else [self.decay])

    def to(self, dtype: torch.dtype) -> "Inputs":
        """The same numbers; a decay keeps three digits only in a half type, so it is given in single precision."""
        exact = torch.promote_types(dtype, torch.float32)
        decay = None if self.decay is None else self.decay.detach().to(exact).requires_grad_()
        return Inputs(self.case.to(dtype), decay, self.weights.to(dtype), self.max_len)

    def narrowed(self, dtype: torch.dtype) -> "Inputs":
        """q, k, v and the output's gradient in `dtype`, every table in fp32."""
        single = self.to(torch.float32)
        fused = single.case.fused.detach().to(dtype).requires_grad_()
        return replace(single, case=replace(single.case, fused=fused), weights=single.weights.to(dtype))

    def results(self, y: Tensor) -> list[Tensor]:
        """The output, then the gradient of every leaf; zeros where a batch without rows leaves no graph."""
        if not y.requires_grad:
            return [y, *(torch.zeros_like(leaf) for leaf in self.leaves())]
        loss = (y * self.weights).sum()
        return [y.detach(), *torch.autograd.grad(loss, self.leaves(), materialize_grads=True)]


def make_inputs(
    lengths: list[int], *, time: str = "buckets", position: bool = True, max_len: int = 80, **facts: Any
) -> Inputs:
    case = make_case(lengths, biases=(position, time == "buckets"), max_len=max_len, **facts)
    channels = 1 + position + (time != "none")
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(len(case.fused), channels, *case.weights.shape[1:], generator=generator).double()
    decay = torch.tensor([0.75, 0.25, 0.875], dtype=torch.float64).requires_grad_() if time == "decay" else None
    return Inputs(case, decay, weights, max_len)


def assert_same(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """Relative root mean square error of the output and of every gradient; what fp32 cannot hold may be lost to it."""
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        what = "output" if number == 0 else f"gradient {number}"
        assert one.shape == other.shape, f"{what}: {list(one.shape)} instead of {list(other.shape)}"
        assert torch.isfinite(one).all(), f"{what} is not finite"
        one, other = one.detach(), other.detach().double()
        error, size = float((one.double() - other).norm()), float(other.norm())
        floor = 0.0 if one.dtype == torch.float64 else LOST
        # where nothing but zero is wanted, the error itself is judged
        allowed = tolerance * (size or 1.0) + floor
        assert error <= allowed, f"{what} is off by {error:.3g} of {size:.3g}, more than {tolerance:.3g} of it"
