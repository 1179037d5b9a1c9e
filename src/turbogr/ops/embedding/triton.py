"""The embedding operators in Triton: sums in fp32, in an order that does not change from run to run.

Several tables are read by one launch: a program takes some ids of one table. A row's gradient is the sum of its
occurrences, which `group` put next to each other; the optimizers add them up themselves, a program per touched row.
Of rows with more than PIECE occurrences the sums of every PIECE of them are made first, by programs of their own.

n ids or occurrences, U distinct ids, N rows of a table, D width
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbogr.ops.embedding import reference
from turbogr.ops.embedding.backends import AdamStep, Gradients, Groups, Rounding
from turbogr.ops.embedding.reference import all_finite as all_finite
from turbogr.ops.triton_support import Configuration, next_power_of_two

PIECE = 256
CELLS = 2048
"""Values that a program of the lookup holds."""
SPARSE = 32
"""A table with more rows than so many per id is not marked row by row to find the distinct ids."""


@triton.jit
def _lookup_kernel(
    ids, jobs, bad, sample, TABLES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """jobs [TABLES, 7]: address of table and answer, rows, width, first and last id, first program. `sample` has the
    tables' type."""
    program = tl.program_id(0)
    number = tl.full([], -1, tl.int32)
    for t in range(TABLES):
        number += (program >= tl.load(jobs + 7 * t + 6)).to(tl.int32)
    job = jobs + 7 * number
    table = tl.load(job).to(tl.pointer_type(sample.dtype.element_ty))
    out = tl.load(job + 1).to(tl.pointer_type(sample.dtype.element_ty))
    num_rows, width, begin, end = tl.load(job + 2), tl.load(job + 3), tl.load(job + 4), tl.load(job + 5)
    place = begin + (program - tl.load(job + 6)) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = place < end
    row = tl.load(ids + place, mask=inside, other=0)
    valid = (row >= 0) & (row < num_rows)
    # whoever writes it writes the same
    tl.store(bad + tl.zeros_like(place), 1, mask=inside & ~valid)
    d = tl.arange(0, BLOCK_D)
    cells = (inside & valid)[:, None] & (d < width)[None, :]
    x = tl.load(table + row[:, None] * width + d[None, :], mask=cells, other=0.0)
    tl.store(out + (place - begin)[:, None] * width + d[None, :], x, mask=cells)


@triton.jit
def _occurrences(values, order, begin, end, D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr):
    """[BLOCK_D] the sum of values[order[begin : end]]; of values[begin : end] where there is no order."""
    d = tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
    for e in range(begin, end, BLOCK_E):
        place = e + tl.arange(0, BLOCK_E)
        inside = place < end
        if order is not None:
            place = tl.load(order + place, mask=inside, other=0).to(tl.int64)
        at = values + place[:, None] * D + d[None, :]
        total += tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    return tl.sum(total, axis=0)


@triton.jit
def _pieces_kernel(
    values, order, starts, piece_starts, piece_rows, partial,
    D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0).to(tl.int64)
    u = tl.load(piece_rows + piece)
    if u >= 0:
        begin = tl.load(starts + u) + (piece - tl.load(piece_starts + u)) * PIECE
        end = tl.minimum(begin + PIECE, tl.load(starts + u + 1))
        d = tl.arange(0, BLOCK_D)
        total = _occurrences(values, order, begin, end, D, BLOCK_E, BLOCK_D)
        tl.store(partial + piece * D + d, total, mask=d < D)


@triton.jit
def _gradient(
    u, values, order, starts, piece_starts, partial,
    D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """[BLOCK_D] the summed gradient of row u."""
    d = tl.arange(0, BLOCK_D)
    if order is None:
        total = tl.load(values + u * D + d, mask=d < D, other=0.0).to(tl.float32)
    else:
        begin, end = tl.load(starts + u), tl.load(starts + u + 1)
        if end - begin <= PIECE:
            total = _occurrences(values, order, begin, end, D, BLOCK_E, BLOCK_D)
        else:
            first, last = tl.load(piece_starts + u), tl.load(piece_starts + u + 1)
            total = _occurrences(partial, None, first, last, D, BLOCK_E, BLOCK_D)
    return total


@triton.jit
def _settled(
    u, values, order, starts, piece_starts, partial, scale, clip,
    D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The same scaled, and clipped where clip > 0."""
    g = _gradient(u, values, order, starts, piece_starts, partial, D, BLOCK_E, BLOCK_D, PIECE) * scale
    if clip > 0:
        g *= clip / tl.maximum(tl.sqrt(tl.sum(g * g, axis=0)), clip)
    return g


@triton.jit
def _sum_kernel(
    values, order, starts, piece_starts, partial, out,
    D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    u = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    total = _gradient(u, values, order, starts, piece_starts, partial, D, BLOCK_E, BLOCK_D, PIECE)
    tl.store(out + u * D + d, total.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def _adagrad_kernel(
    ids, values, order, starts, piece_starts, partial, scale, clip, weight, accumulated, lr, eps,
    D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    u = tl.program_id(0).to(tl.int64)
    row, d = tl.load(ids + u), tl.arange(0, BLOCK_D)
    g = _settled(u, values, order, starts, piece_starts, partial, scale, clip, D, BLOCK_E, BLOCK_D, PIECE)
    total = tl.load(accumulated + row) + tl.sum(g * g, axis=0) / D
    tl.store(accumulated + row, total)
    at = weight + row * D + d
    old = tl.load(at, mask=d < D, other=0.0).to(tl.float32)
    tl.store(at, (old - lr * g / (tl.sqrt(total) + eps)).to(weight.dtype.element_ty), mask=d < D)


@triton.jit
def _adam_kernel(
    ids, places, values, order, starts, piece_starts, partial, scale, clip, weight, moment1, moment2,
    beta1, beta2, eps, rate, unbias2, shrink,
    D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """A program per touched row; with `places` [N] one per row of the table, whose gradient is at its place, if any."""
    program = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    if places is None:
        row = tl.load(ids + program)
        g = _settled(program, values, order, starts, piece_starts, partial, scale, clip, D, BLOCK_E, BLOCK_D, PIECE)
    else:
        row, u = program, tl.load(places + program).to(tl.int64)
        g = tl.zeros([BLOCK_D], tl.float32)
        if u >= 0:
            g = _settled(u, values, order, starts, piece_starts, partial, scale, clip, D, BLOCK_E, BLOCK_D, PIECE)
    at, inside = row * D + d, d < D
    own1 = g + beta1 * (tl.load(moment1 + at, mask=inside, other=0.0) - g)
    own2 = g * g + beta2 * (tl.load(moment2 + at, mask=inside, other=0.0) - g * g)
    tl.store(moment1 + at, own1, mask=inside)
    tl.store(moment2 + at, own2, mask=inside)
    old = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32) * shrink
    new = old - rate * own1 / (tl.sqrt(own2 * unbias2) + eps)
    tl.store(weight + at, new.to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _add_rows_kernel(places, values, out, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """out[places[i]] += values[i]; the places are distinct."""
    i, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    at = out + tl.load(places + i) * D + d
    value = tl.load(values + i * D + d, mask=d < D, other=0.0)
    tl.store(at, tl.load(at, mask=d < D, other=0.0) + value, mask=d < D)


def lookup(tables: Sequence[Tensor], ids: Tensor, offsets: list[int]) -> list[Tensor]:
    tables, ids = [table.contiguous() for table in tables], ids.contiguous()
    spans = list(zip(tables, offsets[:-1], offsets[1:], strict=True))
    outs = [table.new_empty(end - begin, table.shape[1]) for table, begin, end in spans]
    widest = max(4, next_power_of_two(max(table.shape[1] for table in tables)))
    block = max(1, CELLS // widest)
    jobs, programs = [], 0
    for (table, begin, end), out in zip(spans, outs, strict=True):
        if end > begin:
            jobs.append((table.data_ptr(), out.data_ptr(), *table.shape, begin, end, programs))
            programs += triton.cdiv(end - begin, block)
    if programs:
        listed = torch.tensor(jobs, dtype=torch.int64).to(ids.device, non_blocking=True)
        bad = torch.zeros(1, dtype=torch.int32, device=ids.device)
        _lookup_kernel[(programs,)](ids, listed, bad, tables[0], TABLES=len(jobs), BLOCK_N=block, BLOCK_D=widest)
        # a device says so when it gets there
        torch._assert_async(bad[0] == 0, "an id is out of range for its table")
    return outs


def distinct(ids: Tensor, num_rows: int | None) -> tuple[Tensor, Tensor]:
    if num_rows is None or num_rows > SPARSE * len(ids):
        unique, inverse = torch.unique(ids, return_inverse=True)
        return unique, inverse
    seen = torch.zeros(num_rows, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
    place = torch.cumsum(seen, 0, dtype=torch.int32) - 1
    return seen.nonzero().squeeze(1), place[ids].long()


def group(places: Tensor, count: int) -> Groups:
    values, order = torch.sort(places.to(torch.int32), stable=True)
    bounds = torch.arange(count + 1, dtype=torch.int32, device=places.device)
    return Groups(order.to(torch.int32), torch.searchsorted(values, bounds))


def sum_groups(values: Tensor, groups: Groups) -> Tensor:
    count, width = len(groups.starts) - 1, values.shape[1]
    out = torch.empty(count, width, dtype=values.dtype, device=values.device)
    if count:
        _sum_kernel[(count,)](*_occurring(values.contiguous(), groups), out, **_sizes(width), num_warps=1)
    return out


def merge(places: list[Tensor], values: list[Tensor], count: int) -> Tensor:
    width = values[0].shape[1]
    total = values[0].new_zeros(count, width)
    for own, part in zip(places, values, strict=True):
        if len(own):
            block = _sizes(width)["BLOCK_D"]
            _add_rows_kernel[(len(own),)](own.contiguous(), part.contiguous(), total, D=width, BLOCK_D=block)
    return total


def round_rows(values: Tensor, rounding: Rounding) -> Tensor:
    return reference.round_rows(values, rounding)


def adagrad(
    weight: Tensor, total: Tensor, gradients: Gradients, lr: float, eps: float, rounding: Rounding | None = None
) -> None:
    if _drawn(weight, rounding):
        return reference.adagrad(weight, total, gradients, lr, eps, rounding)
    assert weight.is_contiguous() and total.is_contiguous()
    if len(gradients.ids):
        given = gradients.ids.contiguous(), *_given(gradients)
        _adagrad_kernel[(len(gradients.ids),)](*given, weight, total, lr, eps, **_sizes(weight.shape[1]), num_warps=1)


def lazy_adam(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    rounding: Rounding | None = None,
) -> None:
    if _drawn(weight, rounding):
        return reference.lazy_adam(weight, moment1, moment2, gradients, step, rounding)
    if len(gradients.ids):
        _adam(len(gradients.ids), gradients.ids.contiguous(), None, weight, moment1, moment2, gradients, step, 1.0)


def adamw(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    rounding: Rounding | None = None,
) -> None:
    if _drawn(weight, rounding):
        return reference.adamw(weight, moment1, moment2, gradients, step, rounding)
    rows, count = len(weight), len(gradients.ids)
    places = torch.full((rows,), -1, dtype=torch.int32, device=weight.device)
    places.index_copy_(0, gradients.ids, torch.arange(count, dtype=torch.int32, device=weight.device))
    _adam(rows, None, places, weight, moment1, moment2, gradients, step, 1 - step.lr * step.weight_decay)


def _drawn(weight: Tensor, rounding: Rounding | None) -> bool:
    """Whether the update rounds by chance, for which there is no kernel yet."""
    return rounding is not None and weight.dtype == torch.bfloat16


def _adam(
    programs: int,
    ids: Tensor | None,
    places: Tensor | None,
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    shrink: float,
) -> None:
    assert weight.is_contiguous() and moment1.is_contiguous() and moment2.is_contiguous()
    unbias1, unbias2 = step.unbias
    scalars = (*step.betas, step.eps, step.lr / unbias1, 1 / unbias2, shrink)
    _adam_kernel[(programs,)](
        ids, places, *_given(gradients), weight, moment1, moment2, *scalars, **_sizes(weight.shape[1]), num_warps=1
    )


def _given(gradients: Gradients) -> tuple[Any, ...]:
    """values, order, starts, piece_starts, partial, scale, clip."""
    values, groups = gradients.values.contiguous(), gradients.groups
    found = (values, None, None, None, None) if groups is None else _occurring(values, groups)
    return *found, float(gradients.scale), float(gradients.row_clip)


def _occurring(values: Tensor, groups: Groups) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """values, order, starts, piece_starts, partial: the sums of pieces [pieces, D] of rows with many occurrences."""
    entries, width = len(groups.order), values.shape[1]
    counts = groups.starts.diff()
    own = torch.where(counts > PIECE, torch.div(counts + PIECE - 1, PIECE, rounding_mode="floor"), 0)
    piece_starts = torch.zeros_like(groups.starts)
    torch.cumsum(own, 0, out=piece_starts[1:])
    # more than there can be, so that nothing waits for their number
    pieces = 2 * entries // PIECE
    numbers = torch.arange(pieces, device=values.device)
    rows = torch.searchsorted(piece_starts[1:], numbers, right=True)
    rows = torch.where(numbers < piece_starts[-1], rows, -1)
    partial = torch.empty(pieces, width, dtype=torch.float32, device=values.device)
    if pieces:
        sizes = _sizes(width) | {"BLOCK_E": 32}
        _pieces_kernel[(pieces,)](
            values, groups.order, groups.starts, piece_starts, rows, partial, **sizes, num_warps=4
        )
    return values, groups.order, groups.starts, piece_starts, partial


def _sizes(width: int) -> dict[str, int]:
    return {"D": width, "BLOCK_E": 8, "BLOCK_D": next_power_of_two(width), "PIECE": PIECE}


def configurations() -> list[Configuration]:
    """fp32 tables of 64 columns, gradients by occurrence; a lookup in bf16 rows of 256."""
    sizes = _sizes(64)
    occurring = {
        "values": "*fp32", "order": "*i32", "starts": "*i64", "piece_starts": "*i64", "partial": "*fp32",
    }  # fmt: skip
    settled = {"ids": "*i64", **occurring, "scale": "fp32", "clip": "fp32", "weight": "*fp32"}
    adam = {"moment1": "*fp32", "moment2": "*fp32"}
    adam |= dict.fromkeys(("beta1", "beta2", "eps", "rate", "unbias2", "shrink"), "fp32")
    dense = {name: kind for name, kind in (settled | adam | {"places": "*i32"}).items() if name != "ids"}
    rows = {
        "sums": (_sum_kernel, occurring | {"out": "*fp32"}, {}),
        "row-wise Adagrad": (_adagrad_kernel, settled | {"accumulated": "*fp32", "lr": "fp32", "eps": "fp32"}, {}),
        "lazy Adam": (_adam_kernel, settled | adam, {"places": None}),
        "AdamW": (_adam_kernel, dense, {"ids": None}),
    }
    listed = [
        Configuration(name=f"{name}, fp32, D=64", kernel=kernel, signature=types, constants=sizes | absent, num_warps=1)
        for name, (kernel, types, absent) in rows.items()
    ]
    listed.append(
        Configuration(
            name="pieces of rows that occur often, fp32, D=64",
            kernel=_pieces_kernel,
            signature=occurring | {"piece_rows": "*i64"},
            constants=sizes | {"BLOCK_E": 32},
            num_warps=4,
        )
    )
    listed += [
        Configuration(
            name=f"lookup in 8 tables, {dtype}, D={width}",
            kernel=_lookup_kernel,
            signature={"ids": "*i64", "jobs": "*i64", "bad": "*i32", "sample": f"*{dtype}"},
            constants={"TABLES": 8, "BLOCK_N": CELLS // width, "BLOCK_D": width},
            num_warps=4,
        )
        for dtype, width in (("fp32", 64), ("bf16", 256))
    ]
    listed.append(
        Configuration(
            name="adding lists of rows, fp32, D=64",
            kernel=_add_rows_kernel,
            signature={"places": "*i64", "values": "*fp32", "out": "*fp32"},
            constants={"D": 64, "BLOCK_D": 64},
            num_warps=4,
        )
    )
    return listed
