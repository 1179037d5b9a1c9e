"""The device code of HSTU attention: forward, gradients of the queries, of keys and values.

Every program owns what it writes, so results repeat to the last bit. The scores are computed again by each kernel; no
more than a tile of them exists. Programs take their blocks from a list that has the longest rows first. Rows whose
times do not fit 32 bits (WIDE) are left to a launch of their own: their code would cost all others registers.

Loops run over near tiles first and far ones last: the other way round the compiler lets no two products overlap. Near
tiles are half as wide: what they look up and mask takes registers, which would be lacking in the far loop too.

    y  = P v / N,  P = h + h t,  h = (q k^T + bias) / 2,  t = tanh(h)         [silu(2h) = h + h t]
    dv = P^T dy / N
    dS = (dy v^T) * (1 + t + h (1 - t^2)) / 2N,  dq = dS k,  dk = dS^T q

What tiles share is handed on in tuples:
    tables    pairs, values, edges, edges64, cells    halved bias tables and bucket edges (triton_plan.py)
    marks     length, context, history_end, window, buckets    of a row
    sizes     DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J; near: those of near tiles
    kinds     POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT
"""

import triton
import triton.language as tl

from turbogr.ops.hstu_attention.triton_plan import COLUMNS
from turbogr.ops.hstu_attention.triton_tiles import (
    add_far_time_bias,
    load_rows,
    lookup,
    near_time_bias,
    position_bias,
    store_rows,
    tanh,
    visible,
    wide_time_bias,
)

ORDERED, IS_WIDE = tl.constexpr(1), tl.constexpr(2)

# How a tile's time bias is found: few edges cross it; by cells; by 64-bit times. Far tiles are seen whole.
FAR, NEAR, LONG = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _place(blocks, ranges, heads, tiles):
    """(row, block, far, head, the tiles' ranges) of a program: a row's programs go through a head's blocks in turn."""
    pid = tl.program_id(0)
    entry = blocks + pid // heads * COLUMNS
    row, first, count = tl.load(entry), tl.load(entry + 3), tl.load(entry + 4)
    local = pid - first * heads
    number = first + local % count
    entry = blocks + number * COLUMNS
    ranges += number.to(tl.int64) * tiles
    return row, tl.load(entry + 1), tl.load(entry + 2), (local // count).to(tl.int64), ranges


@triton.jit
def add_bias(h, i, j, next_i, t_j, span, tables, marks, kinds: tl.constexpr, KIND: tl.constexpr, KEYS: tl.constexpr):
    """h (the products) plus the halved biases; KEYS: its columns are keys; `span` are the buckets of a far tile."""
    pairs, values, edges, edges64, cells = tables
    length, context, history_end, window, buckets = marks
    POSITION: tl.constexpr = kinds[0]
    TIME: tl.constexpr = kinds[1]
    GENERAL: tl.constexpr = kinds[2]
    FAST: tl.constexpr = kinds[4]
    bias = h
    if POSITION:
        if GENERAL:
            steps = tl.maximum(tl.minimum(i, history_end) - tl.maximum(j, context), 0)
            bias += lookup(pairs, 2 * steps, FAST)
        elif KEYS:
            bias += position_bias(pairs, i, j, KEYS, FAST)
        else:
            bias += position_bias(pairs, j, i, KEYS, FAST)
    if TIME:
        if KIND == FAR:
            bias = add_far_time_bias(bias, next_i, t_j, span & 0xFFFF, span >> 16, values, edges)
        elif KIND == NEAR:
            bias += near_time_bias(next_i, t_j, cells, kinds[5], FAST)
        else:
            bias += wide_time_bias(next_i, t_j, values, edges64, buckets)
    if GENERAL and KIND != FAR:
        bias = tl.where((i < context) | (j < context), h, bias)
    return bias


@triton.jit
def _times_at(times, first, along, length, kinds: tl.constexpr, INSIDE: tl.constexpr):
    """Times of the tokens first + along; behind either end of the row those of its last and first one."""
    x = along
    if kinds[1]:
        if INSIDE:
            x = tl.load(times + first + along)
        else:
            x = lookup(times, tl.minimum(tl.maximum(first + along, 0), length - 1), kinds[4])
    return x


@triton.jit
def _wide_times_at(times, first, along, length):
    return tl.load(times + tl.minimum(tl.maximum(first + along, 0), length - 1))


@triton.jit
def hstu_fwd_kernel(
    q, k, v, y, offsets, blocks, num_targets,
    pairs, values, edges, edges64, cells, ranges, times, next_times, times64, next_times64, row_flags,
    q_token, q_head, k_token, k_head, v_token, v_head, y_token, y_head,
    scale, heads, rows, context, window, buckets, tiles,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, block, far_tiles, head, ranges = _place(blocks, ranges, heads, tiles)
    if row >= rows:
        return
    if TIME:
        if (tl.load(row_flags + row) >= IS_WIDE) != WIDE:
            return
    i0 = block * BLOCK_I
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    history_end = length
    if GENERAL:
        history_end = length - tl.load(num_targets + row).to(tl.int32)
    q += start * q_token + head * q_head
    k += start * k_token + head * k_head
    v += start * v_token + head * v_head
    y += start * y_token + head * y_head
    tables = (pairs, values, edges, edges64, cells)
    marks = (length, context, history_end, window, buckets)
    sizes: tl.constexpr = (DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J)
    NEAR_J: tl.constexpr = max(16, BLOCK_J // 2)
    near: tl.constexpr = (DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, NEAR_J)
    kinds: tl.constexpr = (POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT)
    ii = tl.arange(0, BLOCK_I)
    q_tile = load_rows(q, i0, q_token, ii, length, DQK, BLOCK_DQK, True)
    far, far_end, end = _key_tiles(i0, far_tiles, marks, sizes, kinds)
    before = far // NEAR_J
    others = before + (end - far_end + NEAR_J - 1) // NEAR_J
    acc = tl.zeros([BLOCK_I, BLOCK_DV], tl.float32)
    if WIDE:
        next_i64 = _wide_times_at(next_times64 + start, i0, ii, length)
        for n in tl.range(0, others, disable_licm=True):
            j0 = tl.where(n < before, n, n - before + far_end // NEAR_J) * NEAR_J
            acc = _fwd_tile(
                acc, q_tile, k, v, i0, j0, k_token, v_token, next_i64, times64 + start, ranges,
                tables, marks, near, kinds, LONG,
            )  # fmt: skip
    else:
        next_i = _times_at(next_times + start, i0, ii, length, kinds, False)
        for n in tl.range(0, others, disable_licm=True):
            j0 = tl.where(n < before, n, n - before + far_end // NEAR_J) * NEAR_J
            acc = _fwd_tile(
                acc, q_tile, k, v, i0, j0, k_token, v_token, next_i, times + start, ranges,
                tables, marks, near, kinds, NEAR,
            )  # fmt: skip
        for j0 in tl.range(far, far_end, BLOCK_J, disable_licm=True):
            acc = _fwd_tile(
                acc, q_tile, k, v, i0, j0, k_token, v_token, next_i, times + start, ranges,
                tables, marks, sizes, kinds, FAR,
            )  # fmt: skip
    store_rows(y, i0, y_token, ii, length, acc * scale, DV, BLOCK_DV)


@triton.jit
def _key_tiles(i0, far_tiles, marks, sizes: tl.constexpr, kinds: tl.constexpr):
    """Far tiles of keys are those from `far` to `far_end`; the others lie before them and from there to `end`."""
    length, context, history_end, window, buckets = marks
    BLOCK_I: tl.constexpr = sizes[4]
    BLOCK_J: tl.constexpr = sizes[5]
    far, end = 0, tl.minimum(i0 + BLOCK_I, length)
    far_end = tl.minimum(i0 // BLOCK_J, far_tiles) * BLOCK_J
    if kinds[2]:
        last = tl.minimum(tl.minimum(i0 + BLOCK_I, length) - 1, history_end)
        far = (tl.maximum(context, last - window + 1) + BLOCK_J - 1) // BLOCK_J * BLOCK_J
        far_end = tl.minimum(far_end, history_end // BLOCK_J * BLOCK_J)
        if i0 < context:
            far_end = 0
            end = tl.maximum(end, tl.minimum(context, length))
            if kinds[3]:
                end = length
        if far >= far_end:
            far, far_end = 0, 0
    return far, far_end, end


@triton.jit
def _key_times(times, j0, jj, ranges, marks, sizes: tl.constexpr, kinds: tl.constexpr, KIND: tl.constexpr):
    """Times of a tile's keys, and its buckets where it is far."""
    span = 0
    if KIND == LONG:
        t_j = _wide_times_at(times, j0, jj, marks[0])
    else:
        t_j = _times_at(times, j0, jj, marks[0], kinds, KIND == FAR)
        if kinds[1] and KIND == FAR:
            span = tl.load(ranges + j0 // sizes[5])
    return t_j, span


@triton.jit
def _fwd_tile(
    acc, q_tile, k, v, i0, j0, k_token, v_token, next_i, times, ranges, tables, marks,
    sizes: tl.constexpr, kinds: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """acc [I, dv] plus what one tile of keys adds."""
    DQK: tl.constexpr = sizes[0]
    DV: tl.constexpr = sizes[1]
    BLOCK_DQK: tl.constexpr = sizes[2]
    BLOCK_DV: tl.constexpr = sizes[3]
    BLOCK_I: tl.constexpr = sizes[4]
    BLOCK_J: tl.constexpr = sizes[5]
    length, context, history_end, window, buckets = marks
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    k_tile = load_rows(k, j0, k_token, jj, length, DQK, BLOCK_DQK, KIND != FAR)
    v_tile = load_rows(v, j0, v_token, jj, length, DV, BLOCK_DV, KIND != FAR)
    i, j = (i0 + ii)[:, None], (j0 + jj)[None, :]
    t_j, span = _key_times(times, j0, jj, ranges, marks, sizes, kinds, KIND)
    h = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * 0.5
    h = add_bias(h, i, j, next_i[:, None], t_j[None, :], span, tables, marks, kinds, KIND, True)
    p = tanh(h, kinds[4]) * h + h
    if KIND != FAR:
        p = tl.where(visible(i, j, length, context, history_end, window, kinds[2], kinds[3]), p, 0.0)
    return tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")


@triton.jit
def slopes(h, dp, t):
    """2 dp dsilu(s) / ds at s = 2h."""
    return dp * ((1.0 + t) + h * (1.0 - t * t))


@triton.jit
def hstu_bwd_dq_kernel(
    q, k, v, dy, dq, offsets, blocks, num_targets,
    pairs, values, edges, edges64, cells, ranges, times, next_times, times64, next_times64, row_flags,
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, dq_token, dq_head,
    scale, heads, rows, context, window, buckets, tiles,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, block, far_tiles, head, ranges = _place(blocks, ranges, heads, tiles)
    if row >= rows:
        return
    if TIME:
        if (tl.load(row_flags + row) >= IS_WIDE) != WIDE:
            return
    i0 = block * BLOCK_I
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
    tables = (pairs, values, edges, edges64, cells)
    marks = (length, context, history_end, window, buckets)
    sizes: tl.constexpr = (DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J)
    NEAR_J: tl.constexpr = max(16, BLOCK_J // 2)
    near: tl.constexpr = (DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, NEAR_J)
    kinds: tl.constexpr = (POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT)
    ii = tl.arange(0, BLOCK_I)
    q_tile = load_rows(q, i0, q_token, ii, length, DQK, BLOCK_DQK, True)
    dy_tile = load_rows(dy, i0, dy_token, ii, length, DV, BLOCK_DV, True)
    far, far_end, end = _key_tiles(i0, far_tiles, marks, sizes, kinds)
    before = far // NEAR_J
    others = before + (end - far_end + NEAR_J - 1) // NEAR_J
    acc = tl.zeros([BLOCK_I, BLOCK_DQK], tl.float32)
    if WIDE:
        next_i64 = _wide_times_at(next_times64 + start, i0, ii, length)
        for n in tl.range(0, others, disable_licm=True):
            j0 = tl.where(n < before, n, n - before + far_end // NEAR_J) * NEAR_J
            acc = _dq_tile(
                acc, q_tile, dy_tile, k, v, i0, j0, k_token, v_token, next_i64, times64 + start, ranges,
                tables, marks, near, kinds, LONG,
            )  # fmt: skip
    else:
        next_i = _times_at(next_times + start, i0, ii, length, kinds, False)
        for n in tl.range(0, others, disable_licm=True):
            j0 = tl.where(n < before, n, n - before + far_end // NEAR_J) * NEAR_J
            acc = _dq_tile(
                acc, q_tile, dy_tile, k, v, i0, j0, k_token, v_token, next_i, times + start, ranges,
                tables, marks, near, kinds, NEAR,
            )  # fmt: skip
        for j0 in tl.range(far, far_end, BLOCK_J, disable_licm=True):
            acc = _dq_tile(
                acc, q_tile, dy_tile, k, v, i0, j0, k_token, v_token, next_i, times + start, ranges,
                tables, marks, sizes, kinds, FAR,
            )  # fmt: skip
    store_rows(dq, i0, dq_token, ii, length, acc * (0.5 * scale), DQK, BLOCK_DQK)


@triton.jit
def _dq_tile(
    acc, q_tile, dy_tile, k, v, i0, j0, k_token, v_token, next_i, times, ranges, tables, marks,
    sizes: tl.constexpr, kinds: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """acc [I, dqk] plus what one tile of keys adds, twice and without the divisor."""
    DQK: tl.constexpr = sizes[0]
    DV: tl.constexpr = sizes[1]
    BLOCK_DQK: tl.constexpr = sizes[2]
    BLOCK_DV: tl.constexpr = sizes[3]
    BLOCK_I: tl.constexpr = sizes[4]
    BLOCK_J: tl.constexpr = sizes[5]
    length, context, history_end, window, buckets = marks
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    k_tile = load_rows(k, j0, k_token, jj, length, DQK, BLOCK_DQK, KIND != FAR)
    v_tile = load_rows(v, j0, v_token, jj, length, DV, BLOCK_DV, KIND != FAR)
    i, j = (i0 + ii)[:, None], (j0 + jj)[None, :]
    t_j, span = _key_times(times, j0, jj, ranges, marks, sizes, kinds, KIND)
    h = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * 0.5
    h = add_bias(h, i, j, next_i[:, None], t_j[None, :], span, tables, marks, kinds, KIND, True)
    dp = tl.dot(dy_tile, tl.trans(v_tile), input_precision="ieee")
    ds = slopes(h, dp, tanh(h, kinds[4]))
    if KIND != FAR:
        ds = tl.where(visible(i, j, length, context, history_end, window, kinds[2], kinds[3]), ds, 0.0)
    return tl.dot(ds.to(k_tile.dtype), k_tile, acc, input_precision="ieee")


@triton.jit
def hstu_bwd_dkv_kernel(
    q, k, v, dy, dk, dv, offsets, blocks, num_targets,
    pairs, values, edges, edges64, cells, ranges, times, next_times, times64, next_times64, row_flags,
    q_token, q_head, k_token, k_head, v_token, v_head, dy_token, dy_head, dk_token, dk_head, dv_token, dv_head,
    scale, heads, rows, context, window, buckets, tiles,
    DQK: tl.constexpr, DV: tl.constexpr, BLOCK_DQK: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, POSITION: tl.constexpr, TIME: tl.constexpr,
    GENERAL: tl.constexpr, CONTEXT_SEES: tl.constexpr, FAST: tl.constexpr, SHIFT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, block, far_from, head, ranges = _place(blocks, ranges, heads, tiles)
    if row >= rows:
        return
    if TIME:
        if (tl.load(row_flags + row) >= IS_WIDE) != WIDE:
            return
    j0 = block * BLOCK_J
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
    tables = (pairs, values, edges, edges64, cells)
    marks = (length, context, history_end, window, buckets)
    sizes: tl.constexpr = (DQK, DV, BLOCK_DQK, BLOCK_DV, BLOCK_I, BLOCK_J)
    NEAR_I: tl.constexpr = max(16, BLOCK_I // 2)
    near: tl.constexpr = (DQK, DV, BLOCK_DQK, BLOCK_DV, NEAR_I, BLOCK_J)
    kinds: tl.constexpr = (POSITION, TIME, GENERAL, CONTEXT_SEES, FAST, SHIFT)
    jj = tl.arange(0, BLOCK_J)
    k_tile = load_rows(k, j0, k_token, jj, length, DQK, BLOCK_DQK, True)
    v_tile = load_rows(v, j0, v_token, jj, length, DV, BLOCK_DV, True)
    first, far, far_end = _query_tiles(j0, far_from, marks, sizes, kinds)
    before = (far - first) // NEAR_I
    others = before + (length - far_end + NEAR_I - 1) // NEAR_I
    dk_acc = tl.zeros([BLOCK_J, BLOCK_DQK], tl.float32)
    dv_acc = tl.zeros([BLOCK_J, BLOCK_DV], tl.float32)
    if WIDE:
        t_j64 = _wide_times_at(times64 + start, j0, jj, length)
        for n in tl.range(0, others, disable_licm=True):
            i0 = tl.where(n < before, first + n * NEAR_I, far_end + (n - before) * NEAR_I)
            dk_acc, dv_acc = _dkv_tile(
                dk_acc, dv_acc, k_tile, v_tile, q, dy, i0, j0, q_token, dy_token, t_j64, next_times64 + start, ranges,
                tables, marks, near, kinds, LONG,
            )  # fmt: skip
    else:
        t_j = _times_at(times + start, j0, jj, length, kinds, False)
        for n in tl.range(0, others, disable_licm=True):
            i0 = tl.where(n < before, first + n * NEAR_I, far_end + (n - before) * NEAR_I)
            dk_acc, dv_acc = _dkv_tile(
                dk_acc, dv_acc, k_tile, v_tile, q, dy, i0, j0, q_token, dy_token, t_j, next_times + start, ranges,
                tables, marks, near, kinds, NEAR,
            )  # fmt: skip
        for i0 in tl.range(far, far_end, BLOCK_I, disable_licm=True):
            dk_acc, dv_acc = _dkv_tile(
                dk_acc, dv_acc, k_tile, v_tile, q, dy, i0, j0, q_token, dy_token, t_j, next_times + start, ranges,
                tables, marks, sizes, kinds, FAR,
            )  # fmt: skip
    store_rows(dk, j0, dk_token, jj, length, dk_acc * (0.5 * scale), DQK, BLOCK_DQK)
    store_rows(dv, j0, dv_token, jj, length, dv_acc * scale, DV, BLOCK_DV)


@triton.jit
def _query_tiles(j0, far_from, marks, sizes: tl.constexpr, kinds: tl.constexpr):
    """Far tiles of queries are those from `far` to `far_end`; the others lie from `first` to there and behind them."""
    length, context, history_end, window, buckets = marks
    BLOCK_I: tl.constexpr = sizes[4]
    BLOCK_J: tl.constexpr = sizes[5]
    first = j0 // BLOCK_I * BLOCK_I
    far = tl.maximum((j0 + BLOCK_J - 1 + BLOCK_I - 1) // BLOCK_I, far_from) * BLOCK_I
    far_end = length // BLOCK_I * BLOCK_I
    if kinds[2]:
        seen_by_all = tl.minimum(history_end, j0 + window)
        far_end = tl.minimum(far_end, seen_by_all // BLOCK_I * BLOCK_I)
        if (j0 < context) | (j0 + BLOCK_J > history_end):
            far_end = 0
        if (j0 < context) | kinds[3]:
            first = 0
        far = tl.maximum(far, (context + BLOCK_I - 1) // BLOCK_I * BLOCK_I)
    if far >= far_end:
        far, far_end = first, first
    return first, far, far_end


@triton.jit
def _dkv_tile(
    dk_acc, dv_acc, k_tile, v_tile, q, dy, i0, j0, q_token, dy_token, t_j, next_times, ranges,
    tables, marks, sizes: tl.constexpr, kinds: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """dk_acc [J, dqk] and dv_acc [J, dv] plus what one tile of queries adds."""
    DQK: tl.constexpr = sizes[0]
    DV: tl.constexpr = sizes[1]
    BLOCK_DQK: tl.constexpr = sizes[2]
    BLOCK_DV: tl.constexpr = sizes[3]
    BLOCK_I: tl.constexpr = sizes[4]
    BLOCK_J: tl.constexpr = sizes[5]
    length, context, history_end, window, buckets = marks
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    q_tile = load_rows(q, i0, q_token, ii, length, DQK, BLOCK_DQK, KIND != FAR)
    dy_tile = load_rows(dy, i0, dy_token, ii, length, DV, BLOCK_DV, KIND != FAR)
    i, j = (i0 + ii)[None, :], (j0 + jj)[:, None]
    span = 0
    if KIND == LONG:
        next_i = _wide_times_at(next_times, i0, ii, length)
    else:
        next_i = _times_at(next_times, i0, ii, length, kinds, KIND == FAR)
        if kinds[1] and KIND == FAR:
            span = tl.load(ranges + i0 // BLOCK_I)
    h = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * 0.5
    h = add_bias(h, i, j, next_i[None, :], t_j[:, None], span, tables, marks, kinds, KIND, False)
    dp = tl.dot(v_tile, tl.trans(dy_tile), input_precision="ieee")
    t = tanh(h, kinds[4])
    p = t * h + h
    if KIND != FAR:
        sees = visible(i, j, length, context, history_end, window, kinds[2], kinds[3])
        p, dp = tl.where(sees, p, 0.0), tl.where(sees, dp, 0.0)
    dv_acc = tl.dot(p.to(dy_tile.dtype), dy_tile, dv_acc, input_precision="ieee")
    ds = slopes(h, dp, t)
    dk_acc = tl.dot(ds.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
    return dk_acc, dv_acc
