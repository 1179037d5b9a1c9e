"""HSTU attention row by row, as the formula reads; autograd gives every gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Bias:
    """Both relative biases of a layer; a table that is None adds nothing."""

    position: Tensor | None  # [max_len]
    time: Tensor | None  # [buckets + 1]
    times: Tensor | None  # int64 [T]
    next_times: Tensor | None  # int64 [T]
    bucket_width: float


def time_bucket(differences: Tensor, width: float, buckets: int) -> Tensor:
    """Bucket of every time difference in seconds.

    Dividing by the width, not multiplying by its inverse, keeps edge cells where the formula puts them in fp32.
    """
    return differences.abs().clamp_(min=1).float().log_().div_(width).int().clamp_(max=buckets)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias) -> Tensor:
    bounds = offsets.tolist()
    rows = [
        _attend_row(q[start:stop], k[start:stop], v[start:stop], slice(start, stop), max_len, bias)
        for start, stop in zip(bounds, bounds[1:], strict=False)
    ]
    return torch.cat([v.new_zeros(0, *v.shape[1:]), *rows])


def _attend_row(q: Tensor, k: Tensor, v: Tensor, row: slice, max_len: int, bias: Bias) -> Tensor:
    length = len(q)
    scores = torch.einsum("ihd,jhd->hij", q, k)  # [H, L, L]
    steps = torch.arange(length, device=q.device)
    if bias.position is not None:
        scores = scores + bias.position[(steps.unsqueeze(1) - steps).clamp(min=0)]
    if bias.time is not None:
        assert bias.times is not None and bias.next_times is not None
        differences = bias.next_times[row].unsqueeze(1) - bias.times[row]
        scores = scores + bias.time[time_bucket(differences, bias.bucket_width, len(bias.time) - 1)]
    weights = torch.nn.functional.silu(scores).tril() / max_len
    return torch.einsum("hij,jhd->ihd", weights.to(v.dtype), v)
