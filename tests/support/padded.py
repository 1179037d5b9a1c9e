"""HSTU and SASRec written a second time, padded: rows [B, N, ...] with masks, as the public code has them.

Nothing here is shared with the package but the parameters. B rows, N maximal length, H heads, D width
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F


def pad(values: Tensor, offsets: Tensor, length: int, junk: float = 0.0) -> Tensor:
    """[T, ...] -> [B, length, ...], `junk` behind every row."""
    out = torch.full((len(offsets) - 1, length, *values.shape[1:]), junk, dtype=values.dtype)
    return torch.stack(
        [torch.cat((values[a:b], row[b - a :])) for row, a, b in zip(out, offsets[:-1], offsets[1:], strict=True)]
    )


def unpad(padded: Tensor, offsets: Tensor) -> Tensor:
    return torch.cat([row[:n] for row, n in zip(padded, offsets.diff().tolist(), strict=True)])


def relative_positions(table: Tensor) -> Tensor:
    """[N, N] out of a table [2N - 1] over j - i + N - 1, as the public code keeps it."""
    return table.unfold(0, (len(table) + 1) // 2, 1).flip(0)


def bucketed(differences: Tensor, buckets: int = 128, width: float = 0.301) -> Tensor:
    return (torch.log(differences.abs().clamp(min=1).float()) / width).long().clamp(0, buckets)


def hstu_scores_bias(position: Tensor | None, time: Tensor | None, ext_times: Tensor) -> Tensor | float:
    """[B, N, N]; ext_times [B, N + 1] holds the target's time behind the last event."""
    bias: Tensor | float = 0.0
    if position is not None:
        # the half of the table about later events is never seen: it is poisoned to show it
        table = torch.cat((position.flip(0), torch.full_like(position[1:], 1e3)))
        bias = relative_positions(table).unsqueeze(0)
    if time is not None:
        bias = bias + time[bucketed(ext_times[:, 1:, None] - ext_times[:, None, :-1])]
    return bias


def hstu_attention_padded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | float) -> Tensor:
    """q, k, v [B, N, H, d] -> [B, N, H, d]."""
    length = q.shape[1]
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k)
    if isinstance(bias, Tensor):
        scores = scores + bias.unsqueeze(1)
    weights = F.silu(scores) / length * torch.ones(length, length).tril()
    return torch.einsum("bhnm,bmhd->bnhd", weights, v)


def extended(times: Tensor, next_times: Tensor, offsets: Tensor, length: int) -> Tensor:
    """[B, length + 1] times of a row with the target's time as one more event, then zeros."""
    ext = pad(times, offsets, length + 1)
    for row, (begin, end) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
        if end > begin:
            ext[row, end - begin] = next_times[end - 1]
    return ext


def hstu_encoder(state: Mapping[str, Tensor], x: Tensor, ext_times: Tensor, heads: int) -> Tensor:
    """x [B, N, D] -> [B, N, D]; no dropout."""
    width = x.shape[2]
    x = x * math.sqrt(width) + state["input.table"]
    block = 0
    while f"blocks.{block}.uvqk" in state:
        name = f"blocks.{block}."
        mixed = F.silu(F.layer_norm(x, (width,), eps=1e-6) @ state[name + "uvqk"])
        u, v, q, k = mixed.split(width, dim=2)
        v, q, k = (part.unflatten(2, (heads, width // heads)) for part in (v, q, k))
        bias = hstu_scores_bias(state.get(name + "position_bias"), state.get(name + "time_bias"), ext_times)
        y = hstu_attention_padded(q, k, v, bias).flatten(2)
        gated = u * F.layer_norm(y, (width,), eps=1e-6)
        x = x + gated @ state[name + "out_weight"].T + state[name + "out_bias"]
        block += 1
    return x


def sasrec_encoder(state: Mapping[str, Tensor], x: Tensor, heads: int) -> Tensor:
    """x [B, N, D] -> [B, N, D] by torch's own multi-head attention; no dropout."""
    length, width = x.shape[1:]
    x = x * math.sqrt(width) + state["input.table"]
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    block = 0
    while f"blocks.{block}.qkv_weight" in state:
        part = {key.split(".")[2]: value for key, value in state.items() if key.startswith(f"blocks.{block}.")}
        attention = torch.nn.MultiheadAttention(width, heads, batch_first=True, dtype=x.dtype)
        names = {"in_proj_weight": "qkv_weight", "in_proj_bias": "qkv_bias"}
        names |= {"out_proj.weight": "out_weight", "out_proj.bias": "out_bias"}
        attention.load_state_dict({theirs: part[ours] for theirs, ours in names.items()})
        query = F.layer_norm(x, (width,), eps=1e-8)
        x = query + attention(query, x, x, attn_mask=later)[0]  # with weights: products that torch counts
        x = F.layer_norm(x, (width,), eps=1e-8)
        hidden = F.relu(F.linear(x, part["ffn_in_weight"], part["ffn_in_bias"]))
        x = x + F.linear(hidden, part["ffn_out_weight"], part["ffn_out_bias"])
        block += 1
    return x
