"""Sampled softmax in Triton: neither the scores [T, 1 + R] nor the gathered rows [T, 1 + R, D] are ever in memory.

Forward, a program per token: its candidates' rows are read once, block by block, into a running log-sum-exp and, where
a gradient is wanted, a running sum of rows weighted by their probability, which is the query's gradient.

Rows' gradient: the candidates' indices, sorted, put all tokens that a row met next to each other. A program per piece
of such a run reads the row once and the tokens' queries, and computes their scores again from the kept log-sum-exp; the
pieces of a row are added in their order, so the result is the same at every run. Where torch is not asked for
deterministic algorithms, a program per token adds to the rows by atomics instead, and nothing is sorted.

Nothing waits for the device, except the gradient of a table that is read in place: it has as many rows as were touched.

T tokens, R negatives, C = 1 + R candidates (0 is the positive), U rows, D width, n = T * C entries
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbogr.ops.embedding import distinct
from turbogr.ops.philox.triton import interleaved, key_words, philox_words
from turbogr.ops.sampled_softmax.draws import UniformDraws, by_ids, sparse_rows
from turbogr.ops.sampled_softmax.sparse import loss_sparse
from turbogr.ops.triton_support import Configuration, next_power_of_two

PIECE = 256
"""Entries of one row that one program adds up."""
CELLS = 4096
"""Values of gathered rows that a program holds at a time."""


@triton.jit
def _unit(x, eps):
    """(rows of x [n, D] at length 1, their lengths [n]); what is shorter than eps is divided by eps."""
    norm = tl.sqrt(tl.sum(x * x, axis=1))
    return x / tl.maximum(norm, eps)[:, None], norm


@triton.jit
def _through_norm(dunit, unit, norm, eps):
    """Gradient of x from that of x / max(|x|, eps); [n, D] and [n]."""
    along = tl.sum(dunit * unit, axis=1)[:, None] * unit
    return tl.where((norm > eps)[:, None], dunit - along, dunit) / tl.maximum(norm, eps)[:, None]


@triton.jit
def _load_unit_rows(rows, index, inside, eps, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = rows + index.to(tl.int64)[:, None] * D + d[None, :]
    x = tl.load(at, mask=inside[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
    return _unit(x, eps)


@triton.jit
def _draw(key_low, key_high, step, purpose, user, position, first, bound, BLOCK_R: tl.constexpr):
    """[BLOCK_R] whole numbers below `bound`: draws first .. of one token, as `random_below` makes them."""
    group = first // 4 + tl.arange(0, BLOCK_R // 4)
    low = (position << 16) | group
    x0, x1, x2, x3 = philox_words(key_low, key_high, step, purpose, user, low)
    words = interleaved(x0[None, :], x1[None, :], x2[None, :], x3[None, :], 1, BLOCK_R // 4)
    limit = tl.full([1], 0, tl.uint32) + bound.to(tl.uint32)
    return tl.reshape(tl.umulhi(words, tl.broadcast_to(limit[None, :], [1, BLOCK_R])), [BLOCK_R]).to(tl.int32)


@triton.jit(do_not_specialize=["key_low", "key_high", "step", "purpose", "bound"])
def _loss_kernel(
    query, rows, positive, negatives, users, positions, log_q, losses, normaliser, dquery, entries,
    key_low, key_high, step, purpose, bound, inverse_temperature, eps,
    R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, GRADIENTS: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    one = tl.arange(0, 1)
    always = one == 0
    d = tl.arange(0, BLOCK_D)
    unit_query, query_norm = _load_unit_rows(query, t + one, always, eps, D, BLOCK_D)  # [1, BLOCK_D]
    wanted = tl.load(positive + t + one)
    unit_positive, positive_norm = _load_unit_rows(rows, wanted, always, eps, D, BLOCK_D)
    score = tl.sum(unit_query * unit_positive, axis=1) * inverse_temperature  # [1]
    if log_q is not None:
        score -= tl.load(log_q + wanted).to(tl.float32)
    most, total, mean_row = score, tl.full([1], 1.0, tl.float32), unit_positive
    if GRADIENTS:
        tl.store(entries + t * (R + 1) + one, wanted.to(tl.int32))
    if negatives is None:
        user, position = tl.load(users + t), tl.load(positions + t)
    for first in range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        inside = r < R
        if negatives is None:
            index = _draw(key_low, key_high, step, purpose, user, position, first, bound, BLOCK_R)
        else:
            index = tl.load(negatives + t * R + r, mask=inside, other=0).to(tl.int32)
        if GRADIENTS:
            tl.store(entries + t * (R + 1) + 1 + r, index, mask=inside)
        unit_rows, rows_norm = _load_unit_rows(rows, index, inside, eps, D, BLOCK_D)  # [BLOCK_R, BLOCK_D]
        scores = tl.sum(unit_rows * unit_query, axis=1) * inverse_temperature
        if log_q is not None:
            scores -= tl.load(log_q + index, mask=inside, other=0.0).to(tl.float32)
        scores = tl.where(inside & (index != wanted), scores, float("-inf"))
        before = most
        most = tl.maximum(before, tl.max(scores, axis=0))
        weights, shrink = tl.exp(scores - most), tl.exp(before - most)
        total = total * shrink + tl.sum(weights, axis=0)
        if GRADIENTS:
            mean_row = mean_row * shrink[:, None] + tl.sum(weights[:, None] * unit_rows, axis=0)[None, :]
    log_sum = most + tl.log(total)
    tl.store(losses + t + one, log_sum - score)
    if GRADIENTS:
        tl.store(normaliser + t + one, log_sum)
        dunit = (mean_row / total[:, None] - unit_positive) * inverse_temperature
        slope = _through_norm(dunit, unit_query, query_norm, eps)
        at = dquery + (t + one)[:, None] * D + d[None, :]
        tl.store(at, slope.to(dquery.dtype.element_ty), mask=(d < D)[None, :])


@triton.jit
def _slopes(unit_query, unit_row, candidate, wanted, index, log_q, normaliser, inverse_temperature):
    """dloss / dscore [n] of entries: probability, less one for the positive, nothing for a negative equal to it."""
    scores = tl.sum(unit_query * unit_row, axis=1) * inverse_temperature
    if log_q is not None:
        scores -= tl.load(log_q + index).to(tl.float32)
    slope = tl.where((candidate > 0) & (index == wanted), 0.0, tl.exp(scores - normaliser))
    return slope - tl.where(candidate == 0, 1.0, 0.0)


@triton.jit(do_not_specialize=["count"])
def _pieces_kernel(
    query, rows, positive, row_ids, log_q, normaliser, order, starts, piece_starts, piece_rows, partial,
    count, inverse_temperature, eps,
    C: tl.constexpr, D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """partial [pieces, D]: the gradient of a unit row from up to PIECE of its entries."""
    piece = tl.program_id(0).to(tl.int64)
    u = tl.load(piece_rows + piece)
    if u < count:
        one = tl.arange(0, 1)
        index = u + one
        if row_ids is not None:
            index = tl.load(row_ids + index)
        unit_row, row_norm = _load_unit_rows(rows, index, one == 0, eps, D, BLOCK_D)  # [1, BLOCK_D]
        first = tl.load(starts + u) + (piece - tl.load(piece_starts + u)) * PIECE
        end = tl.minimum(first + PIECE, tl.load(starts + u + 1))
        total = tl.zeros([BLOCK_E, BLOCK_D], tl.float32)
        for e in range(first, end, BLOCK_E):
            place = e + tl.arange(0, BLOCK_E)
            inside = place < end
            entry = tl.load(order + place, mask=inside, other=0)
            token, candidate = entry // C, entry % C
            unit_query, query_norm = _load_unit_rows(query, token, inside, eps, D, BLOCK_D)
            wanted = tl.load(positive + token, mask=inside, other=0)
            log_sum = tl.load(normaliser + token, mask=inside, other=0.0)
            slope = _slopes(unit_query, unit_row, candidate, wanted, index, log_q, log_sum, inverse_temperature)
            total += tl.where(inside, slope, 0.0)[:, None] * unit_query
        d = tl.arange(0, BLOCK_D)
        tl.store(partial + piece * D + d, tl.sum(total, axis=0), mask=d < D)


@triton.jit
def _rows_kernel(
    rows, row_ids, piece_starts, partial, scale, drows, inverse_temperature, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """drows [count, D]: a row's pieces added in their order, taken through the norm and scaled."""
    u = tl.program_id(0).to(tl.int64)
    one, d = tl.arange(0, 1), tl.arange(0, BLOCK_D)
    index = u + one
    if row_ids is not None:
        index = tl.load(row_ids + index)
    dunit = tl.zeros([1, BLOCK_D], tl.float32)
    for piece in range(tl.load(piece_starts + u), tl.load(piece_starts + u + 1)):
        dunit += tl.load(partial + (piece * D + d)[None, :], mask=(d < D)[None, :], other=0.0)
    unit_row, norm = _load_unit_rows(rows, index, one == 0, eps, D, BLOCK_D)
    slope = _through_norm(dunit * inverse_temperature * tl.load(scale), unit_row, norm, eps)
    tl.store(drows + (u * D + d)[None, :], slope.to(drows.dtype.element_ty), mask=(d < D)[None, :])


@triton.jit
def _rows_atomic_kernel(
    query, rows, entries, places, log_q, normaliser, scale, drows, inverse_temperature, eps,
    C: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """drows fp32, zero before: a token adds to the rows of its candidates, in no order. `places` [T, C] are those in
    drows, where they are not those in rows."""
    t = tl.program_id(0).to(tl.int64)
    one, d = tl.arange(0, 1), tl.arange(0, BLOCK_D)
    unit_query, query_norm = _load_unit_rows(query, t + one, one == 0, eps, D, BLOCK_D)
    wanted, log_sum = tl.load(entries + t * C), tl.load(normaliser + t)
    factor = inverse_temperature * tl.load(scale)
    for first in range(0, C, BLOCK_R):
        candidate = first + tl.arange(0, BLOCK_R)
        inside = candidate < C
        index = tl.load(entries + t * C + candidate, mask=inside, other=0)
        unit_rows, norm = _load_unit_rows(rows, index, inside, eps, D, BLOCK_D)
        slope = _slopes(unit_query, unit_rows, candidate, wanted, index, log_q, log_sum, inverse_temperature) * factor
        change = _through_norm(slope[:, None] * unit_query, unit_rows, norm, eps)
        place = index.to(tl.int64)
        if places is not None:
            place = tl.load(places + t * C + candidate, mask=inside, other=0)
        at = drows + place[:, None] * D + d[None, :]
        tl.atomic_add(at, change, mask=inside[:, None] & (d < D)[None, :], sem="relaxed")


@dataclass(frozen=True)
class Forward:
    """What a forward pass knows; the last three are there where gradients are wanted."""

    losses: Tensor  # fp32 [T]
    dquery: Tensor  # [T, D]
    normaliser: Tensor  # fp32 [T] log-sum-exp
    entries: Tensor  # int32 [T, C] indices of the rows


def tile(width: int, candidates: int) -> dict[str, int]:
    """Block sizes for rows of `width`."""
    wide = next_power_of_two(width)
    return {"BLOCK_D": wide, "BLOCK_R": max(4, min(64, CELLS // wide, next_power_of_two(candidates)))}


def forward(
    query: Tensor,
    rows: Tensor,
    positive: Tensor,
    negatives: Tensor | UniformDraws,
    temperature: float,
    log_q: Tensor | None,
    eps: float,
    gradients: bool,
) -> Forward:
    """query [T, D], rows [U, D], positive int64 [T], negatives int64 [T, R] or how to draw them."""
    drawn = None if isinstance(negatives, Tensor) else negatives
    count = drawn.count if drawn else negatives.shape[1]  # type: ignore[union-attr]
    tokens, width = query.shape
    kept = tokens if gradients else 0
    losses = torch.empty(tokens, dtype=torch.float32, device=query.device)
    out = Forward(
        losses,
        torch.empty(kept, width, dtype=query.dtype, device=query.device),
        torch.empty(kept, dtype=torch.float32, device=query.device),
        torch.empty(kept, 1 + count, dtype=torch.int32, device=query.device),
    )
    key = key_words(drawn.key) if drawn else (0, 0, 0, 0)
    if tokens:
        _loss_kernel[(tokens,)](
            query, rows, positive,
            None if drawn else negatives, drawn.users if drawn else None, drawn.positions if drawn else None,
            log_q, losses, out.normaliser, out.dquery, out.entries,
            *key, drawn.bound if drawn else 0, 1.0 / temperature, eps,
            R=count, D=width, GRADIENTS=gradients, **tile(width, count), num_warps=4,
        )  # fmt: skip
    return out


@dataclass(frozen=True)
class Touched:
    """The rows that have an entry, of a table whose other rows get no gradient."""

    ids: Tensor  # int64 [U] ascending
    places: Tensor  # int64 [T * C] of every entry among them

    @classmethod
    def of(cls, known: Forward, num_rows: int) -> "Touched":
        return cls(*distinct(known.entries.flatten().long(), num_rows))


def row_gradients(
    query: Tensor,
    rows: Tensor,
    positive: Tensor,
    log_q: Tensor | None,
    temperature: float,
    eps: float,
    known: Forward,
    scale: Tensor,
    touched: Touched | None = None,
) -> Tensor:
    """[N, D], or [U, D] for the touched rows, times `scale` [1]."""
    if not torch.are_deterministic_algorithms_enabled():
        return _added_by_atomics(query, rows, log_q, temperature, eps, known, scale, touched)
    row_ids = None if touched is None else touched.ids
    count = len(rows) if row_ids is None else len(row_ids)
    entries = known.entries.flatten()
    values, order = torch.sort(entries, stable=True)
    ids = torch.arange(count, dtype=torch.int32, device=rows.device) if row_ids is None else row_ids.int()
    starts = torch.searchsorted(values, ids)
    starts = torch.cat((starts, starts.new_full((1,), len(entries))))
    piece_starts = torch.zeros_like(starts)
    torch.cumsum(torch.div(starts.diff() + PIECE - 1, PIECE, rounding_mode="floor"), 0, out=piece_starts[1:])
    # more pieces than there can be, so that nothing waits for their number
    pieces = min(count, len(entries)) + len(entries) // PIECE
    piece_rows = torch.searchsorted(piece_starts[1:], torch.arange(pieces, device=rows.device), right=True)
    width, candidates = rows.shape[1], known.entries.shape[1]
    partial = torch.empty(pieces, width, dtype=torch.float32, device=rows.device)
    drows = torch.empty(count, width, dtype=rows.dtype, device=rows.device)
    sizes = _entry_tile(width, len(entries), count)
    if pieces:
        _pieces_kernel[(pieces,)](
            query, rows, positive, row_ids, log_q, known.normaliser, order, starts, piece_starts, piece_rows, partial,
            count, 1.0 / temperature, eps, C=candidates, D=width, PIECE=PIECE, **sizes,
        )  # fmt: skip
    if count:
        block = sizes["BLOCK_D"]
        _rows_kernel[(count,)](
            rows, row_ids, piece_starts, partial, scale, drows, 1.0 / temperature, eps,
            D=width, BLOCK_D=block, num_warps=1,
        )  # fmt: skip
    return drows


def _entry_tile(width: int, entries: int, rows: int) -> dict[str, int]:
    """Where a row has few entries, programs are small."""
    wide = next_power_of_two(width)
    few = entries < 16 * rows
    return {"BLOCK_D": wide, "BLOCK_E": 8 if few else max(8, min(32, CELLS // wide)), "num_warps": 1 if few else 4}


def _added_by_atomics(
    query: Tensor,
    rows: Tensor,
    log_q: Tensor | None,
    temperature: float,
    eps: float,
    known: Forward,
    scale: Tensor,
    touched: Touched | None,
) -> Tensor:
    count, places = (len(rows), None) if touched is None else (len(touched.ids), touched.places)
    drows = torch.zeros(count, rows.shape[1], dtype=torch.float32, device=rows.device)
    tokens, candidates = known.entries.shape
    if tokens:
        _rows_atomic_kernel[(tokens,)](
            query, rows, known.entries, places, log_q, known.normaliser, scale, drows, 1.0 / temperature, eps,
            C=candidates, D=rows.shape[1], **tile(rows.shape[1], candidates), num_warps=4,
        )  # fmt: skip
    return drows.to(rows.dtype)


class SampledSoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        rows: Tensor,
        positive: Tensor,
        negatives: Tensor | UniformDraws,
        temperature: float,
        log_q: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        query, rows, positive = (x.contiguous() for x in (query, rows, positive))
        ctx.in_place = isinstance(negatives, UniformDraws)
        if isinstance(negatives, Tensor):
            negatives = negatives.contiguous()
        gradients = any(ctx.needs_input_grad[:2])
        known = forward(query, rows, positive, negatives, temperature, log_q, eps, gradients)
        if gradients:
            ctx.save_for_backward(query, rows, positive, log_q, known.dquery, known.normaliser, known.entries)
            ctx.temperature, ctx.eps = temperature, eps
        ctx.mark_non_differentiable(known.losses)
        return known.losses.sum(), known.losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dtotal: Tensor, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        query, rows, positive, log_q, dquery, normaliser, entries = ctx.saved_tensors
        known = Forward(normaliser, dquery, normaliser, entries)
        drows = None
        if ctx.needs_input_grad[1]:
            touched = Touched.of(known, len(rows)) if ctx.in_place else None
            drows = row_gradients(
                query, rows, positive, log_q, ctx.temperature, ctx.eps, known, dtotal.view(1), touched
            )
            if touched is not None:
                drows = sparse_rows(touched.ids, drows, rows.shape)
        return dquery * dtotal.to(dquery.dtype), drows, None, None, None, None, None


def loss_triton(
    query: Tensor,
    rows: Tensor,
    positive: Tensor,
    negatives: Tensor | UniformDraws,
    temperature: float,
    log_q: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if torch.float64 in (query.dtype, rows.dtype):
        # the kernels add up in single precision
        return by_ids(loss_sparse)(query, rows, positive, negatives, temperature, log_q, eps)
    total, losses = SampledSoftmaxFunction.apply(query, rows, positive, negatives, temperature, log_q, eps)
    return total, losses


def configurations() -> list[Configuration]:
    """128 negatives, rows of 64 and 256, in single precision and bf16."""
    listed = []
    for dtype, width in (("fp32", 64), ("bf16", 256)):
        given = dict.fromkeys(("query", "rows"), f"*{dtype}")
        common = {"inverse_temperature": "fp32", "eps": "fp32"}
        sums = {"normaliser": "*fp32", "scale": "*fp32"}
        shape, entry = tile(width, 129), _entry_tile(width, 1 << 20, 1 << 12)
        key = dict.fromkeys(("key_low", "key_high", "step", "purpose", "bound"), "i32")
        forward_types = {
            **given, "positive": "*i64", "losses": "*fp32", "normaliser": "*fp32", "dquery": f"*{dtype}",
            "entries": "*i32", **key, **common,
        }  # fmt: skip
        places = dict.fromkeys(("users", "positions"), "*i64")
        for form, types in (("given", {"negatives": "*i64"}), ("drawn", places)):
            absent = dict.fromkeys({"negatives", "users", "positions", "log_q"} - set(types))
            listed.append(
                Configuration(
                    name=f"forward and query gradient, negatives {form}, {dtype}, D={width}",
                    kernel=_loss_kernel,
                    signature=forward_types | types,
                    constants={"R": 128, "D": width, "GRADIENTS": True, **shape, **absent},
                    num_warps=4,
                )
            )
        runs = dict.fromkeys(("order", "starts", "piece_starts", "piece_rows", "positive"), "*i64")
        listed += [
            Configuration(
                name=f"row gradients, pieces, {dtype}, D={width}",
                kernel=_pieces_kernel,
                signature={**given, **runs, "normaliser": "*fp32", "partial": "*fp32", "count": "i32", **common},
                constants={
                    "C": 129, "D": width, "PIECE": PIECE, "row_ids": None, "log_q": None,
                    "BLOCK_D": entry["BLOCK_D"], "BLOCK_E": entry["BLOCK_E"],
                },
                num_warps=entry["num_warps"],
            ),
            Configuration(
                name=f"row gradients, sum of pieces, {dtype}, D={width}",
                kernel=_rows_kernel,
                signature={
                    "rows": f"*{dtype}", "piece_starts": "*i64", "partial": "*fp32", "scale": "*fp32",
                    "drows": f"*{dtype}", **common,
                },
                constants={"D": width, "BLOCK_D": shape["BLOCK_D"], "row_ids": None},
                num_warps=1,
            ),
            Configuration(
                name=f"row gradients, atomic, {dtype}, D={width}",
                kernel=_rows_atomic_kernel,
                signature={**given, "entries": "*i32", **sums, "drows": "*fp32", **common},
                constants={"C": 129, "D": width, **shape, "log_q": None, "places": None},
                num_warps=4,
            ),
        ]  # fmt: skip
    return listed
