"""A part of `benchmarks.ops`: one HSTU layer, forward + backward, D = 512, against the best GEMM and the padded twin.

KuaiRand lengths cut at 2048, 8 heads of 64, both biases, dropout. FLOPs are the causal count (docs/flops.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import padded_hstu
from benchmarks.ops_measure import (
    ONLY_FULL,
    TOLERANCE,
    Part,
    Settings,
    gemm_rate,
    gemm_variants,
    median,
    milliseconds,
    peak_bytes,
    seconds_of,
    worst,
)
from benchmarks.ops_shapes import Shape, event_times
from turbogr.device import supports_bf16
from turbogr.jagged import offsets_of, position_in_row, row_of_token
from turbogr.ops.dropout import Noise
from turbogr.ops.hstu_layer import OPERATOR, hstu_layer

CPU = torch.device("cpu")
FULL = Shape("kuairand-27k", cap=2048, users=8, heads=8, dim=64)
QUICK = Shape("kuairand-27k", cap=2048, users=2, heads=8, dim=64)
RATE = 0.2


@dataclass(frozen=True)
class Inputs:
    leaves: tuple[Tensor, ...]  # x, uvqk, out weight, out bias, position, time
    weights: Tensor  # [T, D] gradient of the output
    lengths: Tensor
    times: tuple[Tensor, Tensor]
    heads: int
    max_len: int


def inputs(shape: Shape, lengths: Tensor) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    width, tokens = shape.heads * shape.dim, int(lengths.sum())
    std = width**-0.5
    shapes = (((tokens, width), 1.0), ((width, 4 * width), std), ((width, width), std), ((width,), 1.0))
    sizes = (*shapes, ((shape.cap,), 0.1), ((129,), 0.1))
    leaves = tuple((torch.randn(size, generator=generator) * scale).requires_grad_() for size, scale in sizes)
    weights = torch.randn(tokens, width, generator=generator)
    return Inputs(leaves, weights, lengths, event_times(lengths), shape.heads, shape.cap)


def ours(
    x: Inputs, *, rate: float = RATE, bf16: bool = False, biases: bool = True, backend: str | None = None
) -> tuple[Tensor, ...]:
    """The output and every gradient."""
    first, uvqk, out_weight, out_bias, position, time = x.leaves
    offsets, tokens = offsets_of(x.lengths), len(first)
    noise = Noise(0, 0, row_of_token(offsets, tokens), position_in_row(offsets, tokens))
    with torch.autocast(first.device.type, torch.bfloat16, enabled=bf16):
        out = hstu_layer(
            first,
            offsets,
            uvqk,
            out_weight,
            out_bias,
            heads=x.heads,
            max_len=x.max_len,
            position_bias=position if biases else None,
            time_bias=time if biases else None,
            times=x.times[0],
            next_times=x.times[1],
            dropout=rate,
            noise=noise,
            layer=1,
            backend=backend,
        )
    return out, *torch.autograd.grad(out, x.leaves if biases else x.leaves[:4], x.weights.to(out.dtype))


def twin(x: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """The eager padded layer with the same sizes."""
    first = x.leaves[0]
    layer = padded_hstu.HstuLayer(first.shape[1], x.heads, x.max_len, RATE)
    padding = padded_hstu.Padding.of(offsets_of(x.lengths))
    extended = padded_hstu.extended_times(padding, *x.times)

    def call() -> tuple[Tensor, ...]:
        out = layer(first, padding, extended)
        return out, *torch.autograd.grad(out, (first, *layer.parameters()), x.weights)

    return call


def variant(name: str, quick: bool = False, tiny: bool = False) -> Callable[[], Any]:
    """A variant by name, for a process of its own; tiny: few short rows."""
    shape = QUICK if quick else FULL
    x = inputs(shape, shape.lengths()[:2].clamp(max=64) if tiny else shape.lengths())
    if name == "twin":
        return twin(x)
    return lambda: ours(x, bf16=name == "ours_bf16")


def check(settings: Settings) -> dict[str, float]:
    """Relative errors of the output and every gradient against the float64 reference, by case."""
    errors = {}
    for name, lengths in (("uneven rows", [17, 0, 1, 64, 131, 33]), ("one token", [1]), ("one row", [300])):
        for heads, dim in ((2, 24), (1, 50)):
            x = inputs(Shape("full", cap=300, users=1, heads=heads, dim=dim), torch.tensor(lengths))
            wide = tuple(leaf.detach().double().requires_grad_() for leaf in x.leaves)
            double = Inputs(wide, x.weights.double(), x.lengths, x.times, x.heads, x.max_len)
            wanted = ours(double, backend="reference")
            for dtype in TOLERANCE if supports_bf16(CPU) else (torch.float32,):
                got = ours(x, bf16=dtype == torch.bfloat16)
                # the tables' gradients are sums of either sign: of one token they are nothing (the norm behind the
                # attention takes its scale away), of few they keep more of bf16's rounding than anything else
                few = name == "one token" or (dtype == torch.bfloat16 and name != "one row")
                count = 5 if few else 7
                errors[f"layer {name}, {heads} heads of {dim} {dtype}"] = worst(got[:count], wanted[:count])
    return errors


def measure(settings: Settings) -> Part:
    part = Part()
    shape = QUICK if settings.quick else FULL
    names = ["ours", "twin"] + (["ours_bf16"] if supports_bf16(CPU) else [])
    variants = {name: variant(name, settings.quick) for name in names}
    ceilings = {f"{kind}_{name}": call for kind, dtype in _kinds() for name, call in gemm_variants(dtype).items()}
    seconds = seconds_of({**variants, **ceilings}, 2 if settings.quick else 7)
    rates = {kind: gemm_rate(seconds, f"{kind}_gemm_") for kind, _ in _kinds()}
    part.figures["layer_x"] = median(seconds, "twin") / median(seconds, "ours")
    part.figures["layer_gemm_share"] = shape.layer_flops() / median(seconds, "ours") / rates["float32"]
    if "ours_bf16" in names:
        part.figures["layer_bf16_gemm_share"] = shape.layer_flops() / median(seconds, "ours_bf16") / rates["bfloat16"]
    else:
        part.missing("layer_bf16_gemm_share", "this processor does not compute bf16 in hardware")
    peaks: dict[str, int] = {}
    if settings.quick:
        part.missing("layer_memory_ratio", ONLY_FULL)
    else:
        peaks = {name: peak_bytes("benchmarks.ops_layer:variant", name=name) for name in names[:2]}
        part.figures["layer_memory_ratio"] = peaks["ours"] / peaks["twin"]
    part.details["layer"] = {
        "lengths": shape.lengths().tolist(),
        "ms": milliseconds(seconds),
        "gflops": {name: shape.layer_flops() / median(seconds, name) / 1e9 for name in names},
        "gemm_gflops": {kind: rate / 1e9 for kind, rate in rates.items()},
        "peak_bytes": peaks,
        "backend": dict(zip(("name", "reason"), (OPERATOR.pick(CPU)[0].name, OPERATOR.pick(CPU)[1]), strict=True)),
    }
    return part


def _kinds() -> list[tuple[str, torch.dtype]]:
    kinds = [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
    return kinds if supports_bf16(CPU) else kinds[:1]
