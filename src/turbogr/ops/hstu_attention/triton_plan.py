"""What the kernels of a batch share, made on the device without waiting for it: work lists, 32-bit times, tables.

Work lists and times depend on the batch alone; they are kept for its other layers and its backward.
    T tokens, B rows
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from turbogr.device import capturing
from turbogr.ops.hstu_attention.reference import Bias, bucket_edges
from turbogr.ops.hstu_attention.triton_tiles import FEW, PAD, bucket_range

INT32_MAX = 2**31 - 1
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""offsets (or next_times) -> {what else a plan depends on: the plan}; an entry goes when the batch goes."""


COLUMNS = tl.constexpr(5)


def _plans_of(owner: Tensor) -> dict[Any, Any]:
    """What is known of a batch; nothing while a graph is captured: its replays plan for what its tensors then hold."""
    plans: dict[Any, Any] = {} if capturing() else _kept.setdefault(owner, {})
    return plans


def work_list(offsets: Tensor, tokens: int, block: int, *, of_queries: bool) -> Tensor:
    """int32 [n, COLUMNS] (row, block of the row, far tiles: none, the row's first place in the list, its blocks); from
    the last block on, row is B. The longest rows come first, and all blocks of a row and a head run together, so that
    its keys and values are in the cache; within them most work first: a block of queries has the more the later it
    stands in its row, a block of keys the earlier.
    """
    kept = _plans_of(offsets)
    key = ("blocks", block, of_queries, offsets._version)
    if key not in kept:
        rows = len(offsets) - 1
        blocks, order = torch.sort((offsets.diff() + (block - 1)) // block, descending=True, stable=True)
        ends = blocks.cumsum(0)
        number = torch.arange(-(-tokens // block) + rows, device=offsets.device)
        at = torch.searchsorted(ends, number, right=True)
        inside, own = at < rows, at.clamp(max=rows - 1)
        first, count = ends[own] - blocks[own], blocks[own]
        place = number - first
        place = count - 1 - place if of_queries else place
        far = torch.full_like(own, INT32_MAX if of_queries else 0)
        first, count = torch.where(inside, first, ends[-1]), torch.where(inside, count, len(number))
        columns = (torch.where(inside, order[own], rows), place, far, first, count)
        kept[key] = torch.stack(columns, dim=1).to(torch.int32)
    found: Tensor = kept[key]
    return found


def with_far_tiles(
    blocks: Tensor, offsets: Tensor, times: "Times", max_len: int, per_log2: float, buckets: int,
    block_i: int, block_j: int, *, of_queries: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """A work list whose third column says where tiles are far by their times, and the buckets of every tile [n, tiles]
    as the lowest one and, from bit 16 on, how many more; see `far_tiles_kernel`."""
    kept = _plans_of(times.next_times)
    key = ("far", block_i, block_j, of_queries, per_log2, buckets)
    if key not in kept:
        tiles = triton.next_power_of_2(-(-max_len // (block_j if of_queries else block_i)))
        out, ranges = torch.empty_like(blocks), torch.empty(len(blocks), tiles, dtype=torch.int32, device=blocks.device)
        far_tiles_kernel[(len(blocks),)](
            blocks, out, ranges, offsets, times.times, times.next_times, times.flags, len(offsets) - 1, per_log2,
            buckets, block_i, block_j, OF_QUERIES=of_queries, TILES=tiles,
        )  # fmt: skip
        kept[key] = out, ranges
    found: tuple[Tensor, Tensor] = kept[key]
    return found


@triton.jit
def far_tiles_kernel(
    blocks, out, ranges, offsets, times, next_times, flags, rows, per_log2, buckets, block_i, block_j,
    OF_QUERIES: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """For a block of queries, how many tiles of keys from the row's first on are far; for a block of keys, the tile of
    queries from which on they all are. In a row that is out of order, or wide, none is."""
    number = tl.program_id(0)
    entry = number * COLUMNS
    row, block = tl.load(blocks + entry), tl.load(blocks + entry + 1)
    for column in tl.static_range(COLUMNS):
        tl.store(out + entry + column, tl.load(blocks + entry + column))
    if row >= rows:
        return
    start = tl.load(offsets + row)
    length = (tl.load(offsets + row + 1) - start).to(tl.int32)
    times += start
    next_times += start
    tile = tl.arange(0, TILES)
    if OF_QUERIES:
        i0, j0 = block * block_i + tile * 0, tile * block_j
        candidate = tile < i0 // block_j
    else:
        i0, j0 = tile * block_i, block * block_j + tile * 0
        candidate = (tile < length // block_i) & (i0 >= j0 + block_j - 1)
    least = tl.load(next_times + i0, mask=candidate, other=0)
    least -= tl.load(times + j0 + block_j - 1, mask=candidate, other=0)
    most = tl.load(next_times + tl.minimum(i0 + block_i, length) - 1, mask=candidate, other=0)
    most -= tl.load(times + j0, mask=candidate, other=0)
    low, high = bucket_range(least, most, per_log2, buckets)
    near = candidate & ((high - low > FEW) | (tl.load(flags + row) != 1))
    if OF_QUERIES:
        far = tl.min(tl.where(near, tile, TILES))
    else:
        far = tl.max(tl.where(near, tile + 1, 0))
    tl.store(out + entry + 2, far)
    tl.store(ranges + number.to(tl.int64) * TILES + tile, low | (high - low) << 16, mask=candidate)


@dataclass(frozen=True)
class Times:
    """Every time relative to the earliest of its row, in 32 bits where the row's span allows it."""

    times: Tensor  # int32 [T]
    next_times: Tensor  # int32 [T]
    flags: Tensor  # int32 [B]: 1 ordered, 2 wide


def relative_times(times: Tensor, next_times: Tensor, offsets: Tensor) -> Times:
    kept = _plans_of(next_times)
    key = ("times", id(times), times._version, next_times._version, id(offsets), offsets._version)
    if key not in kept:
        made = Times(
            torch.empty(times.shape, dtype=torch.int32, device=times.device),
            torch.empty(times.shape, dtype=torch.int32, device=times.device),
            torch.empty(len(offsets) - 1, dtype=torch.int32, device=times.device),
        )
        if len(offsets) > 1:
            relative_times_kernel[(len(offsets) - 1,)](
                times, next_times, offsets, made.times, made.next_times, made.flags, BLOCK=1024, num_warps=8
            )
        # `times` and `offsets` are kept too, so that their ids stay their own (never the key itself)
        kept[key] = (None if times is next_times else times, offsets, made)
    found: Times = kept[key][2]
    return found


@triton.jit
def relative_times_kernel(times, next_times, offsets, times32, next32, flags, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start, end = tl.load(offsets + row), tl.load(offsets + row + 1)
    if start == end:
        tl.store(flags + row, 1)
        return
    at = tl.arange(0, BLOCK)
    first = tl.load(times + start)
    earliest = tl.full([BLOCK], 0, tl.int64) + first
    latest = earliest
    disorder = tl.zeros([BLOCK], tl.int32)
    for base in range(start, end, BLOCK):
        inside = base + at < end
        time = tl.load(times + base + at, mask=inside, other=first)
        after = tl.load(next_times + base + at, mask=inside, other=first)
        earliest = tl.minimum(earliest, tl.minimum(time, after))
        latest = tl.maximum(latest, tl.maximum(time, after))
        has_next = base + at + 1 < end
        later = tl.load(times + base + at + 1, mask=has_next, other=0)
        later_next = tl.load(next_times + base + at + 1, mask=has_next, other=0)
        disorder |= (has_next & ((later < time) | (later_next < after))).to(tl.int32)
        disorder |= (inside & (after < time)).to(tl.int32)
    origin = tl.min(earliest)
    # a difference that leaves 64 bits would be negative
    span = tl.max(latest) - origin
    wide = (span >= 2147483647) | (span < 0)
    tl.store(flags + row, (tl.max(disorder) == 0).to(tl.int32) + 2 * wide.to(tl.int32))
    for base in range(start, end, BLOCK):
        inside = base + at < end
        tl.store(times32 + base + at, (tl.load(times + base + at, mask=inside) - origin).to(tl.int32), mask=inside)
        after = tl.load(next_times + base + at, mask=inside)
        tl.store(next32 + base + at, (after - origin).to(tl.int32), mask=inside)


@dataclass(frozen=True)
class Edges:
    """The bucket edges, and the cells of the float format between which they lie."""

    edges: Tensor  # int32 [buckets + 1 + FEW], entry b the smallest |dt| of bucket b, INT32_MAX where it has none
    edges64: Tensor  # int64 [buckets + 1]
    cells: (
        Tensor  # int32 [cells, 4]: the edge within it, INT32_MAX where there is none; buckets before and from it on; 0
    )
    shift: int  # leading bits of the fraction that number a cell within its power of two


@functools.cache
def edge_tables(width: float, buckets: int, device: torch.device) -> Edges:
    edges = np.array([0, *bucket_edges(width, buckets)], dtype=np.int64)
    shift = next(bits for bits in range(1, 12) if _divided_once(edges, bits))
    firsts, lasts = _cells(shift)
    before = np.searchsorted(edges, firsts, side="right") - 1
    after = np.searchsorted(edges, lasts, side="right") - 1
    divided = after > before
    cell_edges = np.where(divided, edges[np.minimum(before + 1, buckets)], INT32_MAX)
    short = np.minimum(edges, INT32_MAX)
    padded = np.concatenate((short, np.full(int(FEW.value), INT32_MAX)))

    def tensor(values: np.ndarray, kind: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, kind)

    return Edges(
        tensor(padded, torch.int32),
        tensor(edges, torch.int64),
        tensor(np.stack((np.minimum(cell_edges, INT32_MAX), before, after, 0 * before), axis=1), torch.int32),
        shift,
    )


def _cells(shift: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last whole number of every cell: those whose single-precision form has the cell's leading bits.

    Large numbers are rounded on their way to a float, so a cell begins half a step before its first float.
    """
    count = 31 << shift
    names = np.arange(count + 1, dtype=np.int64) + (127 << shift)
    floats = (names << (23 - shift)).astype(np.uint32).view(np.float32).astype(np.float64)
    firsts = np.empty(count + 1, dtype=np.int64)
    for cell, value in enumerate(floats):
        low, high = int(value * 0.9), int(value) + 1  # the first whole number x with float32(x) >= value
        while low < high:
            middle = (low + high) // 2
            if np.float32(middle) >= np.float32(value):
                high = middle
            else:
                low = middle + 1
        firsts[cell] = low
    return firsts[:-1], np.maximum(firsts[1:] - 1, firsts[:-1])


def _divided_once(edges: np.ndarray, shift: int) -> bool:
    firsts, lasts = _cells(shift)
    return bool((np.searchsorted(edges, lasts, side="right") - np.searchsorted(edges, firsts, side="right") <= 1).all())


@dataclass(frozen=True)
class Tables:
    """Halved tables of one layer."""

    pairs: Tensor  # fp32 [max_len + PAD, 2]: entries x and x - 1 of the position table; PAD zeros lie before them
    values: Tensor  # fp32 [buckets + 1 + FEW]
    cells: Tensor  # int32 [cells, 4]: edge, bits of the values before and from it on, 0


def half_tables(bias: Bias, edges: Edges | None, device: torch.device) -> Tables:
    pad, few = int(PAD.value), int(FEW.value)
    max_len = 0 if bias.position is None else len(bias.position)
    buckets = 0 if bias.time is None else len(bias.time) - 1
    sizes = [2 * (2 * pad + max_len), buckets + 1 + few]
    buffer = torch.empty(sum(sizes), dtype=torch.float32, device=device)
    cells = torch.empty(0 if edges is None else edges.cells.numel(), dtype=torch.int32, device=device)
    block = 1024
    half_tables_kernel[(triton.cdiv(max(len(buffer), len(cells)), block),)](
        bias.position if bias.position is not None else buffer, bias.time if bias.time is not None else buffer,
        cells if edges is None else edges.cells, buffer, cells, max_len, buckets, len(cells),
        PADDING=pad, FURTHER=few, BLOCK=block,
    )  # fmt: skip
    pairs, values = torch.split(buffer, sizes)
    return Tables(pairs[2 * pad :], values, cells)


@triton.jit
def half_tables_kernel(
    position, time, cell_buckets, out, cells, max_len, buckets, num_cells,
    PADDING: tl.constexpr, FURTHER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    size = 2 * (2 * PADDING + max_len)
    here = at // 2 - PADDING - at % 2
    x = tl.load(position + here, mask=(at < size) & (here >= 0) & (here < max_len), other=0.0).to(tl.float32)
    here = at - size
    x += tl.load(time + here, mask=(here >= 0) & (here <= buckets), other=0.0).to(tl.float32)
    tl.store(out + at, 0.5 * x, mask=at < size + buckets + 1 + FURTHER)
    cell = tl.load(cell_buckets + at, mask=at < num_cells, other=0)
    names_bucket = (at % 4 == 1) | (at % 4 == 2)
    value = 0.5 * tl.load(time + cell, mask=names_bucket & (at < num_cells), other=0.0).to(tl.float32)
    tl.store(cells + at, tl.where(names_bucket, value.to(tl.int32, bitcast=True), cell), mask=at < num_cells)


def diagonal_sums(parts: Tensor, max_len: int) -> Tensor:
    """[max_len] out of [distances, BLOCK_I, BLOCK_J]: entry p sums the cells with i - j = p of every distance."""
    distances, block_i, block_j = parts.shape
    width = block_i + block_j
    # flipped and written one cell further right in every row, diagonals become columns
    flat = torch.nn.functional.pad(parts.flip(2), (0, block_i)).flatten(1)
    columns = flat[:, : block_i * (width - 1)].view(distances, block_i, width - 1).sum(1)
    # column c of a distance is i - j = c + distance * BLOCK_J - BLOCK_I + 1
    out = parts.new_zeros((distances + 1) * block_j)
    out[:-block_j] += columns[:, :block_j].flatten()
    out.view(-1, block_j)[1:, : block_i - 1] += columns[:, block_j:]
    return out[block_i - 1 : block_i - 1 + max_len]
