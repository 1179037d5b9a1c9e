"""The one autograd function of HSTU attention: it wraps the forward and backward of whichever backend was picked.

A backend is anything with these two, neither of which records a graph:
    forward(q, k, v, offsets, max_len, bias, mask) -> y [T, H, dv], contiguous
    backward(dy, q, k, v, offsets, max_len, bias, mask, dq, dk, dv) -> (dposition or None, dtime or None)
The backward writes every cell of dq, dk and dv, which may be strided views of one buffer, as q, k and v may.
"""

from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from turbogr.ops.hstu_attention.reference import Bias, Mask

BiasGradients = tuple[Tensor | None, Tensor | None]


class Kernels(Protocol):
    """What a backend's module offers."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias, mask: Mask
    ) -> Tensor: ...

    def backward(
        self,
        dy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        offsets: Tensor,
        max_len: int,
        bias: Bias,
        mask: Mask,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
    ) -> BiasGradients: ...


def attend(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias, mask: Mask
) -> Tensor:
    """y [T, H, dv] by a backend's kernels, with gradients for q, k, v and both tables."""
    out: Tensor = HstuAttentionFunction.apply(  # type: ignore[no-untyped-call]
        q, k, v, bias.position, bias.time, kernels, offsets, max_len, bias, mask
    )
    return out


class HstuAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor | None,
        time: Tensor | None,
        kernels: Kernels,
        offsets: Tensor,
        max_len: int,
        bias: Bias,
        mask: Mask,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, position, time, bias.times, bias.next_times, offsets, mask.num_targets)
        ctx.kernels, ctx.max_len = kernels, max_len
        # tensors are kept by save_for_backward alone, which notices when one was changed in place
        ctx.bias = replace(bias, position=None, time=None, times=None, next_times=None)
        ctx.mask = replace(mask, num_targets=None)
        return kernels.forward(q, k, v, offsets, max_len, bias, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position, time, times, next_times, offsets, num_targets = ctx.saved_tensors
        bias = replace(ctx.bias, position=position, time=time, times=times, next_times=next_times)
        mask = replace(ctx.mask, num_targets=num_targets)
        return *gradients(ctx.kernels, dy, q, k, v, offsets, ctx.max_len, bias, mask), *[None] * 5


def gradients(
    kernels: Kernels,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    bias: Bias,
    mask: Mask,
) -> list[Tensor | None]:
    """Of q, k, v, and of the position and the time table."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    return [dq, dk, dv, *kernels.backward(dy, q, k, v, offsets, max_len, bias, mask, dq, dk, dv)]
