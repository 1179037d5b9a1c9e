"""A part of `benchmarks.ops`: the sampled softmax, forward + backward, negatives drawn and row gradients included.

12,000 tokens or so, of users as long as ML-1M's, 128 negatives each, D = 50, over 3,883 items (`loss_4k`) and over a
million (`loss_1m`). Baselines: the public formulation, which gathers the negatives' rows, with a dense gradient of the
rows and with a sparse one; and in chunks of tokens the best that torch alone does, every form at its best chunk. Both
draw by `torch.randint`; ours draws the design's pure function of the token inside.

Bytes of ours over a million items: every candidate's row once, every touched row again for its norm, its gradient, and
an entry per candidate written and read.

T tokens, R negatives, N items, D width
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.baselines import sampled_softmax as baseline
from benchmarks.ops_measure import COPY_BYTES, Part, Settings, copy_variant, median, milliseconds, seconds_of, worst
from benchmarks.ops_shapes import Shape
from turbogr.device import tune_allocator
from turbogr.jagged import offsets_of, position_in_row, row_of_token
from turbogr.ops.philox import Key, Purpose
from turbogr.ops.sampled_softmax import OPERATOR, UniformDraws, sampled_softmax

CPU = torch.device("cpu")
LENGTHS = Shape("ml-1m", cap=200, users=113, heads=1, dim=50)
NEGATIVES, DIM, TEMPERATURE = 128, 50, 0.05
CATALOGUES = {"4k": 3883, "1m": 1_000_000}
CHUNKS = {"4k": (64, 256), "1m": (64, 128)}
ENTRY_BYTES = 8


@dataclass(frozen=True)
class LossInputs:
    query: Tensor  # [T, D] leaf
    rows: Tensor  # [N, D] leaf
    positive: Tensor  # int64 [T]
    draws: UniformDraws


def loss_inputs(
    lengths: Tensor, items: int, negatives: int, dim: int, dtype: torch.dtype = torch.float32
) -> LossInputs:
    generator = torch.Generator().manual_seed(2)
    offsets = offsets_of(lengths)
    tokens = int(lengths.sum())
    return LossInputs(
        query=torch.randn(tokens, dim, generator=generator).to(dtype).requires_grad_(),
        rows=torch.randn(items, dim, generator=generator).requires_grad_(),
        positive=torch.randint(0, items, (tokens,), generator=generator),
        draws=UniformDraws(
            Key(1, 2, Purpose.NEGATIVES),
            row_of_token(offsets, tokens),
            position_in_row(offsets, tokens),
            negatives,
            items,
        ),
    )


def ours(x: LossInputs, backend: str | None = None, log_q: Tensor | None = None) -> tuple[Tensor, ...]:
    """Loss, gradient of the queries, sparse gradient of the rows."""
    total, _ = sampled_softmax(
        x.query, x.rows, x.positive, x.draws, temperature=TEMPERATURE, log_q=log_q, backend=backend
    )
    return total.detach(), *torch.autograd.grad(total, (x.query, x.rows))


def check(settings: Settings) -> dict[str, float]:
    """Relative errors of loss and gradients against float64, by case."""
    errors = {}
    for name, lengths, items, negatives, dim in (
        ("small table", [5, 200, 1, 90], 300, 64, DIM),
        ("table in place", [5, 120, 1], 20_000, 64, DIM),
        ("wide rows", [5, 0, 60], 500, 33, 200),
        ("hits", [40], 5, 16, 16),
        ("one token", [1], 700, 128, DIM),
        ("no token", [0], 700, 128, DIM),
    ):
        log_q = torch.randn(items, generator=torch.Generator().manual_seed(3)).log_softmax(0)
        for dtype in (torch.float32, torch.bfloat16):
            x = loss_inputs(torch.tensor(lengths), items, negatives, dim, dtype)
            double = LossInputs(
                x.query.detach().double().requires_grad_(),
                x.rows.detach().double().requires_grad_(),
                x.positive,
                x.draws,
            )
            for given, tag in ((None, ""), (log_q, ", log q")):
                got = _dense(ours(x, log_q=given))
                wanted = _dense(ours(double, "reference", None if given is None else given.double()))
                errors[f"loss {name}{tag} {dtype}"] = worst(got, wanted)
    return errors


def _dense(answer: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one.to_dense() if one.is_sparse else one for one in answer)


def measure(settings: Settings) -> Part:
    part = Part()
    tune_allocator()
    for name, items in CATALOGUES.items():
        _measure_catalogue(name, items, settings, part)
    picked, reason = OPERATOR.pick(CPU)
    part.details["loss_backend"] = {"name": picked.name, "reason": reason}
    return part


def _measure_catalogue(name: str, items: int, settings: Settings, part: Part) -> None:
    x = loss_inputs(LENGTHS.lengths(), items, NEGATIVES, DIM)
    large = items > 100_000
    variants: dict[str, Callable[[], Any]] = {"ours": lambda: ours(x), "copy": copy_variant()}
    if large:
        variants["gather_sparse"] = _baseline(x, baseline.gathered, sparse=True)
    if not (large and settings.quick):
        variants["gather"] = _baseline(x, baseline.gathered)
    for chunk in CHUNKS[name][:1] if settings.quick else CHUNKS[name]:
        variants[f"chunk_{chunk}"] = _baseline(x, baseline.gathered_in_chunks, chunk=chunk)
        if large:
            variants[f"chunk_in_place_{chunk}"] = _baseline(x, baseline.gathered_in_place_in_chunks, chunk=chunk)
        else:
            variants[f"chunk_multiplied_{chunk}"] = _baseline(x, baseline.multiplied_in_chunks, chunk=chunk)
    seconds = seconds_of(variants, (1 if large else 3) if settings.quick else (5 if large else 11))
    best = median(seconds, "ours")
    for key, prefix in ((f"loss_{name}_x", "gather"), (f"loss_{name}_chunked_x", "chunk")):
        part.figures[key] = median(seconds, *(one for one in seconds if one.startswith(prefix))) / best
    touched = len(ours(x)[2].indices()[0])
    moved = len(x.query) * (1 + NEGATIVES) * (DIM * 4 + 2 * ENTRY_BYTES) + 2 * touched * DIM * 4
    copied = 2 * COPY_BYTES / median(seconds, "copy")
    part.figures[f"loss_{name}_ms"] = 1e3 * best
    if large:
        part.figures[f"loss_{name}_copy_share"] = moved / best / copied
    part.details[f"loss_{name}"] = {
        "tokens": len(x.query),
        "negatives": NEGATIVES,
        "items": items,
        "touched": touched,
        "ms": milliseconds(seconds),
        "moved_gb_per_s": moved / best / 1e9,
        "copy_gb_per_s": copied / 1e9,
    }


def _baseline(x: LossInputs, form: Callable[..., baseline.Answer], **options: Any) -> Callable[[], Any]:
    query, rows, shape = x.query.detach(), x.rows.detach(), (len(x.query), NEGATIVES)
    return lambda: form(query, rows, x.positive, torch.randint(0, len(rows), shape), TEMPERATURE, **options)
