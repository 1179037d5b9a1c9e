"""HSTU in eager torch as the public research code runs it: GEMMs on the real tokens, attention on padded rows.

    scores = q k^T  [B, H, N, N]   + position bias [N, N] out of a table [2N - 1]   + time bias [B, N, N] by bucket ids
    y = (SiLU(scores) / divisor * causal mask) v

T tokens, B rows, N longest row of the batch, H heads of width d, D = H d
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BUCKETS, BUCKET_WIDTH, EPS = 128, 0.301, 1e-6


@dataclass(frozen=True)
class Padding:
    """Where the tokens of a jagged batch stand in its padded form."""

    cells: Tensor  # int64 [T] row * N + position
    rows: int
    longest: int

    @classmethod
    def of(cls, offsets: Tensor) -> "Padding":
        lengths = offsets.diff()
        longest = int(lengths.max())
        tokens = torch.arange(int(offsets[-1]), device=offsets.device)
        row = torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)
        return cls(row * longest + tokens - offsets[row], len(lengths), longest)

    def pad(self, x: Tensor) -> Tensor:
        """[T, ...] -> [B, N, ...], zeros behind every row."""
        flat = x.new_zeros(self.rows * self.longest, *x.shape[1:])
        return flat.index_copy_(0, self.cells, x).unflatten(0, (self.rows, self.longest))

    def unpad(self, x: Tensor) -> Tensor:
        """[B, N, ...] -> [T, ...]."""
        return x.flatten(0, 1).index_select(0, self.cells)


def extended_times(padding: Padding, times: Tensor, next_times: Tensor) -> Tensor:
    """int64 [B, N + 1]: every row's times, behind its last one the target's, then zeros."""
    extended = times.new_zeros(padding.rows, padding.longest + 1)
    row, place = padding.cells // padding.longest, padding.cells % padding.longest
    extended[row, place + 1] = next_times
    extended[row, place] = times
    return extended


def relative_positions(table: Tensor, length: int) -> Tensor:
    """[N, N] view of a table [2M - 1] whose middle is distance 0: cell (i, j) is the entry of j - i."""
    middle = len(table) // 2
    return table[middle - length + 1 : middle + length].unfold(0, length, 1).flip(0)


def time_buckets(extended: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 [B, N, N]: bucket of the time between the event after i and the event j, the logarithm taken in `dtype`."""
    seconds = (extended[:, 1:].unsqueeze(2) - extended[:, :-1].unsqueeze(1)).abs().clamp(min=1)
    return (torch.log(seconds.to(dtype)) / BUCKET_WIDTH).long().clamp(max=BUCKETS)


def relative_bias(position: Tensor, time: Tensor, extended: Tensor) -> Tensor:
    """[B, N, N]; position [2M - 1], time [BUCKETS + 1]."""
    buckets = time_buckets(extended, time.dtype)
    by_time = torch.index_select(time, 0, buckets.flatten()).view(buckets.shape)
    return relative_positions(position, buckets.shape[1]) + by_time


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, divisor: int) -> Tensor:
    """q, k, v [B, N, H, d] -> [B, N, H, d]."""
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k)
    if bias is not None:
        scores = scores + bias.unsqueeze(1)
    visible = torch.ones(scores.shape[2:], dtype=scores.dtype, device=scores.device).tril()
    return torch.einsum("bhnm,bmhd->bnhd", F.silu(scores) / divisor * visible, v)


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_len: int,
    position: Tensor | None = None,
    time: Tensor | None = None,
    times: Tensor | None = None,
    next_times: Tensor | None = None,
) -> Tensor:
    """From q, k, v [T, H, d] to [T, H, d], padding and the way back included."""
    padding = Padding.of(offsets)
    bias = None
    if position is not None and time is not None and times is not None and next_times is not None:
        bias = relative_bias(position, time, extended_times(padding, times, next_times))
    return padding.unpad(attention(padding.pad(q), padding.pad(k), padding.pad(v), bias, max_len))


class HstuLayer(nn.Module):
    """x + linear(dropout(u * norm(attention(q, k, v)))), [u v q k] = SiLU(norm(x) W)."""

    def __init__(self, dim: int, heads: int, max_len: int, rate: float) -> None:
        super().__init__()
        self.heads, self.max_len, self.rate = heads, max_len, rate
        self.uvqk = nn.Parameter(torch.randn(dim, 4 * dim) * 0.02)
        self.out = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.out.weight)
        self.position = nn.Parameter(torch.randn(2 * max_len - 1) * 0.02)
        self.time = nn.Parameter(torch.randn(BUCKETS + 1) * 0.02)

    def forward(self, x: Tensor, padding: Padding, extended: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        width = x.shape[1:]
        mixed = F.silu(F.layer_norm(x, width, eps=EPS) @ self.uvqk)
        u, v, q, k = mixed.chunk(4, dim=1)
        q, k, v = (padding.pad(part.unflatten(1, (self.heads, -1))) for part in (q, k, v))
        y = attention(q, k, v, relative_bias(self.position, self.time, extended), self.max_len)
        gated = u * F.layer_norm(padding.unpad(y).flatten(1), width, eps=EPS)
        return self.out(F.dropout(gated, self.rate, self.training)) + x
