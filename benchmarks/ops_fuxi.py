"""A part of `benchmarks.ops`: FuXi's three channels, forward + backward, against the padded eager formulation.

T tokens, H heads of width d
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import padded_fuxi
from benchmarks.ops_measure import Part, Settings, gemm_rate, gemm_variants, median, milliseconds, seconds_of, worst
from benchmarks.ops_shapes import AttentionInputs, Shape, attention_inputs
from turbogr.device import supports_bf16
from turbogr.ops.fuxi_attention import OPERATOR, fuxi_attention

CPU = torch.device("cpu")
SHAPES = {
    "ml1m": Shape("ml-1m", cap=200, users=128, heads=1, dim=50),
    "kuairand": Shape("kuairand-27k", cap=2048, users=8, heads=4, dim=64),
}
CHANNELS = 3


@dataclass(frozen=True)
class Inputs:
    """Leaves of one call: those of an attention call, its tables being maps; a gradient for every channel."""

    attention: AttentionInputs
    decay: Tensor  # [3], in place of the time table where it is asked for
    weights: Tensor  # [T, 3, H, d]


def inputs(lengths: Tensor, max_len: int, heads: int, dim: int, dtype: torch.dtype = torch.float32) -> Inputs:
    attention = attention_inputs(lengths, max_len, heads, dim, dtype)
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(len(attention.q), CHANNELS, heads, dim, generator=generator).to(dtype)
    decay = torch.tensor([0.75, 0.25, 0.875]).to(attention.time.dtype).requires_grad_()
    return Inputs(attention, decay, weights)


def ours(given: Inputs, backend: str | None = None, decay: bool = False, **mask: Any) -> tuple[Tensor, ...]:
    """Output and the gradients of q, k, v and both maps."""
    x, time = given.attention, given.decay if decay else given.attention.time
    y = fuxi_attention(
        x.q,
        x.k,
        x.v,
        x.offsets,
        max_len=x.max_len,
        position_table=x.position,
        time_table=None if decay else time,
        time_decay=time if decay else None,
        times=x.times,
        next_times=x.next_times,
        backend=backend,
        **mask,
    )
    return y, *torch.autograd.grad(y, (x.q, x.k, x.v, x.position, time), given.weights)


def eager(given: Inputs) -> tuple[Tensor, ...]:
    """The same by the padded formulation; its position table has a second half that the mask hides."""
    x = given.attention
    table = torch.cat((x.position.flip(0), x.position[1:])).detach().requires_grad_()
    y = padded_fuxi.jagged_attention(
        x.q,
        x.k,
        x.v,
        x.offsets,
        max_len=x.max_len,
        position=table,
        time=x.time,
        times=x.times,
        next_times=x.next_times,
    )
    return y, *torch.autograd.grad(y, (x.q, x.k, x.v, table, x.time), given.weights)


def flops(shape: Shape) -> float:
    """Forward and backward, the causal half only: 4 products of 2 operations forward, 9 backward (docs/flops.md)."""
    return shape.attention_flops() * 3.25 * 8 / (3.5 * 4)


def check(settings: Settings) -> dict[str, float]:
    """Relative errors against the float64 reference, by case."""
    uneven = torch.tensor([17, 0, 1, 64, 131, 33, 0])
    cases: list[tuple[str, Tensor, int, int, dict[str, Any]]] = [
        ("uneven rows", uneven, 2, 24, {}),
        ("decay", uneven, 2, 24, {"decay": True}),
        ("targets", uneven, 2, 24, {"num_targets": torch.tensor([3, 0, 1, 5, 2, 0, 0])}),
        ("window", uneven, 2, 24, {"window": 9}),
        ("one token", torch.tensor([1]), 1, 50, {}),
        ("ml1m lengths", SHAPES["ml1m"].lengths()[:16], 1, 50, {}),
    ]
    if not settings.quick:
        cases.append(("kuairand row", torch.tensor([2048]), 2, 64, {}))
    errors = {}
    for name, lengths, heads, dim, arguments in cases:
        for dtype in (torch.float32, torch.bfloat16) if supports_bf16(CPU) else (torch.float32,):
            x = inputs(lengths, max(int(lengths.max()), 1), heads, dim, dtype)
            errors[f"fuxi {name} {dtype}"] = worst(ours(x, **arguments), ours(_double(x), "reference", **arguments))
    return errors


def measure(settings: Settings) -> Part:
    part = Part()
    for name, shape in SHAPES.items():
        _measure_shape(name, shape, settings, part)
    part.details["fuxi_backend"] = {"name": OPERATOR.pick(CPU)[0].name, "reason": OPERATOR.pick(CPU)[1]}
    return part


def _measure_shape(name: str, shape: Shape, settings: Settings, part: Part) -> None:
    large = shape.cap > 1000
    rounds = (1 if large else 3) if settings.quick else (5 if large else 15)
    x = inputs(shape.lengths(), shape.cap, shape.heads, shape.dim)
    variants: dict[str, Callable[[], Any]] = {
        "ours": lambda: ours(x),
        "decay": lambda: ours(x, decay=True),
        "eager": lambda: eager(x),
    }
    if not (large and settings.quick):
        variants["tiles"] = lambda: ours(x, "tiles")
    seconds = seconds_of({**variants, **gemm_variants()}, rounds)
    best = median(seconds, "ours")
    part.figures[f"fuxi_{name}_x"] = median(seconds, "eager") / best
    part.figures[f"fuxi_{name}_gemm_share"] = flops(shape) / best / gemm_rate(seconds)
    part.details[f"fuxi_{name}"] = {
        "lengths": shape.lengths().tolist(),
        "ms": milliseconds(seconds),
        "gemm_gflops": gemm_rate(seconds) / 1e9,
    }


def _double(given: Inputs) -> Inputs:
    """The same numbers as float64 leaves."""

    def leaf(x: Tensor) -> Tensor:
        return x.detach().double().requires_grad_()

    x = given.attention
    parts = {name: leaf(getattr(x, name)) for name in ("q", "k", "v", "position", "time")}
    return Inputs(replace(x, **parts), leaf(given.decay), given.weights.double())
