"""The one autograd function of FuXi attention: HSTU attention's kernels for the semantic channel, a backend's for maps.

A backend is anything with these three, none of which records a graph:
    takes(q, k, v, maps)                                             whether it has kernels for such tensors
    forward(v, offsets, max_len, maps, mask, y)                      writes the channels of the maps, y[:, :-1]
    backward(dy, v, offsets, max_len, maps, mask, dv) -> gradients   adds to dv what the maps' channels leave in it;
                                                                     position table's, time table's, decay's gradient
v and dv may be strided views; y [T, C, H, dv] is dense.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from turbogr.ops.fuxi_attention.reference import Maps
from turbogr.ops.fuxi_attention.tiles import attend_tiles
from turbogr.ops.hstu_attention import kernels as semantic_kernels
from turbogr.ops.hstu_attention.reference import Bias, Mask

MapGradients = tuple[Tensor | None, Tensor | None, Tensor | None]
NO_BIAS = Bias(position=None, time=None, times=None, next_times=None, bucket_width=1.0)


class Kernels(Protocol):
    """What a backend's module offers."""

    def takes(self, q: Tensor, k: Tensor, v: Tensor, maps: Maps) -> bool: ...

    def forward(self, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask, y: Tensor) -> None: ...

    def backward(
        self, dy: Tensor, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask, dv: Tensor
    ) -> MapGradients: ...


def attend(
    kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask
) -> Tensor:
    """y [T, C, H, dv] by a backend's kernels, with gradients for q, k, v and every map; what they do not take, float64
    above all, goes to the torch tiles."""
    if not kernels.takes(q, k, v, maps):
        return attend_tiles(q, k, v, offsets, max_len, maps, mask)
    out: Tensor = FuxiAttentionFunction.apply(  # type: ignore[no-untyped-call]
        q, k, v, maps.position, maps.time, maps.decay, kernels, offsets, max_len, maps, mask
    )
    return out


class FuxiAttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor | None,
        time: Tensor | None,
        decay: Tensor | None,
        kernels: Kernels,
        offsets: Tensor,
        max_len: int,
        maps: Maps,
        mask: Mask,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, position, time, decay, maps.times, maps.next_times, offsets, mask.num_targets)
        ctx.kernels, ctx.max_len = kernels, max_len
        # tensors are kept by save_for_backward alone, which notices when one was changed in place
        ctx.maps = replace(maps, position=None, time=None, decay=None, times=None, next_times=None)
        ctx.mask = replace(mask, num_targets=None)
        semantic = semantic_kernels(q.device).forward(q, k, v, offsets, max_len, NO_BIAS, mask)
        if maps.channels == 1:
            return semantic.unsqueeze(1)
        y = torch.empty(len(v), maps.channels, *v.shape[1:], dtype=v.dtype, device=v.device)
        y[:, -1] = semantic
        kernels.forward(v, offsets, max_len, maps, mask, y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, position, time, decay, times, next_times, offsets, num_targets = ctx.saved_tensors
        maps = replace(ctx.maps, position=position, time=time, decay=decay, times=times, next_times=next_times)
        mask = replace(ctx.mask, num_targets=num_targets)
        return *gradients(ctx.kernels, dy, q, k, v, offsets, ctx.max_len, maps, mask), *[None] * 5


def gradients(
    kernels: Kernels,
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    maps: Maps,
    mask: Mask,
) -> list[Tensor | None]:
    """Of q, k, v, the position table, the time table and the decay."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    semantic_kernels(q.device).backward(dy[:, -1], q, k, v, offsets, max_len, NO_BIAS, mask, dq, dk, dv)
    of_maps: MapGradients = (None, None, None)
    if maps.channels > 1:
        of_maps = kernels.backward(dy, v, offsets, max_len, maps, mask, dv)
    return [dq, dk, dv, *of_maps]


def differentiated(
    run: Callable[..., Tensor],
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    maps: Maps,
    mask: Mask,
) -> list[Tensor | None]:
    """The same of what has no kernels: `run` once more with a graph."""
    tables = (maps.position, maps.time, maps.decay)
    own: list[Tensor | None] = [None if leaf is None else leaf.detach().requires_grad_() for leaf in (q, k, v, *tables)]
    position, time, decay = own[3:]
    leaves = [leaf for leaf in own if leaf is not None]
    with torch.enable_grad():
        y = run(*leaves[:3], offsets, max_len, replace(maps, position=position, time=time, decay=decay), mask)
    found = iter(torch.autograd.grad(y, leaves, dy, allow_unused=True, materialize_grads=True))
    return [None if leaf is None else next(found).contiguous() for leaf in own]
