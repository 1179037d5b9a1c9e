"""A part of `benchmarks.ops`: attention with both biases, forward + backward, against the padded eager formulation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import padded_hstu
from benchmarks.ops_measure import (
    ONLY_FULL,
    Part,
    Settings,
    Worker,
    gemm_rate,
    gemm_variants,
    median,
    milliseconds,
    peak_bytes,
    seconds_of,
    worst,
)
from benchmarks.ops_shapes import AttentionInputs, Shape, attention_inputs
from turbogr.device import supports_bf16
from turbogr.ops.hstu_attention import OPERATOR, hstu_attention

CPU = torch.device("cpu")
SHAPES = {
    "ml1m_1head": Shape("ml-1m", cap=200, users=128, heads=1, dim=50),
    "ml1m_2heads": Shape("ml-1m", cap=200, users=128, heads=2, dim=25),
    "kuairand": Shape("kuairand-27k", cap=2048, users=8, heads=4, dim=64),
}
ONE_USER, ONE_USER_QUICK = 32768, 8192
TINY_USERS = 2
NATIVE = "cpu"


def ours(x: AttentionInputs, backend: str | None = None, **mask: Any) -> tuple[Tensor, ...]:
    """Output and the gradients of q, k, v and both tables."""
    y = hstu_attention(
        x.q,
        x.k,
        x.v,
        x.offsets,
        max_len=x.max_len,
        position_bias=x.position,
        time_bias=x.time,
        times=x.times,
        next_times=x.next_times,
        backend=backend,
        **mask,
    )
    return y, *torch.autograd.grad(y, x.leaves, x.weights)


def eager(x: AttentionInputs) -> tuple[Tensor, ...]:
    """The same by the padded formulation; its position table has a second half that the mask hides."""
    table = torch.cat((x.position.flip(0), x.position[1:])).detach().requires_grad_()
    y = padded_hstu.jagged_attention(
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
    return y, *torch.autograd.grad(y, (x.q, x.k, x.v, table, x.time), x.weights)


def variant(shape: str, name: str, dtype: str = "float32", tiny: bool = False) -> Callable[[], Any]:
    """A variant by names, for a process of its own; tiny: few short rows."""
    given = SHAPES[shape]
    lengths = given.lengths()[:TINY_USERS].clamp(max=64) if tiny else given.lengths()
    x = attention_inputs(lengths, given.cap, given.heads, given.dim, getattr(torch, dtype))
    run = {"ours": ours, "eager": eager}[name]
    return lambda: run(x)


def check(settings: Settings) -> dict[str, float]:
    """Relative errors against the float64 reference, by case."""
    errors = {}
    for name, lengths, heads, dim, times, mask in _cases(settings):
        for dtype in _dtypes():
            x = attention_inputs(lengths, max(int(lengths.max()), 1), heads, dim, dtype, times=times)
            errors[f"attention {name} {dtype}"] = worst(ours(x, **mask), ours(as_double(x), "reference", **mask))
    return errors


def measure(settings: Settings) -> Part:
    part = Part()
    for name, shape in SHAPES.items():
        _measure_shape(name, shape, settings, part)
    _measure_instruction_sets(settings, part)
    _measure_bf16(settings, part)
    _measure_one_user(settings, part)
    part.details["attention_backend"] = {"name": OPERATOR.pick(CPU)[0].name, "reason": OPERATOR.pick(CPU)[1]}
    return part


def _measure_shape(name: str, shape: Shape, settings: Settings, part: Part) -> None:
    large = shape.cap > 1000
    rounds = (2 if large else 5) if settings.quick else (5 if large else 41)
    variants = {n: variant(name, n) for n in ("ours", "eager")}
    seconds = seconds_of({**variants, **gemm_variants()}, rounds)
    best = median(seconds, "ours")
    part.figures[f"attention_{name}_x"] = median(seconds, "eager") / best
    part.figures[f"attention_{name}_gflops"] = shape.attention_flops() / best / 1e9
    part.figures[f"attention_{name}_gemm_share"] = shape.attention_flops() / best / gemm_rate(seconds)
    part.details[f"attention_{name}"] = {
        "lengths": shape.lengths().tolist(),
        "ms": milliseconds(seconds),
        "gemm_gflops": gemm_rate(seconds) / 1e9,
    }
    if settings.quick:
        part.missing([f"attention_{name}_memory_ratio", f"attention_{name}_memory_x"], ONLY_FULL)
        return
    answer = attention_inputs(shape.lengths(), shape.cap, shape.heads, shape.dim).answer_bytes
    peaks = {n: peak_bytes("benchmarks.ops_attention:variant", shape=name, name=n) for n in ("ours", "eager")}
    part.figures[f"attention_{name}_memory_ratio"] = peaks["ours"] / answer
    part.figures[f"attention_{name}_memory_x"] = peaks["eager"] / peaks["ours"]
    part.details[f"attention_{name}"] |= {"peak_bytes": peaks, "answer_bytes": answer}


def _measure_instruction_sets(settings: Settings, part: Part) -> None:
    """AVX2 code in a process of its own, in the same rounds as the best code."""
    name = "attention_avx2_share"
    if not _is_native():
        part.missing(name, f"the compiled backend does not run here: {OPERATOR.pick(CPU)[1]}")
        return
    from turbogr.ops.native import FORCED_SET, instruction_set

    if not instruction_set().startswith("avx512"):
        part.missing(name, f"this processor's best code is {instruction_set()}")
        return
    arguments = {"shape": "kuairand", "name": "ours"}
    worker = Worker("benchmarks.ops_attention:variant", arguments, {FORCED_SET: "avx2"})
    try:
        seconds = seconds_of({"best": variant(**arguments), "avx2": worker}, 3 if settings.quick else 7)
    finally:
        worker.close()
    part.figures[name] = median(seconds, "best") / median(seconds, "avx2")
    part.details[name] = {"ms": milliseconds(seconds), "best": instruction_set()}


def _measure_bf16(settings: Settings, part: Part) -> None:
    if not supports_bf16(CPU):
        part.missing("attention_bf16_x", "this processor does not compute bf16 in hardware")
        return
    variants = {dtype: variant("kuairand", "ours", dtype) for dtype in ("float32", "bfloat16")}
    seconds = seconds_of(variants, 3 if settings.quick else 7)
    part.figures["attention_bf16_x"] = median(seconds, "float32") / median(seconds, "bfloat16")
    part.details["attention_bf16"] = milliseconds(seconds)


def _measure_one_user(settings: Settings, part: Part) -> None:
    """One long user alone: two threads against one."""
    name = "attention_one_user_two_cores_x"
    threads = torch.get_num_threads()
    if threads < 2 or not _is_native():
        part.missing(
            name, "needs two cores" if threads < 2 else "only the compiled backend splits the work of one user"
        )
        return
    shape = Shape("full", ONE_USER_QUICK if settings.quick else ONE_USER, users=1, heads=1, dim=64)
    x = attention_inputs(shape.lengths(), shape.cap, shape.heads, shape.dim)

    def with_threads(count: int) -> Callable[[], None]:
        def call() -> None:
            torch.set_num_threads(count)
            ours(x)

        return call

    seconds = seconds_of({"one": with_threads(1), "two": with_threads(2)}, 2 if settings.quick else 3)
    torch.set_num_threads(threads)
    part.figures[name] = median(seconds, "one") / median(seconds, "two")
    part.details[name] = {"tokens": shape.cap, "ms": milliseconds(seconds)}


def _is_native() -> bool:
    return OPERATOR.pick(CPU)[0].name == NATIVE


def _dtypes() -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] if supports_bf16(CPU) else [torch.float32]


def as_double(x: AttentionInputs) -> AttentionInputs:
    """The same numbers as float64 leaves."""
    parts = {name: getattr(x, name).detach().double() for name in ("q", "k", "v", "position", "time", "weights")}
    for name in ("q", "k", "v", "position", "time"):
        parts[name].requires_grad_()
    return AttentionInputs(offsets=x.offsets, times=x.times, next_times=x.next_times, max_len=x.max_len, **parts)


Case = tuple[str, Tensor, int, int, tuple[Tensor, Tensor] | None, dict[str, Any]]


def _cases(settings: Settings) -> list[Case]:
    """(name, lengths, heads, d, times, mask) of what must agree before anything is timed."""
    generator = torch.Generator().manual_seed(2)
    uneven = torch.tensor([17, 0, 1, 64, 131, 33, 0])
    tokens = int(uneven.sum())

    def scattered(span: int) -> tuple[Tensor, Tensor]:
        low, high = -span // 2, span // 2
        return tuple(torch.randint(low, high, (tokens,), generator=generator) for _ in range(2))  # type: ignore[return-value]

    targets = {"num_targets": torch.tensor([3, 0, 1, 5, 2, 0, 0])}
    cases: list[Case] = [
        ("uneven rows", uneven, 2, 24, None, {}),
        ("unsorted times", uneven, 2, 24, scattered(10**8), {}),
        ("spans beyond 2^31", uneven, 1, 50, scattered(2**40), {}),
        ("targets", uneven, 2, 24, None, targets),
        ("window", uneven, 2, 24, None, {"window": 9}),
        ("one token", torch.tensor([1]), 1, 50, None, {}),
        ("ml1m lengths", SHAPES["ml1m_1head"].lengths()[:16], 1, 50, None, {}),
        ("kuairand row", torch.tensor([2048]), 2, 64, None, {}),
    ]
    context = torch.where(uneven > 1, uneven, uneven * 4)
    cases.append(("context", context, 2, 24, None, {"num_context": 3}))
    if not settings.quick:
        cases.append(("8192 tokens", torch.tensor([8192]), 1, 32, None, {}))
    return cases
