"""FuXi attention in torch over tiles of like rows; the backward computes a tile's maps and scores once more.

Only q, k, v and the tables are kept between forward and backward, so memory above them is one tile's.
    b rows of a tile, L its longest row, H heads, C channels
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from turbogr.ops.fuxi_attention.reference import Maps, attend_reference, time_decay
from turbogr.ops.hstu_attention.reference import Mask
from turbogr.ops.hstu_attention.tiles import steps_back, tile_buckets
from turbogr.ops.tiles import Tile, make_tiles


def attend_tiles(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask) -> Tensor:
    tiles = make_tiles(offsets, q.shape[1]) if mask.causal_only else []
    if not tiles:
        return attend_reference(q, k, v, offsets, max_len, maps, mask)
    order = torch.cat([tile.tokens.flatten() for tile in tiles])
    cells = [tile.tokens.numel() for tile in tiles]
    parts = [torch.split(torch.index_select(x, 0, order), cells) for x in (q, k, v)]
    outs = []
    place = torch.empty(len(q), dtype=torch.int64, device=q.device)
    start = 0
    for tile, q_tile, k_tile, v_tile in zip(tiles, *parts, strict=True):
        y = checkpoint(
            _attend_tile, tile, q_tile, k_tile, v_tile, max_len, maps, use_reentrant=False, preserve_rng_state=False
        )
        outs.append(y)
        place[tile.real] = tile.slots + start
        start += tile.tokens.numel()
    return torch.index_select(torch.cat(outs), 0, place)


def _attend_tile(tile: Tile, q: Tensor, k: Tensor, v: Tensor, max_len: int, maps: Maps) -> Tensor:
    """The padded cells of a tile: q, k, v [b * L, H, d] -> [b * L, C, H, dv]."""
    q, k, v = (x.view(*tile.tokens.shape, *x.shape[1:]) for x in (q, k, v))  # [b, L, H, d]
    channels = []
    if maps.position is not None:
        weights = TableEntries.apply(maps.position, steps_back(tile.length, q.device)).tril()  # type: ignore[no-untyped-call]
        channels.append(torch.einsum("ij,bjhd->bihd", weights.to(v.dtype), v))
    if maps.has_time:
        channels.append(torch.einsum("bij,bjhd->bihd", _time_map(tile, maps).tril().to(v.dtype), v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    # half-precision inputs are added up in fp32
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    semantic = (torch.nn.functional.silu(scores) / max_len).tril()
    channels.append(torch.einsum("bhij,bjhd->bihd", semantic.to(v.dtype), v))
    return torch.stack(channels, dim=2).flatten(0, 1)


def _time_map(tile: Tile, maps: Maps) -> Tensor:
    """[b, L, L], also above the diagonal."""
    assert maps.times is not None and maps.next_times is not None
    if maps.time is not None:
        buckets = tile_buckets(maps.times, maps.next_times, tile, maps.bucket_width, len(maps.time) - 1)
        entries: Tensor = TableEntries.apply(maps.time, buckets)  # type: ignore[no-untyped-call]
        return entries
    assert maps.decay is not None
    return time_decay(tile.pad(maps.next_times).unsqueeze(2) - tile.pad(maps.times).unsqueeze(1), maps.decay)


class TableEntries(torch.autograd.Function):
    """table[index]; a table's gradient is a sum over very many cells, which double keeps exact enough."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size, ctx.dtype = len(table), table.dtype
        return torch.index_select(table, 0, index.flatten()).view(index.shape)

    @staticmethod
    def backward(ctx: Any, dentries: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        sums = torch.bincount(index.flatten(), weights=dentries.double().flatten(), minlength=ctx.size)
        return sums.to(ctx.dtype), None
