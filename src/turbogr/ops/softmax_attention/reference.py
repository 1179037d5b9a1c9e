"""Softmax attention row by row, as the formula reads."""

import math

import torch
from torch import Tensor

from turbogr.ops.dropout import Noise
from turbogr.ops.dropout.reference import keep_mask
from turbogr.ops.philox import Purpose


def attend_reference(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, dropout_rate: float, noise: Noise | None, layer: int
) -> Tensor:
    bounds = offsets.tolist()
    rows = []
    for start, stop in zip(bounds, bounds[1:], strict=False):
        tokens = torch.arange(start, stop, device=q.device).unsqueeze(0)
        mask = weights_mask(noise, dropout_rate, layer, tokens, q.shape[1])
        scores = torch.einsum("ihd,jhd->hij", q[start:stop], k[start:stop]) / math.sqrt(q.shape[2])
        above = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).triu(1)
        weights = torch.softmax(scores.masked_fill(above, -torch.inf), dim=-1)
        if mask is not None:
            weights = weights * mask[0].to(weights.dtype)
        rows.append(torch.einsum("hij,jhd->ihd", weights, v[start:stop]))
    return torch.cat([v.new_zeros(0, *v.shape[1:]), *rows])


def weights_mask(noise: Noise | None, rate: float, layer: int, tokens: Tensor, heads: int) -> Tensor | None:
    """[b, H, L, L] 0 or 1 / (1 - rate) for the queries `tokens` [b, L]; draw j belongs to key j.

    Every head has a stream of its own, so that a mask does not depend on how rows are padded.
    """
    if noise is None or rate == 0.0:
        return None
    rows, length = tokens.shape
    users, positions = noise.users[tokens.flatten()], noise.positions[tokens.flatten()]
    masks = [
        keep_mask(noise.key(Purpose.ATTENTION_DROPOUT, layer * heads + head), rate, users, positions, length)
        for head in range(heads)
    ]
    return torch.stack(masks, dim=1).view(rows, length, heads, length).transpose(1, 2) / (1.0 - rate)
