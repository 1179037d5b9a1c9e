"""Device code of the bias tables' gradients: a table's entry is the sum of its cells of dS over rows and heads.

A program takes the tiles of one distance between queries and keys, so that all of them lay the same diagonals over the
position table: their sum is kept in registers and leaves once. Its heads are added up before the cells are told apart by
time: the cells beyond a bucket edge are summed for every edge that crosses the tile. Nothing is added atomically.

    dS of a tile as in triton_kernels.py;  i - j = ii - jj + distance * BLOCK_J + BLOCK_J - BLOCK_I
"""

import triton
import triton.language as tl

from turbogr.ops.hstu_attention.triton_kernels import ORDERED, WIDE, _slopes
from turbogr.ops.hstu_attention.triton_tiles import (
    PAD,
    bucket_range,
    load_rows,
    near_time_bias,
    tanh,
    visible,
    wide_time_bias,
)


@triton.jit
def hstu_bwd_bias_kernel(
    q, k, v, dy, offsets, blocks, counts, num_targets, position_parts, time_parts, target_parts,
    position, values, edges, edges64, cell_values, cell_edges, times, next_times, times64, next_times64, row_flags,
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head,
    scale, per_log2, heads, splits, max_len, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    distance = pid // splits
    count = tl.load(counts + distance)
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    lag = ii[:, None] - jj[None, :]
    diagonals = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
    sums = tl.zeros([BUCKETS], tl.float32)
    for number in range(pid % splits, count, splits):
        row, i0 = tl.load(blocks + 3 * number), tl.load(blocks + 3 * number + 1) * BLOCK_I
        start = tl.load(offsets + row)
        length = (tl.load(offsets + row + 1) - start).to(tl.int32)
        history_end = length
        if GENERAL:
            history_end = length - tl.load(num_targets + row).to(tl.int32)
        j0 = i0 + BLOCK_I - BLOCK_J - distance * BLOCK_J
        i, j = (i0 + ii)[:, None], (j0 + jj)[None, :]
        flags, low, high = 0, 0, 0
        next_i, next_i64, t_j, t_j64 = i, i, j, j
        bias = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
        if TIME:
            flags = tl.load(row_flags + row)
            inside_i, inside_j = i0 + ii < length, (j0 + jj < length) & (j0 + jj >= 0)
            next_i = tl.load(next_times + start + i0 + ii, mask=inside_i, other=0)[:, None]
            next_i64 = tl.load(next_times64 + start + i0 + ii, mask=inside_i, other=0)[:, None]
            t_j = tl.load(times + start + j0 + jj, mask=inside_j, other=0)[None, :]
            t_j64 = tl.load(times64 + start + j0 + jj, mask=inside_j, other=0)[None, :]
            latest = tl.load(times + start + tl.minimum(j0 + BLOCK_J, length) - 1)
            least = tl.load(next_times + start + i0) - latest
            most = tl.load(next_times + start + tl.minimum(i0 + BLOCK_I, length) - 1)
            most -= tl.load(times + start + tl.maximum(j0, 0))
            low, high = bucket_range(least, most, per_log2, buckets)
            if flags >= WIDE:
                bias += wide_time_bias(next_i64, t_j64, values, edges64, buckets)
            else:
                bias += near_time_bias(next_i, t_j, cell_values, cell_edges, SHIFT)
        if POSITION:
            steps = tl.maximum(tl.minimum(i, history_end) - tl.maximum(j, context), 0)
            bias += tl.load(position + PAD + steps)
        cells = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
        for head in range(0, heads):
            q_tile = load_rows(q + start * q_token + head * q_head, i0, q_token, ii, length, DQK, BLOCK_DQK, True)
            k_tile = load_rows(k + start * k_token + head * k_head, j0, k_token, jj, length, DQK, BLOCK_DQK, True)
            h = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * 0.5 + bias
            dy_tile = load_rows(dy + start * dy_token + head * dy_head, i0, dy_token, ii, length, DV, BLOCK_DV, True)
            v_tile = load_rows(v + start * v_token + head * v_head, j0, v_token, jj, length, DV, BLOCK_DV, True)
            dp = tl.dot(dy_tile, tl.trans(v_tile), input_precision=PRECISION)
            cells += _slopes(h, dp, tanh(h, FAST))
        if GENERAL | (distance == 0):
            sees = visible(i, j, length, context, history_end, window, GENERAL, CONTEXT_SEES)
            if GENERAL:
                sees = sees & (i >= context) & (j >= context)
            cells = tl.where(sees, cells, 0.0)
        if TIME:
            sums = _add_by_bucket(
                sums, cells, next_i, t_j, next_i64, t_j64, low, high, flags, edges, edges64, buckets, BUCKETS
            )
        if POSITION:
            if history_end < length:
                own = target_parts + tl.cast(number, tl.int64) * max_len
                _store_targets(own, cells, i, j, j0 + jj, history_end, distance, max_len)
                cells = tl.where(i < history_end, cells, 0.0)
            diagonals += cells
    if TIME:
        tl.store(time_parts + pid * BUCKETS + tl.arange(0, BUCKETS), sums * (0.5 * scale))
    if POSITION:
        at = position_parts + pid.to(tl.int64) * (BLOCK_I * BLOCK_J) + ii[:, None] * BLOCK_J + jj[None, :]
        tl.store(at, diagonals * (0.5 * scale))


@triton.jit
def _add_by_bucket(
    sums, cells, next_i, t_j, next_i64, t_j64, low, high, flags, edges, edges64, buckets, BUCKETS: tl.constexpr
):
    """sums [BUCKETS] plus the cells of every bucket: those beyond its own edge less those beyond the next one."""
    bucket = tl.arange(0, BUCKETS)
    if flags == ORDERED:
        sums += tl.where(bucket == low, tl.sum(cells), 0.0)
        for edge in range(low + 1, high + 1):
            beyond = tl.sum(tl.where(t_j <= next_i - tl.load(edges + edge), cells, 0.0))
            sums += tl.where(bucket == edge, beyond, 0.0) - tl.where(bucket == edge - 1, beyond, 0.0)
    else:
        sums += tl.where(bucket == 0, tl.sum(cells), 0.0)
        for edge in range(1, buckets + 1):
            least = tl.load(edges64 + edge)
            apart = (next_i64 - t_j64 >= least) | (t_j64 - next_i64 >= least)
            beyond = tl.sum(tl.where(apart, cells, 0.0))
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
