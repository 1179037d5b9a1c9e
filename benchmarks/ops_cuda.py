"""The part of `benchmarks.ops` for a GPU: attention and a whole layer in bf16, absolute rates by the causal count.

Attention at head widths 64, 128 and 256, 4096 tokens a row, without and with both biases, forward and forward +
backward; the same with KuaiRand-27K's lengths; one layer at hidden 1024. Ceilings in the same run: a square bf16 GEMM
and a copy. Times are between device events, medians over rounds that run every variant once.

T tokens, H heads of width d
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks import ops_attention, ops_layer
from benchmarks.common import interleaved, summary
from benchmarks.ops_measure import Part, Settings, worst
from benchmarks.ops_shapes import AttentionInputs, Shape, attention_inputs
from turbogr.ops.hstu_attention import OPERATOR, hstu_attention

DEVICE = torch.device("cuda")
SQUARE, SQUARE_QUICK = 8192, 4096
COPY_BYTES = 1 << 30
DATASHEET = 989e12
"""Dense bf16 operations per second of an H100 or H200: what shares of a layer are of."""
HIDDEN, LENGTH = 1024, 4096
WARM_UP = 3


def shapes(settings: Settings) -> dict[str, Shape]:
    users = 4 if settings.quick else 16
    found = {
        f"full_d{dim}": Shape("full", LENGTH, users, heads=HIDDEN // dim, dim=dim)
        for dim in ((128,) if settings.quick else (64, 128, 256))
    }
    return {**found, "kuairand_d128": Shape("kuairand-27k", LENGTH, users * 4, heads=8, dim=128)}


@dataclass(frozen=True)
class Timed:
    """What a variant does on the device, and how many operations that are."""

    call: Callable[[], Any]
    flops: float


def check(settings: Settings) -> dict[str, float]:
    """Relative errors against the float64 reference on the device, by case; nothing where there is no device."""
    errors: dict[str, float] = {}
    if why_not():
        return errors
    picked = OPERATOR.pick(DEVICE)[0].name
    errors["cuda attention runs in triton"] = 0.0 if picked == "triton" else float("inf")
    lengths = torch.tensor([17, 0, 1, 64, 131, 300, 0])
    for dim in (64, 128, 256):
        for dtype in (torch.float32, torch.bfloat16):
            x = attention_inputs(lengths, 300, 2, dim, dtype, device="cuda")
            wanted = ops_attention.ours(ops_attention.as_double(x), "reference")
            errors[f"cuda attention d={dim} {dtype}"] = worst(ops_attention.ours(x), wanted)
    return errors


def measure(settings: Settings) -> Part:
    part = Part()
    names = [f"cuda_{name}" for name in variants_of(settings)]
    reason = why_not()
    if reason:
        part.missing([f"{name}_tflops" for name in names], reason)
        return part
    variants = {name: make() for name, make in variants_of(settings).items()}
    seconds = device_seconds({name: one.call for name, one in variants.items()}, 5 if settings.quick else 21)
    for name, one in variants.items():
        part.figures[f"cuda_{name}_tflops"] = one.flops / statistics.median(seconds[name]) / 1e12
    for name in ("layer", "layer_plain"):
        part.figures[f"cuda_{name}_mfu"] = variants[name].flops / statistics.median(seconds[name]) / DATASHEET
    part.figures["cuda_copy_tb_per_s"] = 2 * COPY_BYTES / statistics.median(seconds["copy"]) / 1e12
    part.details["cuda"] = {
        "ms": {name: summary([1e3 * one for one in values]) for name, values in seconds.items()},
        "attention_backend": OPERATOR.pick(DEVICE)[0].name,
        "shapes": {name: vars(shape) for name, shape in shapes(settings).items()},
    }
    return part


def why_not() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device here"


def variants_of(settings: Settings) -> dict[str, Callable[[], Timed]]:
    """Makers, so that names are known where nothing can run."""
    found: dict[str, Callable[[], Timed]] = {}
    for name, shape in shapes(settings).items():
        for biases in (False, True):
            tag = f"attention_{name}" + ("_biases" if biases else "")
            found[f"{tag}_forward"] = lambda shape=shape, biases=biases: _attention(shape, biases, backward=False)
            found[tag] = lambda shape=shape, biases=biases: _attention(shape, biases, backward=True)
    found["layer"] = lambda: _layer(settings, biases=True)
    found["layer_plain"] = lambda: _layer(settings, biases=False)
    found["gemm"] = lambda: _gemm(SQUARE_QUICK if settings.quick else SQUARE)
    found["copy"] = _copy
    return found


def device_seconds(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Every variant a few times to warm up, then all in turn, each between two events."""

    def between_events(call: Callable[[], Any]) -> Callable[[], float]:
        def timed() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return timed

    for call in calls.values():
        for _ in range(WARM_UP):
            call()
    torch.cuda.synchronize()
    return interleaved({name: between_events(call) for name, call in calls.items()}, rounds)


def _attention(shape: Shape, biases: bool, *, backward: bool) -> Timed:
    x = attention_inputs(shape.lengths(), shape.cap, shape.heads, shape.dim, torch.bfloat16, device="cuda")
    flops = shape.attention_flops() / (1.0 if backward else 3.5)
    if not backward:
        return Timed(lambda: _forward(x, biases), flops)
    leaves = x.leaves if biases else x.leaves[:3]
    return Timed(lambda: torch.autograd.grad(_forward(x, biases, grad=True), leaves, x.weights), flops)


def _forward(x: AttentionInputs, biases: bool, *, grad: bool = False) -> torch.Tensor:
    """On a batch of its own: what is planned once for a batch is planned at every call."""
    with torch.set_grad_enabled(grad):
        return hstu_attention(
            x.q,
            x.k,
            x.v,
            x.offsets.clone(),
            max_len=x.max_len,
            position_bias=x.position if biases else None,
            time_bias=x.time if biases else None,
            times=x.times.clone() if biases else None,
            next_times=x.next_times.clone() if biases else None,
        )


def _layer(settings: Settings, *, biases: bool) -> Timed:
    shape = Shape("full", LENGTH, 2 if settings.quick else 8, heads=HIDDEN // 256, dim=256)
    made = ops_layer.inputs(shape, shape.lengths())
    leaves = tuple(leaf.detach().cuda().requires_grad_() for leaf in made.leaves)
    times = made.times[0].cuda(), made.times[1].cuda()
    x = replace(made, leaves=leaves, weights=made.weights.cuda(), lengths=made.lengths.cuda(), times=times)
    return Timed(lambda: ops_layer.ours(x, bf16=True, biases=biases), shape.layer_flops())


def _gemm(size: int) -> Timed:
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return Timed(lambda: torch.mm(a, b), 2.0 * size**3)


def _copy() -> Timed:
    source = torch.randn(COPY_BYTES // 4, device=DEVICE)
    target = torch.empty_like(source)
    return Timed(lambda: target.copy_(source), 0.0)
