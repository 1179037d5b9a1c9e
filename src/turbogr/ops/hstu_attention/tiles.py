"""HSTU attention in torch over tiles of like rows; the backward recomputes the scores tile by tile.

Only q, k, v and the bias tables are kept between forward and backward, so memory above them is one tile's.
    b rows of a tile, L its longest row, H heads
"""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from turbogr.ops.hstu_attention import reference
from turbogr.ops.hstu_attention.reference import Bias, Mask, time_bucket
from turbogr.ops.tiles import Tile, make_tiles

KEPT_CELLS = 1 << 25
"""Time buckets of a batch are kept for its other layers and its backward up to so many cells (4 bytes each)."""

_kept_buckets: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""next_times -> {what the buckets depend on: (times, buckets)}; an entry goes when the batch's times go."""


@torch.no_grad()
def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias, mask: Mask) -> Tensor:
    if not mask.causal_only:
        return reference.forward(q, k, v, offsets, max_len, bias, mask)
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    for tile in make_tiles(offsets, q.shape[1]):
        scores, _ = _scores(q, k, tile, bias)
        weights = torch.nn.functional.silu(scores, inplace=True).div_(max_len).tril_()
        tile.unpad_into(y, torch.matmul(weights.to(v.dtype), _heads_first(tile.pad(v))).transpose(1, 2))
    return y


@torch.no_grad()
def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    bias: Bias,
    mask: Mask,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    if not mask.causal_only:
        return reference.backward(dy, q, k, v, offsets, max_len, bias, mask, dq, dk, dv)
    position, time = bias.position, bias.time
    # bias gradients are sums over very many cells: double keeps them exact enough
    dposition = None if position is None else torch.zeros_like(position, dtype=torch.float64)
    dtime = None if time is None else torch.zeros_like(time, dtype=torch.float64)
    for tile in make_tiles(offsets, q.shape[1]):
        scores, buckets = _scores(q, k, tile, bias)
        dy_tile = _heads_first(tile.pad(dy) * tile.valid[:, :, None, None])
        q_tile, k_tile, v_tile = (_heads_first(tile.pad(x)) for x in (q, k, v))
        dweights = torch.matmul(dy_tile, v_tile.transpose(2, 3)).to(scores.dtype)
        dscores = torch.ops.aten.silu_backward(dweights, scores).div_(max_len).tril_()
        weights = torch.nn.functional.silu(scores, inplace=True).div_(max_len).tril_()
        tile.unpad_into(dv, torch.matmul(weights.to(dy.dtype).transpose(2, 3), dy_tile).transpose(1, 2))
        if dposition is not None or dtime is not None:
            _add_bias_gradients(dscores.sum(1), buckets, dposition, dtime)
        dscores = dscores.to(q.dtype)
        tile.unpad_into(dq, torch.matmul(dscores, k_tile).transpose(1, 2))
        tile.unpad_into(dk, torch.matmul(dscores.transpose(2, 3), q_tile).transpose(1, 2))
    return (
        None if dposition is None or position is None else dposition.to(position.dtype),
        None if dtime is None or time is None else dtime.to(time.dtype),
    )


def _heads_first(x: Tensor) -> Tensor:
    """[b, L, H, d] -> [b, H, L, d]."""
    return x.transpose(1, 2)


def _scores(q: Tensor, k: Tensor, tile: Tile, bias: Bias) -> tuple[Tensor, Tensor | None]:
    """q.k + biases [b, H, L, L] and the time buckets [b, L, L]."""
    q_tile, k_tile = _heads_first(tile.pad(q)), _heads_first(tile.pad(k))
    scores = torch.matmul(q_tile, k_tile.transpose(2, 3))
    # half-precision inputs are added up in fp32
    scores = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    buckets = None
    if bias.position is not None:
        scores += bias.position[steps_back(tile.length, q.device)]
    if bias.time is not None:
        assert bias.times is not None and bias.next_times is not None
        buckets = tile_buckets(bias.times, bias.next_times, tile, bias.bucket_width, len(bias.time) - 1)
        scores += torch.index_select(bias.time, 0, buckets.flatten()).view(buckets.shape).unsqueeze(1)
    return scores, buckets


def tile_buckets(times: Tensor, next_times: Tensor, tile: Tile, width: float, count: int) -> Tensor:
    """int32 [b, L, L], computed once per batch: they cost as much as the scores."""
    kept = _kept_buckets.setdefault(next_times, {})  # type: ignore[no-untyped-call]
    # the entry holds `times` too, so that its id stays its own (but never its own key, which it would keep alive)
    key = (id(times), times._version, next_times._version, tile.name, width, count)
    if key in kept:
        found: Tensor = kept[key][1]
        return found
    differences = tile.pad(next_times).unsqueeze(2) - tile.pad(times).unsqueeze(1)
    buckets = time_bucket(differences, width, count)
    if sum(other.numel() for _, other in kept.values()) + buckets.numel() <= KEPT_CELLS:
        kept[key] = (None if times is next_times else times, buckets)
    return buckets


def steps_back(length: int, device: torch.device) -> Tensor:
    """[L, L] i - j, 0 above the diagonal."""
    steps = torch.arange(length, device=device)
    return (steps.unsqueeze(1) - steps).clamp_(min=0)


def _add_bias_gradients(cells: Tensor, buckets: Tensor | None, dposition: Tensor | None, dtime: Tensor | None) -> None:
    """Add the score gradients, summed over heads, cells [b, L, L] (0 above the diagonal) to their table entries."""
    if dposition is not None:
        length = cells.shape[1]
        diagonals = torch.bincount(steps_back(length, cells.device).flatten(), weights=cells.double().sum(0).flatten())
        dposition[:length] += diagonals
    if dtime is not None and buckets is not None:
        dtime += torch.bincount(buckets.flatten(), weights=cells.double().flatten(), minlength=len(dtime))
