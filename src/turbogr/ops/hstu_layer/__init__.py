"""A whole HSTU layer on jagged tokens, forward and backward fused around its attention.

[u | v | q | k] = SiLU(norm(x) W)
y = A v                                         A and its mask as in `turbogr.ops.hstu_attention`
out = x + dropout(u * norm(y)) Wo^T + b         norm: LayerNorm without affine parameters

T tokens, B rows, H heads, D width
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from turbogr.ops import hstu_attention, native
from turbogr.ops.dropout import Noise, check_noise, mask_of
from turbogr.ops.graph_operator import GraphOperator, watched
from turbogr.ops.hstu_attention import causal_pairs, check_bias, check_rows
from turbogr.ops.hstu_attention.autograd import Kernels
from turbogr.ops.hstu_attention.reference import Bias, Mask
from turbogr.ops.hstu_layer import cpu, fused
from turbogr.ops.hstu_layer.autograd import compute_type, run_layer
from turbogr.ops.hstu_layer.layer import Kept, Layer, Passes, Weights, backward, forward
from turbogr.ops.hstu_layer.reference import layer_reference, reference_gradients
from turbogr.ops.registry import Backend, register
from turbogr.ops.triton_support import rejects_triton


def _passes_cpu(x: Tensor, dtype: torch.dtype) -> Passes:
    return cpu if x.dtype == torch.float32 and dtype in (torch.float32, torch.bfloat16) else fused


def _passes_triton(x: Tensor, dtype: torch.dtype) -> Passes:
    # Triton is loaded where its kernels run, and they compute in single precision
    from turbogr.ops.hstu_layer import triton

    return fused if x.dtype == torch.float64 else triton


PASSES: dict[str, Callable[[Tensor, torch.dtype], Passes]] = {
    "triton": _passes_triton,
    "cpu": _passes_cpu,
    "fused": lambda x, dtype: fused,
}
"""By a backend's name, for x and the type that its GEMMs compute in."""


def _run(name: str, x: Tensor, weights: Weights, layer: Layer, backend: str | None) -> Tensor:
    dtype = compute_type(x)
    return run_layer(PASSES[name](x, dtype), x.contiguous(), weights, layer, dtype, _attention(x.device, backend))


def _attention(device: torch.device, backend: str | None) -> Kernels:
    """Of the backend that was asked for: what is called "fused" here is torch alone, as the attention's "tiles" are."""
    return hstu_attention.kernels(device, "tiles" if backend == "fused" else backend)


OPERATOR = register(
    "hstu_layer",
    Backend("triton", functools.partial(_run, "triton"), rejects_triton),
    Backend("cpu", functools.partial(_run, "cpu"), native.rejects("hstu_layer")),
    Backend("fused", functools.partial(_run, "fused")),
    Backend("reference", lambda x, weights, layer, backend: layer_reference(x, weights, layer)),
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
    num_targets: Tensor | None = None,
    num_context: int = 0,
    window: int | None = None,
    context_sees_history: bool = False,
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
        num_targets, num_context, window, context_sees_history: who sees whom, see there too.
        dropout: rate, where `noise` says whose tokens these are; None of it evaluates.
        layer: number of the layer among the mask's.
        recompute: keep nothing but x for the backward, which then runs the forward up to the attention again.
        backend: triton | cpu | fused | reference, of the attention too ("fused" is torch alone, with its "tiles"); None
            picks each on its own.

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
    if heads < 1 or width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}.")
    bias = Bias(position_bias, time_bias, times, next_times, bucket_width)
    check_bias(bias, len(x), max_len)
    check_noise(dropout, noise, len(x))
    mask = Mask(num_targets, num_context, window, context_sees_history)
    setting = Layer(offsets, heads, max_len, bias, mask_of(dropout, noise, layer), recompute, mask)
    if watched():
        return GRAPH_OPERATOR(x, Weights(uvqk, out_weight, out_bias), setting, compute_type(x), backend)
    check_rows(len(x), offsets, max_len, mask)
    chosen, _ = OPERATOR.pick(x.device, backend)
    out: Tensor = chosen.run(x, Weights(uvqk, out_weight, out_bias), setting, backend)
    return out


def _graph_forward(x: Tensor, weights: Weights, layer: Layer, dtype: torch.dtype, backend: str | None) -> list[Tensor]:
    check_rows(len(x), layer.offsets, layer.max_len, layer.mask)
    name = OPERATOR.pick(x.device, backend)[0].name
    if name == "reference":
        return [layer_reference(x, weights, layer)]
    attention = _attention(x.device, backend)
    out, kept = forward(PASSES[name](x, dtype), attention, x.contiguous(), weights.to(dtype), layer)
    return [out] if layer.recompute else [out, *kept]


def _graph_backward(
    dout: Tensor,
    kept: list[Tensor],
    x: Tensor,
    weights: Weights,
    layer: Layer,
    dtype: torch.dtype,
    backend: str | None,
) -> list[Tensor | None]:
    name = OPERATOR.pick(x.device, backend)[0].name
    if name == "reference":
        return reference_gradients(dout, x, weights, layer)
    passes, again = PASSES[name](x, dtype), Kept(*kept) if kept else None
    attention = _attention(x.device, backend)
    found = backward(passes, attention, dout.contiguous(), x.contiguous(), again, weights.to(dtype), layer)
    return list(found.to(weights.types))


def _graph_fake(x: Tensor, weights: Weights, layer: Layer, dtype: torch.dtype, backend: str | None) -> list[Tensor]:
    (tokens, width), heads = x.shape, layer.heads
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if layer.recompute or OPERATOR.pick(x.device, backend)[0].name == "reference":
        return [out]
    shapes = (tokens, 4 * width), (tokens, heads, width // heads)
    return [out, *(out.new_empty(shape, dtype=dtype) for shape in shapes)]


def _flops(x: Tensor, layer: Layer, gemms: float = 1.0, attention: float = 1.0) -> float:
    tokens, width = x.shape
    pairs = causal_pairs(layer.offsets, tokens, layer.max_len)
    return gemms * 10.0 * tokens * width * width + attention * 4.0 * width * pairs


GRAPH_OPERATOR = GraphOperator(
    "hstu_layer",
    _graph_forward,
    _graph_backward,
    fake=_graph_fake,
    gradients=("x", "weights.uvqk", "weights.out", "weights.bias", "layer.bias.position", "layer.bias.time"),
    flops=lambda x, layer: _flops(x, layer),
    backward_flops=lambda x, layer: _flops(x, layer, 2.0, 2.5),
)
