"""Device code of the bias tables' gradients: a table's entry is the sum of its cells of dS over rows and heads.

A program takes the tiles of one distance between queries and keys, so that all of them lay the same diagonals over the
position table: their sum is kept in registers and leaves once. Its heads are added up before the cells are told apart
by time: the cells beyond a bucket edge are summed for every edge that crosses the tile. Nothing is added atomically.

    dS of a tile as in triton_kernels.py;  i - j = ii - jj + distance * BLOCK_J + BLOCK_J - BLOCK_I
"""

import triton
import triton.language as tl

from turbogr.ops.hstu_attention.triton_kernels import IS_WIDE, ORDERED, slopes
from turbogr.ops.hstu_attention.triton_plan import COLUMNS
from turbogr.ops.hstu_attention.triton_tiles import (
    FEW,
    add_far_time_bias,
    bucket_range,
    load_rows,
    lookup,
    near_time_bias,
    position_bias,
    tanh,
    visible,
    wide_time_bias,
)


@triton.jit
def hstu_bwd_bias_kernel(
    q, k, v, dy, offsets, blocks, num_targets, position_parts, time_parts, target_parts,
    pairs, values, edges, edges64, cells, times, next_times, times64, next_times64, row_flags,
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head,
    scale, per_log2, heads, rows, listed, stretch, distances, max_len, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    BUCKETS: tl.constexpr,
):  # fmt: skip
    # so that the diagonal among targets lies in the tiles of distance 0 alone
    tl.static_assert(BLOCK_I <= BLOCK_J)
    # all distances of a stretch of blocks run side by side, so that its rows are in the cache
    pid = tl.program_id(0)
    distance, begin = pid % distances, pid // distances * stretch
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    tables = (pairs, values, edges, edges64, cells)
    kinds: tl.constexpr = (POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT)
    diagonals = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
    sums = tl.zeros([BUCKETS], tl.float32)
    for number in range(begin, tl.minimum(begin + stretch, listed)):
        row, i0 = tl.load(blocks + COLUMNS * number), tl.load(blocks + COLUMNS * number + 1) * BLOCK_I
        if (row < rows) & (i0 + BLOCK_I > distance * BLOCK_J):
            start = tl.load(offsets + row)
            length = (tl.load(offsets + row + 1) - start).to(tl.int32)
            history_end = length
            if GENERAL:
                history_end = length - tl.load(num_targets + row).to(tl.int32)
            marks = (length, context, history_end, window, buckets)
            j0 = i0 + BLOCK_I - BLOCK_J - distance * BLOCK_J
            i, j = (i0 + ii)[:, None], (j0 + jj)[None, :]
            bias, span = _tile_bias(
                i, j, i0, j0, distance, times + start, next_times + start, times64 + start, next_times64 + start,
                row_flags + row, per_log2, tables, marks, kinds, BLOCK_I, BLOCK_J,
            )  # fmt: skip
            total = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
            for head in range(0, heads):
                q_tile = load_rows(q + start * q_token + head * q_head, i0, q_token, ii, length, DQK, BLOCK_DQK, True)
                k_tile = load_rows(k + start * k_token + head * k_head, j0, k_token, jj, length, DQK, BLOCK_DQK, True)
                h = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * 0.5 + bias
                dy_tile = load_rows(
                    dy + start * dy_token + head * dy_head, i0, dy_token, ii, length, DV, BLOCK_DV, True
                )
                v_tile = load_rows(v + start * v_token + head * v_head, j0, v_token, jj, length, DV, BLOCK_DV, True)
                dp = tl.dot(dy_tile, tl.trans(v_tile), input_precision="ieee")
                total += slopes(h, dp, tanh(h, FAST))
            if GENERAL | (distance * BLOCK_J < BLOCK_I):
                sees = visible(i, j, length, context, history_end, window, GENERAL, CONTEXT_SEES)
                if GENERAL:
                    sees = sees & (i >= context) & (j >= context)
                total = tl.where(sees, total, 0.0)
            if TIME:
                sums = _add_by_bucket(
                    sums, total, i0 + ii, j0 + jj, times + start, next_times + start, times64 + start,
                    next_times64 + start, span, tl.load(row_flags + row), tables, marks, BUCKETS, FAST,
                )  # fmt: skip
            if POSITION:
                if history_end < length:
                    own = target_parts + tl.cast(number, tl.int64) * max_len
                    _store_targets(own, total, i, j, j0 + jj, history_end, distance, max_len)
                    total = tl.where(i < history_end, total, 0.0)
                diagonals += total
    if TIME:
        tl.store(time_parts + pid * BUCKETS + tl.arange(0, BUCKETS), sums * (0.5 * scale))
    if POSITION:
        at = position_parts + pid.to(tl.int64) * (BLOCK_I * BLOCK_J) + ii[:, None] * BLOCK_J + jj[None, :]
        tl.store(at, diagonals * (0.5 * scale))


@triton.jit
def _tile_bias(
    i, j, i0, j0, distance, times, next_times, times64, next_times64, flags, per_log2, tables, marks,
    kinds: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """The halved biases of a tile [I, J], and the buckets of its differences as the lowest one and, from bit 16 on, how
    many more; where times are out of order they are not known."""
    pairs, values, edges, edges64, cells = tables
    length, context, history_end, window, buckets = marks
    bias = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
    if kinds[0]:
        if kinds[2]:
            steps = tl.maximum(tl.minimum(i, history_end) - tl.maximum(j, context), 0)
            bias = lookup(pairs, 2 * steps, kinds[4])
        else:
            bias = position_bias(pairs, i, j, True, kinds[4])
    span = 0
    if kinds[1]:
        latest = tl.load(times + tl.minimum(j0 + BLOCK_J, length) - 1)
        least = tl.load(next_times + i0) - latest
        most = tl.load(next_times + tl.minimum(i0 + BLOCK_I, length) - 1) - tl.load(times + tl.maximum(j0, 0))
        low, high = bucket_range(least, most, per_log2, buckets)
        span = low | (high - low) << 16
        kind = tl.load(flags)
        at_i, at_j = tl.minimum(i, length - 1), tl.minimum(tl.maximum(j, 0), length - 1)
        if kind >= IS_WIDE:
            bias += wide_time_bias(tl.load(next_times64 + at_i), tl.load(times64 + at_j), values, edges64, buckets)
        else:
            next_i, t_j = lookup(next_times, at_i, kinds[4]), lookup(times, at_j, kinds[4])
            if (kind == ORDERED) & (high - low <= FEW) & (distance * BLOCK_J >= BLOCK_I) & (j0 >= 0):
                bias = add_far_time_bias(bias, next_i, t_j, low, high - low, values, edges)
            else:
                bias += near_time_bias(next_i, t_j, cells, kinds[5], kinds[4])
    return bias, span


@triton.jit
def _add_by_bucket(
    sums, total, at_i, at_j, times, next_times, times64, next_times64, span, flags, tables, marks,
    BUCKETS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """sums [BUCKETS] plus the cells [I, J] of every bucket: those beyond its own edge less those beyond the next."""
    pairs, values, edges, edges64, cells = tables
    length, context, history_end, window, buckets = marks
    at_i, at_j = tl.minimum(at_i, length - 1), tl.minimum(tl.maximum(at_j, 0), length - 1)
    bucket = tl.arange(0, BUCKETS)
    if flags == ORDERED:
        next_i, t_j = lookup(next_times, at_i, FAST)[:, None], lookup(times, at_j, FAST)[None, :]
        low = span & 0xFFFF
        sums += tl.where(bucket == low, tl.sum(total), 0.0)
        for edge in range(low + 1, low + (span >> 16) + 1):
            beyond = tl.sum(tl.where(t_j <= next_i - tl.load(edges + edge), total, 0.0))
            sums += tl.where(bucket == edge, beyond, 0.0) - tl.where(bucket == edge - 1, beyond, 0.0)
    else:
        next_i64, t_j64 = tl.load(next_times64 + at_i)[:, None], tl.load(times64 + at_j)[None, :]
        sums += tl.where(bucket == 0, tl.sum(total), 0.0)
        for edge in range(1, buckets + 1):
            least = tl.load(edges64 + edge)
            apart = (next_i64 - t_j64 >= least) | (t_j64 - next_i64 >= least)
            beyond = tl.sum(tl.where(apart, total, 0.0))
            sums += tl.where(bucket == edge, beyond, 0.0) - tl.where(bucket == edge - 1, beyond, 0.0)
    return sums


@triton.jit
def _store_targets(target_parts, cells, i, j, columns, history_end, distance, max_len):
    """Targets stand at the history's end: their cells belong to history_end - j, and to 0 on the diagonal."""
    of_targets = tl.where(i >= history_end, cells, 0.0)
    by_key = tl.sum(tl.where(j < history_end, of_targets, 0.0), axis=0)
    steps = history_end - columns
    tl.store(target_parts + steps, by_key, mask=(steps > 0) & (steps < max_len))
    if distance == 0:
        tl.store(target_parts, tl.sum(tl.where(j >= history_end, of_targets, 0.0)))
