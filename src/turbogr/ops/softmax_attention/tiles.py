"""Softmax attention in torch over tiles of like rows; autograd keeps the weights of every tile."""

import math

import torch
from torch import Tensor

from turbogr.ops.dropout import Noise
from turbogr.ops.softmax_attention.reference import weights_mask
from turbogr.ops.tiles import make_tiles


def attend_tiles(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, dropout_rate: float, noise: Noise | None, layer: int
) -> Tensor:
    heads, dim = q.shape[1:]
    places, parts = [], []
    for tile in make_tiles(offsets, heads):
        q_tile, k_tile, v_tile = (tile.pad(x).transpose(1, 2) for x in (q, k, v))  # [b, H, L, d]
        scores = torch.matmul(q_tile, k_tile.transpose(2, 3)) / math.sqrt(dim)
        above = torch.ones(tile.length, tile.length, dtype=torch.bool, device=q.device).triu(1)
        weights = torch.softmax(scores.masked_fill(above, -torch.inf), dim=-1)
        mask = weights_mask(noise, dropout_rate, layer, tile.tokens, heads)
        if mask is not None:
            weights = weights * mask.to(weights.dtype)
        parts.append(torch.index_select(torch.matmul(weights, v_tile).transpose(1, 2).flatten(0, 1), 0, tile.slots))
        places.append(tile.real)
    if not parts:
        return v * 0.0
    return torch.index_select(torch.cat(parts), 0, torch.argsort(torch.cat(places)))
