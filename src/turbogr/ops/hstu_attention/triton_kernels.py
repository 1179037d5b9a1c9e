"""The device code of HSTU attention: forward, gradients of the queries, of keys and values, of both bias tables.

Every program owns what it writes, so results repeat to the last bit. The scores are computed again by each kernel; no
more than a tile of them exists. Programs take their blocks from a list that has the longest work first.

    y  = P v / N,  P = h + h t,  h = (q k^T + bias) / 2,  t = tanh(h)         [silu(2h) = h + h t]
    dv = P^T dy / N
    dS = (dy v^T) * (1 + t + h (1 - t^2)) / 2N,  dq = dS k,  dk = dS^T q,  a table's entry: the sum of its cells of dS
"""

import triton
import triton.language as tl

from turbogr.ops.hstu_attention.triton_tiles import (
    FEW,
    PAD,
    block_of,
    bucket_range,
    load_rows,
    store_rows,
    tanh,
    time_bias,
    visible,
    wide_time_bias,
)

ORDERED, WIDE = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _bias_tile(
    h,
    i,
    j,
    lag,
    i0,
    j0,
    next_i,
    t_j,
    next_i64,
    t_j64,
    low,
    high,
    flags,
    position,
    values,
    edges,
    edges64,
    cell_values,
    cell_edges,
    context,
    history_end,
    buckets,
    POSITION: tl.constexpr,
    TIME: tl.constexpr,
    GENERAL: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """h (the products so far) plus the halved biases; i, j, next_i and t_j are broadcast along their own axis."""
    bias = h
    if POSITION:
        if GENERAL:
            steps = tl.maximum(tl.minimum(i, history_end) - tl.maximum(j, context), 0)
            bias += tl.load(position + PAD + steps)
        else:
            bias += tl.load(position + PAD + (i0 - j0) + lag)
    if TIME:
        if (flags & WIDE) != 0:
            bias += wide_time_bias(next_i64, t_j64, values, edges64, buckets)
        else:
            few = ((flags & ORDERED) != 0) & (high - low <= FEW)
            bias += time_bias(next_i, t_j, low, high, few, values, edges, cell_values, cell_edges, SHIFT)
    if GENERAL:
        bias = tl.where((i < context) | (j < context), h, bias)
    return bias


@triton.jit
def hstu_fwd_kernel(
    q, k, v, y, offsets, blocks, num_targets,
    position, values, edges, edges64, cell_values, cell_edges, times, next_times, times64, next_times64, row_flags,
    q_token, q_head, k_token, k_head, v_token, v_head, y_token, y_head,
    scale, per_log2, heads, rows, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    row, block = block_of(blocks, pid // heads)
    if row >= rows:
        return
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    history_end = length
    if GENERAL:
        history_end = length - tl.load(num_targets + row).to(tl.int32)
    i0 = block * BLOCK_I
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    q += start * q_token + head * q_head
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    y += start * y_token + head * y_head
    q_half = (load_rows(q, i0, q_token, ii, length, DQK, BLOCK_DQK, True) * 0.5).to(q.dtype.element_ty)
    i = (i0 + ii)[:, None]
    lag = ii[:, None] - jj[None, :]
    flags, next_first, next_last = 0, 0, 0
    next_i, next_i64 = i, i
    if TIME:
        flags = tl.load(row_flags + row)
        next_first = tl.load(next_times + start + i0)
        next_last = tl.load(next_times + start + tl.minimum(i0 + BLOCK_I, length) - 1)
        next_i = tl.load(next_times + start + i0 + ii, mask=i0 + ii < length, other=0)[:, None]
        next_i64 = tl.load(next_times64 + start + i0 + ii, mask=i0 + ii < length, other=0)[:, None]
    acc = tl.zeros([BLOCK_I, BLOCK_DV], tl.float32)

    # tiles that no mask touches lie between `full` and `full_end`; the masked ones before and behind them
    first, full, end = 0, 0, tl.minimum(i0 + BLOCK_I, length)
    full_end = i0 // BLOCK_J * BLOCK_J
    if GENERAL:
        full, full_end, end = _general_columns(
            i0, BLOCK_I, BLOCK_J, length, context, history_end, window, full_end, end, CONTEXT_SEES
        )
    for j0 in range(full, full_end, BLOCK_J):
        acc = _fwd_tile(
            acc, q_half, k, v, j0, i, i0, ii, jj, lag, start, length, history_end,
            next_i, next_i64, next_first, next_last, flags,
            position, values, edges, edges64, cell_values, cell_edges, times, times64,
            k_token, v_token, per_log2, context, window, buckets,
            DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
            PRECISION, False,
        )  # fmt: skip
    before = (full - first + BLOCK_J - 1) // BLOCK_J
    masked = before + (end - full_end + BLOCK_J - 1) // BLOCK_J
    for n in range(0, masked):
        j0 = tl.where(n < before, n * BLOCK_J, full_end + (n - before) * BLOCK_J)
        acc = _fwd_tile(
            acc, q_half, k, v, j0, i, i0, ii, jj, lag, start, length, history_end,
            next_i, next_i64, next_first, next_last, flags,
            position, values, edges, edges64, cell_values, cell_edges, times, times64,
            k_token, v_token, per_log2, context, window, buckets,
            DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
            PRECISION, True,
        )  # fmt: skip
    store_rows(y, i0, y_token, ii, length, acc * scale, DV, BLOCK_DV)


@triton.jit
def _general_columns(
    i0, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, length, context, history_end, window, full_end, end,
    CONTEXT_SEES: tl.constexpr,
):  # fmt: skip
    """(full, full_end, end) of the keys that the block of queries from i0 sees, with context, targets and a window."""
    full = (context + BLOCK_J - 1) // BLOCK_J * BLOCK_J
    last = tl.minimum(tl.minimum(i0 + BLOCK_I, length) - 1, history_end)
    out_of_window = tl.maximum(last - window + 1, 0)
    full = tl.maximum(full, (out_of_window + BLOCK_J - 1) // BLOCK_J * BLOCK_J)
    full_end = tl.minimum(full_end, history_end // BLOCK_J * BLOCK_J)
    if i0 < context:
        full_end = 0
        end = tl.maximum(end, tl.minimum(context, length))
        if CONTEXT_SEES:
            end = length
    full_end = tl.maximum(full_end, full)
    full = tl.minimum(full, (end + BLOCK_J - 1) // BLOCK_J * BLOCK_J)
    return full, tl.maximum(tl.minimum(full_end, (end + BLOCK_J - 1) // BLOCK_J * BLOCK_J), full), end


@triton.jit
def _fwd_tile(
    acc, q_half, k, v, j0, i, i0, ii, jj, lag, start, length, history_end,
    next_i, next_i64, next_first, next_last, flags,
    position, values, edges, edges64, cell_values, cell_edges, times, times64,
    k_token, v_token, per_log2, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_tile = load_rows(k, j0, k_token, jj, length, DQK, BLOCK_DQK, MASKED)
    v_tile = load_rows(v, j0, v_token, jj, length, DV, BLOCK_DV, MASKED)
    j = (j0 + jj)[None, :]
    low, high, t_j, t_j64 = 0, 0, j, j
    if TIME:
        t_j, t_j64, low, high = _key_times(
            times, times64, start, j0, jj, length, next_first, next_last, per_log2, buckets, BLOCK_J, MASKED
        )
        t_j, t_j64 = t_j[None, :], t_j64[None, :]
    h = tl.dot(q_half, tl.trans(k_tile), input_precision=PRECISION)
    h = _bias_tile(
        h, i, j, lag, i0, j0, next_i, t_j, next_i64, t_j64, low, high, flags,
        position, values, edges, edges64, cell_values, cell_edges, context, history_end, buckets,
        POSITION, TIME, GENERAL, SHIFT,
    )  # fmt: skip
    p = tanh(h, FAST) * h + h
    if MASKED:
        p = tl.where(visible(i, j, length, context, history_end, window, GENERAL, CONTEXT_SEES), p, 0.0)
    return tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)


@triton.jit
def _key_times(
    times, times64, start, j0, jj, length, next_first, next_last, per_log2, buckets,
    BLOCK_J: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Times of the keys from j0, and the buckets between which their tile with next_first .. next_last lies."""
    if MASKED:
        inside = (j0 + jj < length) & (j0 + jj >= 0)
        t_j = tl.load(times + start + j0 + jj, mask=inside, other=0)
        t_j64 = tl.load(times64 + start + j0 + jj, mask=inside, other=0)
    else:
        t_j = tl.load(times + start + j0 + jj)
        t_j64 = tl.load(times64 + start + j0 + jj)
    earliest = tl.load(times + start + tl.maximum(j0, 0))
    latest = tl.load(times + start + tl.minimum(j0 + BLOCK_J, length) - 1)
    low, high = bucket_range(next_first - latest, next_last - earliest, per_log2, buckets)
    return t_j, t_j64, low, high


@triton.jit
def _slopes(h, dp, t):
    """2 dp dsilu/ds at s = 2h."""
    return dp * ((1.0 + t) + h * (1.0 - t * t))


@triton.jit
def hstu_bwd_dq_kernel(
    q, k, v, dy, dq, offsets, blocks, num_targets,
    position, values, edges, edges64, cell_values, cell_edges, times, next_times, times64, next_times64, row_flags,
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, dq_token, dq_head,
    scale, per_log2, heads, rows, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    row, block = block_of(blocks, pid // heads)
    if row >= rows:
        return
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    history_end = length
    if GENERAL:
        history_end = length - tl.load(num_targets + row).to(tl.int32)
    i0 = block * BLOCK_I
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    q += start * q_token + head * q_head
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    dy += start * dy_token + head * dy_head
    dq += start * dq_token + head * dq_head
    q_half = (load_rows(q, i0, q_token, ii, length, DQK, BLOCK_DQK, True) * 0.5).to(q.dtype.element_ty)
    dy_tile = load_rows(dy, i0, dy_token, ii, length, DV, BLOCK_DV, True)
    i = (i0 + ii)[:, None]
    lag = ii[:, None] - jj[None, :]
    flags, next_first, next_last = 0, 0, 0
    next_i, next_i64 = i, i
    if TIME:
        flags = tl.load(row_flags + row)
        next_first = tl.load(next_times + start + i0)
        next_last = tl.load(next_times + start + tl.minimum(i0 + BLOCK_I, length) - 1)
        next_i = tl.load(next_times + start + i0 + ii, mask=i0 + ii < length, other=0)[:, None]
        next_i64 = tl.load(next_times64 + start + i0 + ii, mask=i0 + ii < length, other=0)[:, None]
    acc = tl.zeros([BLOCK_I, BLOCK_DQK], tl.float32)
    first, full, end = 0, 0, tl.minimum(i0 + BLOCK_I, length)
    full_end = i0 // BLOCK_J * BLOCK_J
    if GENERAL:
        full, full_end, end = _general_columns(
            i0, BLOCK_I, BLOCK_J, length, context, history_end, window, full_end, end, CONTEXT_SEES
        )
    for j0 in range(full, full_end, BLOCK_J):
        acc = _dq_tile(
            acc, q_half, dy_tile, k, v, j0, i, i0, ii, jj, lag, start, length, history_end,
            next_i, next_i64, next_first, next_last, flags,
            position, values, edges, edges64, cell_values, cell_edges, times, times64,
            k_token, v_token, per_log2, context, window, buckets,
            DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
            PRECISION, False,
        )  # fmt: skip
    before = (full - first + BLOCK_J - 1) // BLOCK_J
    masked = before + (end - full_end + BLOCK_J - 1) // BLOCK_J
    for n in range(0, masked):
        j0 = tl.where(n < before, n * BLOCK_J, full_end + (n - before) * BLOCK_J)
        acc = _dq_tile(
            acc, q_half, dy_tile, k, v, j0, i, i0, ii, jj, lag, start, length, history_end,
            next_i, next_i64, next_first, next_last, flags,
            position, values, edges, edges64, cell_values, cell_edges, times, times64,
            k_token, v_token, per_log2, context, window, buckets,
            DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
            PRECISION, True,
        )  # fmt: skip
    store_rows(dq, i0, dq_token, ii, length, acc * (0.5 * scale), DQK, BLOCK_DQK)


@triton.jit
def _dq_tile(
    acc, q_half, dy_tile, k, v, j0, i, i0, ii, jj, lag, start, length, history_end,
    next_i, next_i64, next_first, next_last, flags,
    position, values, edges, edges64, cell_values, cell_edges, times, times64,
    k_token, v_token, per_log2, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    k_tile = load_rows(k, j0, k_token, jj, length, DQK, BLOCK_DQK, MASKED)
    v_tile = load_rows(v, j0, v_token, jj, length, DV, BLOCK_DV, MASKED)
    j = (j0 + jj)[None, :]
    low, high, t_j, t_j64 = 0, 0, j, j
    if TIME:
        t_j, t_j64, low, high = _key_times(
            times, times64, start, j0, jj, length, next_first, next_last, per_log2, buckets, BLOCK_J, MASKED
        )
        t_j, t_j64 = t_j[None, :], t_j64[None, :]
    h = tl.dot(q_half, tl.trans(k_tile), input_precision=PRECISION)
    dp = tl.dot(dy_tile, tl.trans(v_tile), input_precision=PRECISION)
    h = _bias_tile(
        h, i, j, lag, i0, j0, next_i, t_j, next_i64, t_j64, low, high, flags,
        position, values, edges, edges64, cell_values, cell_edges, context, history_end, buckets,
        POSITION, TIME, GENERAL, SHIFT,
    )  # fmt: skip
    ds = _slopes(h, dp, tanh(h, FAST))
    if MASKED:
        ds = tl.where(visible(i, j, length, context, history_end, window, GENERAL, CONTEXT_SEES), ds, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)


@triton.jit
def hstu_bwd_dkv_kernel(
    q, k, v, dy, dk, dv, offsets, blocks, num_targets,
    position, values, edges, edges64, cell_values, cell_edges, times, next_times, times64, next_times64, row_flags,
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, dk_token, dk_head, dv_token, dv_head,
    scale, per_log2, heads, rows, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    head = (pid % heads).to(tl.int64)
    row, block = block_of(blocks, pid // heads)
    if row >= rows:
        return
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    history_end = length
    if GENERAL:
        history_end = length - tl.load(num_targets + row).to(tl.int32)
    j0 = block * BLOCK_J
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    q += start * q_token + head * q_head
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    dy += start * dy_token + head * dy_head
    dk += start * dk_token + head * dk_head
    dv += start * dv_token + head * dv_head
    k_half = (load_rows(k, j0, k_token, jj, length, DQK, BLOCK_DQK, True) * 0.5).to(k.dtype.element_ty)
    v_tile = load_rows(v, j0, v_token, jj, length, DV, BLOCK_DV, True)
    j = (j0 + jj)[:, None]
    lag = ii[None, :] - jj[:, None]
    flags, earliest, latest = 0, 0, 0
    t_j, t_j64 = j, j
    if TIME:
        flags = tl.load(row_flags + row)
        earliest = tl.load(times + start + j0)
        latest = tl.load(times + start + tl.minimum(j0 + BLOCK_J, length) - 1)
        t_j = tl.load(times + start + j0 + jj, mask=j0 + jj < length, other=0)[:, None]
        t_j64 = tl.load(times64 + start + j0 + jj, mask=j0 + jj < length, other=0)[:, None]
    dk_acc = tl.zeros([BLOCK_J, BLOCK_DQK], tl.float32)
    dv_acc = tl.zeros([BLOCK_J, BLOCK_DV], tl.float32)

    # rows of queries that no mask touches lie between `full` and `full_end`
    first = j0 // BLOCK_I * BLOCK_I
    full = (j0 + BLOCK_J - 1 + BLOCK_I - 1) // BLOCK_I * BLOCK_I
    end = (length + BLOCK_I - 1) // BLOCK_I * BLOCK_I
    full_end = length // BLOCK_I * BLOCK_I
    if GENERAL:
        full_end = tl.minimum(full_end, history_end // BLOCK_I * BLOCK_I)
        full_end = tl.minimum(full_end, tl.minimum(j0 + window, length) // BLOCK_I * BLOCK_I)
        if (j0 < context) | (j0 + BLOCK_J > history_end):
            full_end = 0
        if (j0 < context) | CONTEXT_SEES:
            first = 0
    full = tl.minimum(full, end)
    full_end = tl.maximum(full_end, full)
    for i0 in range(full, full_end, BLOCK_I):
        dk_acc, dv_acc = _dkv_tile(
            dk_acc, dv_acc, k_half, v_tile, q, dy, i0, j, j0, ii, jj, lag, start, length, history_end,
            t_j, t_j64, earliest, latest, flags,
            position, values, edges, edges64, cell_values, cell_edges, next_times, next_times64,
            q_token, dy_token, per_log2, context, window, buckets,
            DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
            PRECISION, False,
        )  # fmt: skip
    before = (full - first) // BLOCK_I
    masked = before + (end - full_end) // BLOCK_I
    for n in range(0, masked):
        i0 = tl.where(n < before, first + n * BLOCK_I, full_end + (n - before) * BLOCK_I)
        dk_acc, dv_acc = _dkv_tile(
            dk_acc, dv_acc, k_half, v_tile, q, dy, i0, j, j0, ii, jj, lag, start, length, history_end,
            t_j, t_j64, earliest, latest, flags,
            position, values, edges, edges64, cell_values, cell_edges, next_times, next_times64,
            q_token, dy_token, per_log2, context, window, buckets,
            DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
            PRECISION, True,
        )  # fmt: skip
    store_rows(dk, j0, dk_token, jj, length, dk_acc * (0.5 * scale), DQK, BLOCK_DQK)
    store_rows(dv, j0, dv_token, jj, length, dv_acc * scale, DV, BLOCK_DV)


@triton.jit
def _query_times(
    next_times, next_times64, start, i0, ii, length, earliest, latest, per_log2, buckets,
    BLOCK_I: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Times behind the queries from i0, and the buckets between which their tile with earliest .. latest lies."""
    if MASKED:
        next_i = tl.load(next_times + start + i0 + ii, mask=i0 + ii < length, other=0)
        next_i64 = tl.load(next_times64 + start + i0 + ii, mask=i0 + ii < length, other=0)
    else:
        next_i = tl.load(next_times + start + i0 + ii)
        next_i64 = tl.load(next_times64 + start + i0 + ii)
    next_first = tl.load(next_times + start + i0)
    next_last = tl.load(next_times + start + tl.minimum(i0 + BLOCK_I, length) - 1)
    low, high = bucket_range(next_first - latest, next_last - earliest, per_log2, buckets)
    return next_i, next_i64, low, high


@triton.jit
def _dkv_tile(
    dk_acc, dv_acc, k_half, v_tile, q, dy, i0, j, j0, ii, jj, lag, start, length, history_end,
    t_j, t_j64, earliest, latest, flags,
    position, values, edges, edges64, cell_values, cell_edges, next_times, next_times64,
    q_token, dy_token, per_log2, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    q_tile = load_rows(q, i0, q_token, ii, length, DQK, BLOCK_DQK, MASKED)
    dy_tile = load_rows(dy, i0, dy_token, ii, length, DV, BLOCK_DV, MASKED)
    i = (i0 + ii)[None, :]
    low, high, next_i, next_i64 = 0, 0, i, i
    if TIME:
        next_i, next_i64, low, high = _query_times(
            next_times, next_times64, start, i0, ii, length, earliest, latest, per_log2, buckets, BLOCK_I, MASKED
        )
        next_i, next_i64 = next_i[None, :], next_i64[None, :]
    h = tl.dot(k_half, tl.trans(q_tile), input_precision=PRECISION)
    h = _bias_tile(
        h, i, j, lag, i0, j0, next_i, t_j, next_i64, t_j64, low, high, flags,
        position, values, edges, edges64, cell_values, cell_edges, context, history_end, buckets,
        POSITION, TIME, GENERAL, SHIFT,
    )  # fmt: skip
    dp = tl.dot(v_tile, tl.trans(dy_tile), input_precision=PRECISION)
    t = tanh(h, FAST)
    p = t * h + h
    if MASKED:
        sees = visible(i, j, length, context, history_end, window, GENERAL, CONTEXT_SEES)
        p = tl.where(sees, p, 0.0)
        dp = tl.where(sees, dp, 0.0)
    dv_acc = tl.dot(p.to(dy_tile.dtype), dy_tile, dv_acc, input_precision=PRECISION)
    ds = _slopes(h, dp, t)
    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc
