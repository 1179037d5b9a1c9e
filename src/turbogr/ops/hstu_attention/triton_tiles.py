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
def lookup(table, index, FAST: tl.constexpr):
    """table[index], element by element, where its index is. A plain load of a tile would be spread over the program
    for wide accesses and brought back through shared memory. FAST: instructions of NVIDIA's."""
    if FAST:
        if table.dtype.element_ty == tl.float32:
            return tl.inline_asm_elementwise(
                "{ .reg .u64 a; mad.wide.s32 a, $1, 4, $2; ld.global.nc.f32 $0, [a]; }", "=f,r,l",
                [index, table.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            return tl.inline_asm_elementwise(
                "{ .reg .u64 a; mad.wide.s32 a, $1, 4, $2; ld.global.nc.b32 $0, [a]; }", "=r,r,l",
                [index, table.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1,
            )  # fmt: skip
    else:
        return tl.load(table + index)


@triton.jit
def position_bias(pairs, rows, columns, KEYS: tl.constexpr, FAST: tl.constexpr):
    """[rows, columns] halved position bias of queries [rows, 1] and keys [1, columns] (KEYS), or of keys and queries.
    Two columns next to each other take their entries by one access: pairs[x] are those of x and of x - 1."""
    count: tl.constexpr = columns.shape[1]
    first, second = tl.split(tl.reshape(columns, [1, count // 2, 2]))
    x = rows - first if KEYS else second - rows
    if FAST:
        one, other = tl.inline_asm_elementwise(
            "{ .reg .u64 a; mad.wide.s32 a, $2, 8, $3; ld.global.nc.v2.f32 {$0, $1}, [a]; }", "=&f,=&f,r,l",
            [x, pairs.to(tl.int64)], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        one, other = tl.load(pairs + 2 * x), tl.load(pairs + 2 * x + 1)
    bias = tl.join(one, other) if KEYS else tl.join(other, one)
    return tl.reshape(bias, [rows.shape[0], count])


@triton.jit
def tanh(h, FAST: tl.constexpr):
    """FAST: one instruction of NVIDIA's, absolute error 5e-4 at most; a rounding to half precision follows."""
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
def add_far_time_bias(bias, next_i, t_j, low, crossing, values, edges):
    """bias plus the halved time bias of a tile in which times are ordered and whose differences lie in the buckets
    from `low` to `low + crossing`, at most FEW further: one comparison for every edge between them."""
    least = tl.load(values + low)
    if crossing == 0:
        bias += least
    else:
        time = tl.where(t_j <= next_i - tl.load(edges + low + 1), tl.load(values + low + 1), least)
        if crossing > 1:
            time = tl.where(t_j <= next_i - tl.load(edges + low + 2), tl.load(values + low + 2), time)
            if crossing > 2:
                time = tl.where(t_j <= next_i - tl.load(edges + low + 3), tl.load(values + low + 3), time)
                time = tl.where(t_j <= next_i - tl.load(edges + low + 4), tl.load(values + low + 4), time)
        bias += time
    return bias


@triton.jit
def near_time_bias(next_i, t_j, cells, SHIFT: tl.constexpr, FAST: tl.constexpr):
    """The halved time bias for 32-bit times in any order: the leading bits of |dt| as a float name a cell that at most
    one edge divides, and one comparison of whole numbers says on which side |dt| lies."""
    apart = tl.maximum(tl.abs(next_i - t_j), 1)
    cell = (apart.to(tl.float32).to(tl.int32, bitcast=True) >> (23 - SHIFT)) - (127 << SHIFT)
    if FAST:
        edge, before, after = tl.inline_asm_elementwise(
            "{ .reg .u64 a; mad.wide.s32 a, $3, 16, $4; ld.global.nc.v4.b32 {$0, $1, $2, _}, [a]; }",
            "=&r,=&f,=&f,r,l", [cell, cells.to(tl.int64)],
            dtype=(tl.int32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        edge = tl.load(cells + 4 * cell)
        before = tl.load(cells + 4 * cell + 1).to(tl.float32, bitcast=True)
        after = tl.load(cells + 4 * cell + 2).to(tl.float32, bitcast=True)
    return tl.where(apart >= edge, after, before)


@triton.jit
def wide_time_bias(next_i, t_j, values, edges64, buckets):
    """The same for 64-bit times, in any order: one comparison for every edge there is."""
    bias = (next_i - t_j).to(tl.float32) * 0.0 + tl.load(values)
    for bucket in range(1, buckets + 1):
        edge = tl.load(edges64 + bucket)
        bias = tl.where((next_i - t_j >= edge) | (t_j - next_i >= edge), tl.load(values + bucket), bias)
    return bias
