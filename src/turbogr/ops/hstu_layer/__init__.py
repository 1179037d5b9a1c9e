"""A whole HSTU layer on jagged tokens, forward and backward fused around its attention.

[u | v | q | k] = SiLU(norm(x) W)
y = A v                                         A as in `turbogr.ops.hstu_attention`
out = x + dropout(u * norm(y)) Wo^T + b         norm: LayerNorm without affine parameters

T tokens, B rows, H heads, D width
"""

import functools

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.dropout import Noise, mask_of
from turbogr.ops.hstu_attention import check_rows
from turbogr.ops.hstu_attention.reference import Bias, Mask
from turbogr.ops.hstu_layer import cpu, fused
from turbogr.ops.hstu_layer.autograd import compute_type, run_layer
from turbogr.ops.hstu_layer.layer import Layer, Passes, Weights
from turbogr.ops.hstu_layer.reference import layer_reference
from turbogr.ops.registry import Backend, register
from turbogr.ops.triton_support import rejects_triton


def _run_cpu(x: Tensor, weights: Weights, layer: Layer) -> Tensor:
    compiled = x.dtype == torch.float32 and compute_type(x) in (torch.float32, torch.bfloat16)
    passes: Passes = cpu if compiled else fused
    return run_layer(passes, x.contiguous(), weights, layer)


def _run_triton(x: Tensor, weights: Weights, layer: Layer) -> Tensor:
    # Triton is loaded where its kernels run, and they compute in single precision
    from turbogr.ops.hstu_layer import triton

    passes: Passes = fused if x.dtype == torch.float64 else triton
    return run_layer(passes, x.contiguous(), weights, layer)


OPERATOR = register(
    "hstu_layer",
    Backend("triton", _run_triton, rejects_triton),
    Backend("cpu", _run_cpu, native.rejects("hstu_layer")),
    Backend("fused", functools.partial(run_layer, fused)),
    Backend("reference", layer_reference),
)


def hstu_layer(
    x: Tensor,
    offsets: Tensor,
    uvqk: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    *,
    heads: int,
    max_len: int,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    next_times: Tensor | None = None,
    bucket_width: float = 0.301,
    dropout: float = 0.0,
    noise: Noise | None = None,
    layer: int = 0,
    recompute: bool = False,
    backend: str | None = None,
) -> Tensor:
    """HSTU layer [T, D] -> [T, D]. Under autocast its GEMMs and its attention are in bf16, x stays in fp32.

    Args:
        x: [T, D]. offsets: int64 [B+1], no row longer than `max_len`.
        uvqk: [D, 4 D]. out_weight: [D, D]. out_bias: [D].
        heads: D is split among them.
        max_len, position_bias, time_bias, times, next_times, bucket_width: see `hstu_attention`.
        dropout: rate, where `noise` says whose tokens these are; None of it evaluates.
        layer: number of the layer among the mask's.
        recompute: keep nothing but x for the backward, which then runs the forward up to the attention again.
        backend: triton | cpu | fused | reference; None picks.

    Example:
        >>> x = torch.randn(5, 8); offsets = torch.tensor([0, 3, 5])
        >>> weights = torch.randn(8, 32), torch.randn(8, 8), torch.zeros(8)
        >>> hstu_layer(x, offsets, *weights, heads=2, max_len=16).shape
        torch.Size([5, 8])
    """
    width = x.shape[1]
    if uvqk.shape != (width, 4 * width) or out_weight.shape != (width, width) or out_bias.shape != (width,):
        shapes = f"{list(uvqk.shape)}, {list(out_weight.shape)} and {list(out_bias.shape)}"
        raise ValueError(f"weights {shapes} do not fit x [T, {width}]: [D, 4 D], [D, D] and [D] are wanted.")
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}.")
    if position_bias is not None and position_bias.shape != (max_len,):
        raise ValueError(f"position_bias has shape {list(position_bias.shape)}, max_len {max_len} wants [{max_len}].")
    if time_bias is not None and (times is None or next_times is None):
        raise ValueError("time_bias needs times and next_times.")
    check_rows(len(x), offsets, max_len, Mask())
    bias = Bias(position_bias, time_bias, times, next_times, bucket_width)
    setting = Layer(offsets, heads, max_len, bias, mask_of(dropout, noise, layer), recompute)
    chosen, _ = OPERATOR.pick(x.device, backend)
    out: Tensor = chosen.run(x, Weights(uvqk, out_weight, out_bias), setting)
    return out
