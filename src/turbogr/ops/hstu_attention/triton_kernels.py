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
    PAD,
    bucket_range,
    far_time_bias,
    load_rows,
    store_rows,
    tanh,
    near_time_bias,
    visible,
    wide_time_bias,
)

ORDERED, WIDE = tl.constexpr(1), tl.constexpr(2)

# How a tile's time bias is found: few edges cross it; by cells; by 64-bit times. Far tiles are seen whole.
FAR, NEAR, LONG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _add_bias(
    h, i, j, lag, apart, next_i, t_j, low, high,
    position, values, edges, edges64, cell_values, cell_edges, context, history_end, buckets,
    POSITION: tl.constexpr, TIME: tl.constexpr, GENERAL: tl.constexpr, SHIFT: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """h (the products) plus the halved biases; `apart` is i - j of the tile's corner, `lag` that of a cell within it."""
    bias = h
    if POSITION:
        if GENERAL:
            steps = tl.maximum(tl.minimum(i, history_end) - tl.maximum(j, context), 0)
            bias += tl.load(position + PAD + steps)
        else:
            bias += tl.load(position + PAD + apart + lag)
    if TIME:
        if KIND == FAR:
            bias += far_time_bias(next_i, t_j, low, high, values, edges)
        elif KIND == NEAR:
            bias += near_time_bias(next_i, t_j, cell_values, cell_edges, SHIFT)
        else:
            bias += wide_time_bias(next_i, t_j, values, edges64, buckets)
    if GENERAL and KIND != FAR:
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
    entry = blocks + pid // heads * 3
    row, i0 = tl.load(entry), tl.load(entry + 1) * BLOCK_I
    if row >= rows:
        return
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    history_end = length
    if GENERAL:
        history_end = length - tl.load(num_targets + row).to(tl.int32)
    q += start * q_token + head * q_head
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    y += start * y_token + head * y_head
    times += start
    next_times += start
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    q_half = (load_rows(q, i0, q_token, ii, length, DQK, BLOCK_DQK, True) * 0.5).to(q.dtype.element_ty)
    wide = False
    if TIME:
        wide = tl.load(row_flags + row) >= WIDE
    far, far_end, end = _key_tiles(
        i0, tl.load(entry + 2), length, context, history_end, window, BLOCK_I, BLOCK_J, GENERAL, CONTEXT_SEES
    )
    before = far // BLOCK_J
    others = before + (end - far_end + BLOCK_J - 1) // BLOCK_J
    acc = tl.zeros([BLOCK_I, BLOCK_DV], tl.float32)
    if wide:
        for n in range(0, others):
            j0 = tl.where(n < before, n, n - before + far_end // BLOCK_J) * BLOCK_J
            acc = _fwd_tile(
                acc, q_half, k, v, i0, j0, ii, jj, length, history_end, times64 + start, next_times64 + start,
                position, values, edges, edges64, cell_values, cell_edges,
                k_token, v_token, per_log2, context, window, buckets,
                DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
                PRECISION, LONG,
            )  # fmt: skip
    else:
        for j0 in range(far, far_end, BLOCK_J):
            acc = _fwd_tile(
                acc, q_half, k, v, i0, j0, ii, jj, length, history_end, times, next_times,
                position, values, edges, edges64, cell_values, cell_edges,
                k_token, v_token, per_log2, context, window, buckets,
                DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
                PRECISION, FAR,
            )  # fmt: skip
        for n in range(0, others):
            j0 = tl.where(n < before, n, n - before + far_end // BLOCK_J) * BLOCK_J
            acc = _fwd_tile(
                acc, q_half, k, v, i0, j0, ii, jj, length, history_end, times, next_times,
                position, values, edges, edges64, cell_values, cell_edges,
                k_token, v_token, per_log2, context, window, buckets,
                DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
                PRECISION, NEAR,
            )  # fmt: skip
    store_rows(y, i0, y_token, ii, length, acc * scale, DV, BLOCK_DV)


@triton.jit
def _key_tiles(
    i0, far_tiles, length, context, history_end, window,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr,
):  # fmt: skip
    """Far tiles of keys are those from `far` to `far_end`; the others lie before them and from there to `end`."""
    far, end = 0, tl.minimum(i0 + BLOCK_I, length)
    far_end = tl.minimum(i0 // BLOCK_J, far_tiles) * BLOCK_J
    if GENERAL:
        last = tl.minimum(tl.minimum(i0 + BLOCK_I, length) - 1, history_end)
        far = (tl.maximum(context, last - window + 1) + BLOCK_J - 1) // BLOCK_J * BLOCK_J
        far_end = tl.minimum(far_end, history_end // BLOCK_J * BLOCK_J)
        if i0 < context:
            far_end = 0
            end = tl.maximum(end, tl.minimum(context, length))
            if CONTEXT_SEES:
                end = length
        if far >= far_end:
            far, far_end = 0, 0
    return far, far_end, end


@triton.jit
def _fwd_tile(
    acc, q_half, k, v, i0, j0, ii, jj, length, history_end, times, next_times,
    position, values, edges, edges64, cell_values, cell_edges,
    k_token, v_token, per_log2, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """acc [I, dv] plus what one tile of keys adds."""
    k_tile = load_rows(k, j0, k_token, jj, length, DQK, BLOCK_DQK, KIND != FAR)
    v_tile = load_rows(v, j0, v_token, jj, length, DV, BLOCK_DV, KIND != FAR)
    i, j = (i0 + ii)[:, None], (j0 + jj)[None, :]
    next_i, t_j, low, high = _tile_times(
        times, next_times, i0, j0, ii, jj, length, per_log2, buckets, BLOCK_I, BLOCK_J, TIME, KIND
    )
    h = tl.dot(q_half, tl.trans(k_tile), input_precision=PRECISION)
    h = _add_bias(
        h, i, j, ii[:, None] - jj[None, :], i0 - j0, next_i[:, None], t_j[None, :], low, high,
        position, values, edges, edges64, cell_values, cell_edges, context, history_end, buckets,
        POSITION, TIME, GENERAL, SHIFT, KIND,
    )  # fmt: skip
    p = tanh(h, FAST) * h + h
    if KIND != FAR:
        p = tl.where(visible(i, j, length, context, history_end, window, GENERAL, CONTEXT_SEES), p, 0.0)
    return tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)


@triton.jit
def _tile_times(
    times, next_times, i0, j0, ii, jj, length, per_log2, buckets,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, TIME: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Times behind the queries [I] and of the keys [J] of a tile; of a far one, the buckets between which it lies."""
    next_i, t_j, low, high = ii, jj, 0, 0
    if TIME:
        inside_i, inside_j = i0 + ii < length, (j0 + jj < length) & (j0 + jj >= 0)
        if KIND == FAR:
            next_i, t_j = tl.load(next_times + i0 + ii, mask=inside_i, other=0), tl.load(times + j0 + jj)
            least = tl.load(next_times + i0) - tl.load(times + j0 + BLOCK_J - 1)
            most = tl.load(next_times + tl.minimum(i0 + BLOCK_I, length) - 1) - tl.load(times + j0)
            low, high = bucket_range(least, most, per_log2, buckets)
        else:
            next_i = tl.load(next_times + i0 + ii, mask=inside_i, other=0)
            t_j = tl.load(times + j0 + jj, mask=inside_j, other=0)
    return next_i, t_j, low, high


@triton.jit
def _slopes(h, dp, t):
    """2 dp dsilu(s) / ds at s = 2h."""
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
    entry = blocks + pid // heads * 3
    row, i0 = tl.load(entry), tl.load(entry + 1) * BLOCK_I
    if row >= rows:
        return
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    history_end = length
    if GENERAL:
        history_end = length - tl.load(num_targets + row).to(tl.int32)
    q += start * q_token + head * q_head
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    dy += start * dy_token + head * dy_head
    dq += start * dq_token + head * dq_head
    times += start
    next_times += start
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    q_half = (load_rows(q, i0, q_token, ii, length, DQK, BLOCK_DQK, True) * 0.5).to(q.dtype.element_ty)
    dy_tile = load_rows(dy, i0, dy_token, ii, length, DV, BLOCK_DV, True)
    wide = False
    if TIME:
        wide = tl.load(row_flags + row) >= WIDE
    far, far_end, end = _key_tiles(
        i0, tl.load(entry + 2), length, context, history_end, window, BLOCK_I, BLOCK_J, GENERAL, CONTEXT_SEES
    )
    before = far // BLOCK_J
    others = before + (end - far_end + BLOCK_J - 1) // BLOCK_J
    acc = tl.zeros([BLOCK_I, BLOCK_DQK], tl.float32)
    if wide:
        for n in range(0, others):
            j0 = tl.where(n < before, n, n - before + far_end // BLOCK_J) * BLOCK_J
            acc = _dq_tile(
                acc, q_half, dy_tile, k, v, i0, j0, ii, jj, length, history_end, times64 + start, next_times64 + start,
                position, values, edges, edges64, cell_values, cell_edges,
                k_token, v_token, per_log2, context, window, buckets,
                DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
                PRECISION, LONG,
            )  # fmt: skip
    else:
        for j0 in range(far, far_end, BLOCK_J):
            acc = _dq_tile(
                acc, q_half, dy_tile, k, v, i0, j0, ii, jj, length, history_end, times, next_times,
                position, values, edges, edges64, cell_values, cell_edges,
                k_token, v_token, per_log2, context, window, buckets,
                DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
                PRECISION, FAR,
            )  # fmt: skip
        for n in range(0, others):
            j0 = tl.where(n < before, n, n - before + far_end // BLOCK_J) * BLOCK_J
            acc = _dq_tile(
                acc, q_half, dy_tile, k, v, i0, j0, ii, jj, length, history_end, times, next_times,
                position, values, edges, edges64, cell_values, cell_edges,
                k_token, v_token, per_log2, context, window, buckets,
                DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
                PRECISION, NEAR,
            )  # fmt: skip
    store_rows(dq, i0, dq_token, ii, length, acc * (0.5 * scale), DQK, BLOCK_DQK)


@triton.jit
def _dq_tile(
    acc, q_half, dy_tile, k, v, i0, j0, ii, jj, length, history_end, times, next_times,
    position, values, edges, edges64, cell_values, cell_edges,
    k_token, v_token, per_log2, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """acc [I, dqk] plus what one tile of keys adds, twice and without the divisor."""
    k_tile = load_rows(k, j0, k_token, jj, length, DQK, BLOCK_DQK, KIND != FAR)
    v_tile = load_rows(v, j0, v_token, jj, length, DV, BLOCK_DV, KIND != FAR)
    i, j = (i0 + ii)[:, None], (j0 + jj)[None, :]
    next_i, t_j, low, high = _tile_times(
        times, next_times, i0, j0, ii, jj, length, per_log2, buckets, BLOCK_I, BLOCK_J, TIME, KIND
    )
    h = tl.dot(q_half, tl.trans(k_tile), input_precision=PRECISION)
    dp = tl.dot(dy_tile, tl.trans(v_tile), input_precision=PRECISION)
    h = _add_bias(
        h, i, j, ii[:, None] - jj[None, :], i0 - j0, next_i[:, None], t_j[None, :], low, high,
        position, values, edges, edges64, cell_values, cell_edges, context, history_end, buckets,
        POSITION, TIME, GENERAL, SHIFT, KIND,
    )  # fmt: skip
    ds = _slopes(h, dp, tanh(h, FAST))
    if KIND != FAR:
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
    entry = blocks + pid // heads * 3
    row, j0 = tl.load(entry), tl.load(entry + 1) * BLOCK_J
    if row >= rows:
        return
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    history_end = length
    if GENERAL:
        history_end = length - tl.load(num_targets + row).to(tl.int32)
    q += start * q_token + head * q_head
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    dy += start * dy_token + head * dy_head
    dk += start * dk_token + head * dk_head
    dv += start * dv_token + head * dv_head
    times += start
    next_times += start
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    k_half = (load_rows(k, j0, k_token, jj, length, DQK, BLOCK_DQK, True) * 0.5).to(k.dtype.element_ty)
    v_tile = load_rows(v, j0, v_token, jj, length, DV, BLOCK_DV, True)
    wide = False
    if TIME:
        wide = tl.load(row_flags + row) >= WIDE
    first, far, far_end = _query_tiles(
        j0, tl.load(entry + 2), length, context, history_end, window, BLOCK_I, BLOCK_J, GENERAL, CONTEXT_SEES
    )
    before = (far - first) // BLOCK_I
    others = before + (length - far_end + BLOCK_I - 1) // BLOCK_I
    dk_acc = tl.zeros([BLOCK_J, BLOCK_DQK], tl.float32)
    dv_acc = tl.zeros([BLOCK_J, BLOCK_DV], tl.float32)
    if wide:
        for n in range(0, others):
            i0 = tl.where(n < before, first + n * BLOCK_I, far_end + (n - before) * BLOCK_I)
            dk_acc, dv_acc = _dkv_tile(
                dk_acc, dv_acc, k_half, v_tile, q, dy, i0, j0, ii, jj, length, history_end,
                times64 + start, next_times64 + start,
                position, values, edges, edges64, cell_values, cell_edges,
                q_token, dy_token, per_log2, context, window, buckets,
                DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
                PRECISION, LONG,
            )  # fmt: skip
    else:
        for n in range(0, others):
            i0 = tl.where(n < before, first + n * BLOCK_I, far_end + (n - before) * BLOCK_I)
            dk_acc, dv_acc = _dkv_tile(
                dk_acc, dv_acc, k_half, v_tile, q, dy, i0, j0, ii, jj, length, history_end, times, next_times,
                position, values, edges, edges64, cell_values, cell_edges,
                q_token, dy_token, per_log2, context, window, buckets,
                DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
                PRECISION, NEAR,
            )  # fmt: skip
        for i0 in range(far, far_end, BLOCK_I):
            dk_acc, dv_acc = _dkv_tile(
                dk_acc, dv_acc, k_half, v_tile, q, dy, i0, j0, ii, jj, length, history_end, times, next_times,
                position, values, edges, edges64, cell_values, cell_edges,
                q_token, dy_token, per_log2, context, window, buckets,
                DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J, POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT,
                PRECISION, FAR,
            )  # fmt: skip
    store_rows(dk, j0, dk_token, jj, length, dk_acc * (0.5 * scale), DQK, BLOCK_DQK)
    store_rows(dv, j0, dv_token, jj, length, dv_acc * scale, DV, BLOCK_DV)


@triton.jit
def _query_tiles(
    j0, far_from, length, context, history_end, window,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr,
):  # fmt: skip
    """Far tiles of queries are those from `far` to `far_end`; the others lie from `first` to there and behind them."""
    first = j0 // BLOCK_I * BLOCK_I
    far = tl.maximum((j0 + BLOCK_J - 1 + BLOCK_I - 1) // BLOCK_I, far_from) * BLOCK_I
    far_end = length // BLOCK_I * BLOCK_I
    if GENERAL:
        seen_by_all = tl.minimum(history_end, j0 + window)
        far_end = tl.minimum(far_end, seen_by_all // BLOCK_I * BLOCK_I)
        if (j0 < context) | (j0 + BLOCK_J > history_end):
            far_end = 0
        if (j0 < context) | CONTEXT_SEES:
            first = 0
        far = tl.maximum(far, (context + BLOCK_I - 1) // BLOCK_I * BLOCK_I)
    if far >= far_end:
        far, far_end = first, first
    return first, far, far_end


@triton.jit
def _dkv_tile(
    dk_acc, dv_acc, k_half, v_tile, q, dy, i0, j0, ii, jj, length, history_end, times, next_times,
    position, values, edges, edges64, cell_values, cell_edges,
    q_token, dy_token, per_log2, context, window, buckets,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr,
    PRECISION: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """dk_acc [J, dqk] and dv_acc [J, dv] plus what one tile of queries adds."""
    q_tile = load_rows(q, i0, q_token, ii, length, DQK, BLOCK_DQK, KIND != FAR)
    dy_tile = load_rows(dy, i0, dy_token, ii, length, DV, BLOCK_DV, KIND != FAR)
    i, j = (i0 + ii)[None, :], (j0 + jj)[:, None]
    next_i, t_j, low, high = _tile_times(
        times, next_times, i0, j0, ii, jj, length, per_log2, buckets, BLOCK_I, BLOCK_J, TIME, KIND
    )
    h = tl.dot(k_half, tl.trans(q_tile), input_precision=PRECISION)
    h = _add_bias(
        h, i, j, ii[None, :] - jj[:, None], i0 - j0, next_i[None, :], t_j[:, None], low, high,
        position, values, edges, edges64, cell_values, cell_edges, context, history_end, buckets,
        POSITION, TIME, GENERAL, SHIFT, KIND,
    )  # fmt: skip
    dp = tl.dot(v_tile, tl.trans(dy_tile), input_precision=PRECISION)
    t = tanh(h, FAST)
    p = t * h + h
    if KIND != FAR:
        sees = visible(i, j, length, context, history_end, window, GENERAL, CONTEXT_SEES)
        p, dp = tl.where(sees, p, 0.0), tl.where(sees, dp, 0.0)
    dv_acc = tl.dot(p.to(dy_tile.dtype), dy_tile, dv_acc, input_precision=PRECISION)
    ds = _slopes(h, dp, t)
    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision=PRECISION)
    return dk_acc, dv_acc
