"""Device code of FuXi's position and time channels: forward, gradient of the values, of the tables and of the decay.

Maps have no heads: a tile's cells are made once and multiplied by a block of columns of v, H heads next to each other.
Every program owns what it writes, so results repeat to the last bit; no more than a tile of a map exists.

    y  = map v,  dv += map^T dy,  a cell's gradient: dy_i . v_j over all columns

What tiles share is handed on in tuples:
    tables    position [max_len], time and edges (the smallest |dt| of a bucket) [buckets + 1], decay [3]
    times     times, next_times    of a row
    marks     length, context, history_end, window, buckets, per_log2    of a row
    sizes     BLOCK_I, BLOCK_J, BLOCK_C
    kinds     POSITION, TIME, DECAY, GENERAL, FAST
"""

import triton
import triton.language as tl

from turbogr.ops.hstu_attention.triton_plan import COLUMNS
from turbogr.ops.hstu_attention.triton_tiles import lookup, visible

LARGEST_EXPONENT = tl.constexpr(57.70780163555854)
"""That of T ** beta in powers of two: e ** 40, as the reference has it."""
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_columns(base, first, stride, rows, count, columns, width, GUARD: tl.constexpr, EVEN: tl.constexpr):
    """[rows, columns] of the rows first ..; zeros from row `count` on (GUARD) and from column `width` on (not EVEN)."""
    at = base + tl.cast(first, tl.int64) * stride + rows[:, None] * stride + columns[None, :]
    if GUARD:
        inside = ((first + rows < count) & (first + rows >= 0))[:, None]
        if EVEN:
            return tl.load(at, mask=inside, other=0.0)
        return tl.load(at, mask=inside & (columns[None, :] < width), other=0.0)
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=columns[None, :] < width, other=0.0)


@triton.jit
def counted(cells, i, j, marks, kinds: tl.constexpr):
    """Cells, 0 where i does not see j or either is context."""
    length, context, history_end, window, buckets, per_log2 = marks
    if kinds[3]:
        sees = visible(i, j, length, context, history_end, window, True, False)
        return tl.where(sees & (i >= context) & (j >= context), cells, 0.0)
    return tl.where((i >= j) & (j >= 0), cells, 0.0)


@triton.jit
def position_cells(i, j, tables, marks, kinds: tl.constexpr):
    """Entries of the position table; where i is before j, the first one."""
    steps = i - j
    if kinds[3]:
        steps = tl.minimum(i, marks[2]) - tl.maximum(j, marks[1])
    # queries behind the row are read too
    steps = tl.maximum(tl.minimum(steps, marks[0] - 1), 0)
    return lookup(tables[0], steps, kinds[4])


@triton.jit
def seconds_apart(i, j, times, marks):
    """int64 |next_times_i - times_j| of a tile; behind either end of the row those of its last and first token."""
    at_i, at_j = tl.minimum(i, marks[0] - 1), tl.minimum(tl.maximum(j, 0), marks[0] - 1)
    return tl.abs(tl.load(times[1] + at_i) - tl.load(times[0] + at_j))


@triton.jit
def time_buckets(apart, tables, marks):
    """Buckets of a tile: guessed by a logarithm, which may be one too high, never too low, and mended by one edge."""
    length, context, history_end, window, buckets, per_log2 = marks
    guess = (tl.log2(tl.maximum(apart, 1).to(tl.float32)) * per_log2 + 0.01).to(tl.int32)
    guess = tl.minimum(guess, buckets)
    return guess - (apart < tl.load(tables[2] + guess)).to(tl.int32)


@triton.jit
def decay_parts(apart, tables):
    """gamma ** (T ** beta), T ** beta and log2 T of a tile; T ** beta is 0 where T is."""
    seconds = apart.to(tl.float32)
    log = tl.log2(tl.maximum(seconds, 1.0))
    power = tl.exp2(tl.minimum(tl.load(tables[3] + 1) * log, LARGEST_EXPONENT))
    power = tl.where(seconds > 0.0, power, 0.0)
    return tl.exp2(power * tl.log2(tl.load(tables[3] + 2))), power, log


@triton.jit
def time_cells(i, j, times, tables, marks, kinds: tl.constexpr):
    """Entries of the time table, or decay."""
    apart = seconds_apart(i, j, times, marks)
    if kinds[2]:
        gate, power, log = decay_parts(apart, tables)
        return gate * tl.load(tables[3])
    else:
        return lookup(tables[1], time_buckets(apart, tables, marks), kinds[4])


@triton.jit
def row_of(row, offsets, num_targets, context, window, buckets, per_log2, kinds: tl.constexpr):
    """(first token of the row, its marks)."""
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    history_end = length
    if kinds[3]:
        history_end = length - tl.load(num_targets + row).to(tl.int32)
    return start, (length, context, history_end, window, buckets, per_log2)


@triton.jit
def fuxi_fwd_kernel(
    v, y, offsets, blocks, num_targets,
    position, time, edges, decay, times, next_times,
    v_token, y_token, y_channel, width, parts, rows, context, window, buckets, per_log2,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, DECAY: tl.constexpr, GENERAL: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row, i0 = tl.load(blocks + pid // parts * COLUMNS), tl.load(blocks + pid // parts * COLUMNS + 1) * BLOCK_I
    if row >= rows:
        return
    kinds: tl.constexpr = (POSITION, TIME, DECAY, GENERAL, FAST)
    sizes: tl.constexpr = (BLOCK_I, BLOCK_J, BLOCK_C)
    tables = (position, time, edges, decay)
    start, marks = row_of(row, offsets, num_targets, context, window, buckets, per_log2, kinds)
    row_times = (times + start, next_times + start)
    length, history_end = marks[0], marks[2]
    columns = pid % parts * BLOCK_C + tl.arange(0, BLOCK_C)
    first, whole, end = 0, i0 // BLOCK_J * BLOCK_J, tl.minimum(i0 + BLOCK_I, length)
    if GENERAL:
        nearest = tl.minimum(i0, history_end) - window + 1
        first = tl.maximum(context, nearest) // BLOCK_J * BLOCK_J
        whole = first
    v += start * v_token
    acc_position = tl.zeros([BLOCK_I, BLOCK_C], tl.float32)
    acc_time = tl.zeros([BLOCK_I, BLOCK_C], tl.float32)
    for j0 in range(first, whole, BLOCK_J):
        acc_position, acc_time = _fwd_tile(
            acc_position, acc_time, v, i0, j0, v_token, columns, width, row_times, tables, marks, sizes, kinds,
            EVEN, False,
        )  # fmt: skip
    for j0 in range(whole, end, BLOCK_J):
        acc_position, acc_time = _fwd_tile(
            acc_position, acc_time, v, i0, j0, v_token, columns, width, row_times, tables, marks, sizes, kinds,
            EVEN, True,
        )  # fmt: skip
    place = i0 + tl.arange(0, BLOCK_I)
    at = y + (start + place.to(tl.int64))[:, None] * y_token + columns[None, :]
    inside = (place < length)[:, None] & (columns < width)[None, :]
    if POSITION:
        tl.store(at, acc_position.to(y.dtype.element_ty), mask=inside)
        at += y_channel
    if TIME:
        tl.store(at, acc_time.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _fwd_tile(
    acc_position, acc_time, v, i0, j0, v_token, columns, width, times, tables, marks, sizes: tl.constexpr,
    kinds: tl.constexpr, EVEN: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """Both sums [I, C] plus what one tile of keys adds."""
    BLOCK_I: tl.constexpr = sizes[0]
    BLOCK_J: tl.constexpr = sizes[1]
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    i, j = (i0 + ii)[:, None], (j0 + jj)[None, :]
    v_tile = load_columns(v, j0, v_token, jj, marks[0], columns, width, GUARD, EVEN)
    if kinds[0]:
        map_tile = position_cells(i, j, tables, marks, kinds)
        if GUARD:
            map_tile = counted(map_tile, i, j, marks, kinds)
        acc_position = tl.dot(map_tile.to(v_tile.dtype), v_tile, acc_position, input_precision="ieee")
    if kinds[1]:
        map_tile = time_cells(i, j, times, tables, marks, kinds)
        if GUARD:
            map_tile = counted(map_tile, i, j, marks, kinds)
        acc_time = tl.dot(map_tile.to(v_tile.dtype), v_tile, acc_time, input_precision="ieee")
    return acc_position, acc_time


@triton.jit
def fuxi_bwd_dv_kernel(
    dy, dv, offsets, blocks, num_targets,
    position, time, edges, decay, times, next_times,
    dy_token, dy_channel, dv_token, width, parts, rows, context, window, buckets, per_log2,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, DECAY: tl.constexpr, GENERAL: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row, j0 = tl.load(blocks + pid // parts * COLUMNS), tl.load(blocks + pid // parts * COLUMNS + 1) * BLOCK_J
    if row >= rows:
        return
    kinds: tl.constexpr = (POSITION, TIME, DECAY, GENERAL, FAST)
    sizes: tl.constexpr = (BLOCK_I, BLOCK_J, BLOCK_C)
    tables = (position, time, edges, decay)
    start, marks = row_of(row, offsets, num_targets, context, window, buckets, per_log2, kinds)
    row_times = (times + start, next_times + start)
    length, history_end = marks[0], marks[2]
    columns = pid % parts * BLOCK_C + tl.arange(0, BLOCK_C)
    first, end = j0 // BLOCK_I * BLOCK_I, length
    # from here on every query of a tile exists and is behind every key
    whole = (j0 + BLOCK_J + BLOCK_I - 2) // BLOCK_I * BLOCK_I
    whole_end = tl.maximum(length // BLOCK_I * BLOCK_I, whole)
    if GENERAL:
        if history_end - (j0 + BLOCK_J - 1) >= window:
            end = tl.minimum(length, j0 + BLOCK_J + window)
        whole, whole_end = end, end
    dy += start * dy_token
    acc = tl.zeros([BLOCK_J, BLOCK_C], tl.float32)
    for i0 in range(whole, whole_end, BLOCK_I):
        acc = _dv_tile(
            acc, dy, i0, j0, dy_token, dy_channel, columns, width, row_times, tables, marks, sizes, kinds, EVEN, False
        )  # fmt: skip
    before = (tl.minimum(whole, end) - first + BLOCK_I - 1) // BLOCK_I
    for n in range(0, before + tl.maximum(end - whole_end + BLOCK_I - 1, 0) // BLOCK_I):
        i0 = tl.where(n < before, first + n * BLOCK_I, whole_end + (n - before) * BLOCK_I)
        acc = _dv_tile(
            acc, dy, i0, j0, dy_token, dy_channel, columns, width, row_times, tables, marks, sizes, kinds, EVEN, True
        )  # fmt: skip
    place = j0 + tl.arange(0, BLOCK_J)
    at = dv + (start + place.to(tl.int64))[:, None] * dv_token + columns[None, :]
    inside = (place < length)[:, None] & (columns < width)[None, :]
    semantic = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (semantic + acc).to(dv.dtype.element_ty), mask=inside)


@triton.jit
def _dv_tile(
    acc, dy, i0, j0, dy_token, dy_channel, columns, width, times, tables, marks, sizes: tl.constexpr,
    kinds: tl.constexpr, EVEN: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """acc [J, C] plus what one tile of queries adds."""
    BLOCK_I: tl.constexpr = sizes[0]
    BLOCK_J: tl.constexpr = sizes[1]
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    i, j = (i0 + ii)[None, :], (j0 + jj)[:, None]
    if kinds[0]:
        dy_tile = load_columns(dy, i0, dy_token, ii, marks[0], columns, width, GUARD, EVEN)
        map_tile = position_cells(i, j, tables, marks, kinds)
        if GUARD:
            map_tile = counted(map_tile, i, j, marks, kinds)
        acc = tl.dot(map_tile.to(dy_tile.dtype), dy_tile, acc, input_precision="ieee")
        dy += dy_channel
    if kinds[1]:
        dy_tile = load_columns(dy, i0, dy_token, ii, marks[0], columns, width, GUARD, EVEN)
        map_tile = time_cells(i, j, times, tables, marks, kinds)
        if GUARD:
            map_tile = counted(map_tile, i, j, marks, kinds)
        acc = tl.dot(map_tile.to(dy_tile.dtype), dy_tile, acc, input_precision="ieee")
    return acc


@triton.jit
def fuxi_bwd_maps_kernel(
    v, dy, offsets, blocks, num_targets, position_parts, time_parts, target_parts,
    position, time, edges, decay, times, next_times,
    v_token, dy_token, dy_channel, width, parts, rows, listed, stretch, distances, max_len,
    context, window, buckets, per_log2,
    BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, EVEN: tl.constexpr,
    POSITION: tl.constexpr, TIME: tl.constexpr, DECAY: tl.constexpr, GENERAL: tl.constexpr,
    FAST: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """A program takes the tiles of one distance between queries and keys, as hstu_bwd_bias_kernel does: they lay the
    same diagonals over the position table.  i - j = ii - jj + distance * BLOCK_J + BLOCK_J - BLOCK_I"""
    pid = tl.program_id(0)
    distance, begin = pid % distances, pid // distances * stretch
    ii, jj = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_J)
    kinds: tl.constexpr = (POSITION, TIME, DECAY, GENERAL, FAST)
    sizes: tl.constexpr = (BLOCK_I, BLOCK_J, BLOCK_C)
    tables = (position, time, edges, decay)
    diagonals = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
    sums = tl.zeros([BUCKETS], tl.float32)
    for number in range(begin, tl.minimum(begin + stretch, listed)):
        row, i0 = tl.load(blocks + COLUMNS * number), tl.load(blocks + COLUMNS * number + 1) * BLOCK_I
        if (row < rows) & (i0 + BLOCK_I > distance * BLOCK_J):
            start, marks = row_of(row, offsets, num_targets, context, window, buckets, per_log2, kinds)
            j0 = i0 + BLOCK_I - BLOCK_J - distance * BLOCK_J
            i, j = (i0 + ii)[:, None], (j0 + jj)[None, :]
            own_v, own_dy = v + start * v_token, dy + start * dy_token
            if POSITION:
                total = _cell_gradients(own_v, own_dy, i0, j0, v_token, dy_token, marks[0], width, parts, sizes, EVEN)
                total = counted(total, i, j, marks, kinds)
                if GENERAL:
                    own = target_parts + tl.cast(number, tl.int64) * max_len
                    total = _without_targets(own, total, i, j, j0 + jj, marks, distance, max_len)
                diagonals += total
            if TIME:
                own_dy += dy_channel * POSITION
                total = _cell_gradients(own_v, own_dy, i0, j0, v_token, dy_token, marks[0], width, parts, sizes, EVEN)
                total = counted(total, i, j, marks, kinds)
                apart = seconds_apart(i, j, (times + start, next_times + start), marks)
                if DECAY:
                    sums = _add_decay(sums, total, apart, tables, BUCKETS)
                else:
                    sums = _add_by_bucket(sums, total, time_buckets(apart, tables, marks), BUCKETS)
    if TIME:
        tl.store(time_parts + pid * BUCKETS + tl.arange(0, BUCKETS), sums)
    if POSITION:
        at = position_parts + pid.to(tl.int64) * (BLOCK_I * BLOCK_J) + ii[:, None] * BLOCK_J + jj[None, :]
        tl.store(at, diagonals)


@triton.jit
def _cell_gradients(
    v, dy, i0, j0, v_token, dy_token, length, width, parts, sizes: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """[I, J] dy_i . v_j over all columns."""
    ii, jj = tl.arange(0, sizes[0]), tl.arange(0, sizes[1])
    total = tl.zeros([sizes[0], sizes[1]], tl.float32)
    for part in range(0, parts):
        columns = part * sizes[2] + tl.arange(0, sizes[2])
        dy_tile = load_columns(dy, i0, dy_token, ii, length, columns, width, True, EVEN)
        v_tile = load_columns(v, j0, v_token, jj, length, columns, width, True, EVEN)
        total = tl.dot(dy_tile, tl.trans(v_tile), total, input_precision="ieee")
    return total


@triton.jit
def _without_targets(target_parts, total, i, j, columns, marks, distance, max_len):
    """Cells without those of targets, which stand at the history's end: theirs belong to history_end - j, on the
    diagonal to 0, and are stored apart."""
    history_end = marks[2]
    if history_end < marks[0]:
        of_targets = tl.where(i >= history_end, total, 0.0)
        by_key = tl.sum(tl.where(j < history_end, of_targets, 0.0), axis=0)
        steps = history_end - columns
        tl.store(target_parts + steps, by_key, mask=(steps > 0) & (steps < max_len) & (columns >= 0))
        if distance == 0:
            tl.store(target_parts, tl.sum(tl.where(j >= history_end, of_targets, 0.0)))
        total = tl.where(i < history_end, total, 0.0)
    return total


@triton.jit
def _add_decay(sums, total, apart, tables, BUCKETS: tl.constexpr):
    """sums [BUCKETS] plus, of the cells [I, J], gate, gate * power and gate * power * ln T times their gradients."""
    gate, power, log = decay_parts(apart, tables)
    entry = tl.arange(0, BUCKETS)
    total *= gate
    sums += tl.where(entry == 0, tl.sum(total), 0.0)
    total *= power
    sums += tl.where(entry == 1, tl.sum(total), 0.0)
    return sums + tl.where(entry == 2, tl.sum(total * log) * LN2, 0.0)


@triton.jit
def _add_by_bucket(sums, total, bucket, BUCKETS: tl.constexpr):
    """sums [BUCKETS] plus the cells [I, J] of every bucket of the tile."""
    entry = tl.arange(0, BUCKETS)
    for one in range(tl.min(bucket), tl.max(bucket) + 1):
        sums += tl.where(entry == one, tl.sum(tl.where(bucket == one, total, 0.0)), 0.0)
    return sums
