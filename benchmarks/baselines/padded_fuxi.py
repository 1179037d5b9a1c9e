"""FuXi's three channels in eager torch as the public research code runs them: maps and scores of whole padded rows.

    position [N, N] out of a table [2M - 1], time [B, N, N] by bucket ids, semantic SiLU(q k^T) / divisor [B, H, N, N]
    y[channel] = (map * causal mask) v

T tokens, B rows, N longest row of the batch, H heads of width d, C channels
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.baselines.padded_hstu import Padding, extended_times, relative_positions, time_buckets


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_len: int,
    position: Tensor,
    time: Tensor,
    times: Tensor,
    next_times: Tensor,
) -> Tensor:
    """From q, k, v [T, H, d] to [T, C, H, d], position, time, semantic; padding and the way back included."""
    padding = Padding.of(offsets)
    buckets = time_buckets(extended_times(padding, times, next_times), time.dtype)
    by_time = torch.index_select(time, 0, buckets.flatten()).view(buckets.shape)
    q, k, v = padding.pad(q), padding.pad(k), padding.pad(v)
    visible = torch.ones(padding.longest, padding.longest, dtype=v.dtype).tril()
    by_position = relative_positions(position, padding.longest)
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k)
    channels = (
        torch.einsum("nm,bmhd->bnhd", by_position * visible, v),
        torch.einsum("bnm,bmhd->bnhd", by_time * visible, v),
        torch.einsum("bhnm,bmhd->bnhd", F.silu(scores) / max_len * visible, v),
    )
    return padding.unpad(torch.stack(channels, dim=2))
