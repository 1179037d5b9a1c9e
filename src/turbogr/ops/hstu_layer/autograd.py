"""The one autograd function of the HSTU layer, over whichever passes and attention were picked."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from turbogr.ops import hstu_attention
from turbogr.ops.hstu_attention.autograd import Kernels
from turbogr.ops.hstu_layer.layer import Kept, Layer, Passes, Weights, backward, forward


def run_layer(
    passes: Passes,
    x: Tensor,
    weights: Weights,
    layer: Layer,
    dtype: torch.dtype,
    attention: Kernels | None = None,
) -> Tensor:
    """out [T, D], with gradients for x, the weights and both bias tables; GEMMs compute in `dtype`.

    `attention` None: the fastest that runs on x's device.
    """
    attention = hstu_attention.kernels(x.device) if attention is None else attention
    out: Tensor = HstuLayerFunction.apply(  # type: ignore[no-untyped-call]
        x, *weights, layer.bias.position, layer.bias.time, passes, attention, layer, dtype
    )
    return out


class HstuLayerFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        uvqk: Tensor,
        out_weight: Tensor,
        out_bias: Tensor,
        position: Tensor | None,
        time: Tensor | None,
        passes: Passes,
        attention: Kernels,
        layer: Layer,
        dtype: torch.dtype,
    ) -> Tensor:
        given = Weights(uvqk, out_weight, out_bias)
        # cast once: the backward takes the same copies
        weights = given.to(dtype)
        out, kept = forward(passes, attention, x, weights, layer)
        # tensors with a gradient are kept by save_for_backward alone, which notices when one was changed in place
        ctx.save_for_backward(x, *weights, position, time, *((None, None) if layer.recompute else kept))
        ctx.passes, ctx.attention = passes, attention
        ctx.layer = replace(layer, bias=replace(layer.bias, position=None, time=None))
        ctx.types = given.types
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, uvqk, out_weight, out_bias, position, time, z, y = ctx.saved_tensors
        layer = replace(ctx.layer, bias=replace(ctx.layer.bias, position=position, time=time))
        kept = None if z is None else Kept(z, y)
        weights = Weights(uvqk, out_weight, out_bias)
        found = backward(ctx.passes, ctx.attention, dout.contiguous(), x, kept, weights, layer)
        return *found.to(ctx.types), None, None, None, None


def compute_type(x: Tensor) -> torch.dtype:
    """What the GEMMs of a layer on x compute in: autocast lowers fp32."""
    kind = x.device.type
    lowered = x.dtype == torch.float32 and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if lowered else x.dtype
