"""What one tile of scores needs on an accelerator: rows, masks, biases, SiLU. Shared by the attention kernels.

Scores are kept halved, h = (q.k + bias) / 2, because silu(2h) = h + h tanh(h): tables and one of q and k come halved.
A tile is [i, j], or [j, i] where the keys stay; every helper takes `i` and `j` already broadcast along their own axis.

    row [context | history | targets]: `context` tokens in front, targets from `history_end` on
"""

import triton
import triton.language as tl

PAD = tl.constexpr(256)
"""Zeros on either side of the halved position table: a tile may reach beyond it where its mask hides the cells."""
FEW = tl.constexpr(4)
"""A tile of ordered times is far from the diagonal when at most so many bucket edges cross it."""


@triton.jit
def load_rows(base, first, stride, rows, count, D: tl.constexpr, BLOCK_D: tl.constexpr, GUARD: tl.constexpr):
    """[rows, BLOCK_D] of the rows first .. ; zeros from row `count` on (GUARD) and beyond D."""
    d = tl.arange(0, BLOCK_D)
    at = base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + d[None, :]
    if GUARD:
        inside = (first + rows < count) & (first + rows >= 0)
        if D == BLOCK_D:
            x = tl.load(at, mask=inside[:, None], other=0.0)
        else:
            x = tl.load(at, mask=inside[:, None] & (d[None, :] < D), other=0.0)
    elif D == BLOCK_D:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=d[None, :] < D, other=0.0)
    return x


@triton.jit
def store_rows(base, first, stride, rows, count, x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    at = base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + d[None, :]
    inside = (first + rows < count)[:, None]
    if D != BLOCK_D:
        inside = inside & (d[None, :] < D)
    tl.store(at, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def tanh(h, FAST: tl.constexpr):
    """FAST: one instruction of NVIDIA's, absolute error 5e-4 at most; it is followed by a rounding to half precision."""
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [h], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 2.0 * tl.sigmoid(2.0 * h) - 1.0


@triton.jit
def visible(i, j, length, context, history_end, window, GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr):
    """Whether i sees j."""
    if not GENERAL:
        return (i >= j) & (i < length)
    sees = (i >= j) & ((i == j) | (j < history_end))
    sees &= tl.minimum(i, history_end) - tl.maximum(j, context) < window
    if CONTEXT_SEES:
        from_context = j < history_end
    else:
        from_context = j < 0
    sees = tl.where(i < context, from_context, sees) | (j < context)
    return sees & (i < length) & (j < length) & (j >= 0)


@triton.jit
def bucket_range(least, most, per_log2, buckets):
    """Buckets between which those of every difference in least .. most lie; a little too wide, never too narrow."""
    low = (tl.log2(tl.maximum(least, 1).to(tl.float32)) * per_log2 - 0.01).to(tl.int32)
    high = (tl.log2(tl.maximum(most, 1).to(tl.float32)) * per_log2 + 0.01).to(tl.int32)
    return tl.minimum(tl.maximum(low, 0), buckets), tl.minimum(high, buckets)


@triton.jit
def far_time_bias(next_i, t_j, low, high, values, edges):
    """Halved time bias of a tile whose differences lie in the buckets low .. high, at most FEW apart: one comparison
    for every edge between them."""
    bias = tl.where(t_j <= next_i - tl.load(edges + low + 1), tl.load(values + low + 1), tl.load(values + low))
    bias = tl.where(t_j <= next_i - tl.load(edges + low + 2), tl.load(values + low + 2), bias)
    if high > low + 2:
        bias = tl.where(t_j <= next_i - tl.load(edges + low + 3), tl.load(values + low + 3), bias)
        bias = tl.where(t_j <= next_i - tl.load(edges + low + 4), tl.load(values + low + 4), bias)
    return bias


@triton.jit
def near_time_bias(next_i, t_j, cell_values, cell_edges, SHIFT: tl.constexpr):
    """The same for 32-bit times in any order: the leading bits of |dt| as a float name a cell that at most one edge
    divides, and one comparison of whole numbers says on which side |dt| lies."""
    apart = tl.maximum(tl.abs(next_i - t_j), 1)
    cell = (apart.to(tl.float32).to(tl.int32, bitcast=True) >> (23 - SHIFT)) - (127 << SHIFT)
    beyond = apart >= tl.load(cell_edges + cell)
    return tl.load(cell_values + 2 * cell + beyond.to(tl.int32))


@triton.jit
def wide_time_bias(next_i, t_j, values, edges64, buckets):
    """The same for 64-bit times, in any order: one comparison for every edge there is."""
    bias = (next_i - t_j).to(tl.float32) * 0.0 + tl.load(values)
    for bucket in range(1, buckets + 1):
        edge = tl.load(edges64 + bucket)
        bias = tl.where((next_i - t_j >= edge) | (t_j - next_i >= edge), tl.load(values + bucket), bias)
    return bias
