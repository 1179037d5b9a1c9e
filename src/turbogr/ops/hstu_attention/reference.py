"""HSTU attention row by row, as the formula reads; autograd gives every gradient."""

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Bias:
    """Both relative biases of a layer; a table that is None adds nothing."""

    position: Tensor | None  # [max_len]
    time: Tensor | None  # [buckets + 1]
    times: Tensor | None  # int64 [T]
    next_times: Tensor | None  # int64 [T]
    bucket_width: float


@dataclass(frozen=True)
class Mask:
    """Which token of a row sees which; a row is [context | history | targets]."""

    num_targets: Tensor | None = None  # int64 [B]; None: no row has targets
    num_context: int = 0
    window: int | None = None
    context_sees_history: bool = False

    @property
    def causal_only(self) -> bool:
        return self.num_targets is None and self.num_context == 0 and self.window is None


@functools.cache
def bucket_edges(width: float, buckets: int) -> tuple[int, ...]:
    """The smallest |dt| of each bucket 1 .. buckets: the formula in integers, the same on every device.

    bucket(dt) = how many edges are at most |dt|
    """
    edges = []
    for bucket in range(1, buckets + 1):
        exponent = width * bucket
        if exponent >= math.log(INT64_MAX):
            edges.append(INT64_MAX)
            continue
        edge = max(math.floor(math.exp(exponent)), 1)
        while edge > 1 and math.log(edge - 1) / width >= bucket:
            edge -= 1
        while math.log(edge) / width < bucket:
            edge += 1
        edges.append(edge)
    return tuple(edges)


def time_bucket(differences: Tensor, width: float, buckets: int) -> Tensor:
    """Bucket of every time difference in seconds, int32."""
    edges = torch.tensor(bucket_edges(width, buckets), dtype=torch.int64, device=differences.device)
    return torch.bucketize(differences.abs(), edges, out_int32=True, right=True)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias, mask: Mask) -> Tensor:
    bounds = offsets.tolist()
    targets = [0] * (len(bounds) - 1) if mask.num_targets is None else mask.num_targets.tolist()
    rows = [
        _attend_row(q[start:stop], k[start:stop], v[start:stop], slice(start, stop), max_len, bias, mask, count)
        for start, stop, count in zip(bounds, bounds[1:], targets, strict=False)
    ]
    return torch.cat([v[:0], *rows])


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias, mask: Mask) -> Tensor:
    """`attend_reference` without a graph, for those who call a backend's kernels themselves."""
    with torch.no_grad():
        return attend_reference(q, k, v, offsets, max_len, bias, mask)


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
    """Write the gradients of q, k and v into dq, dk and dv; answer those of the position and the time table."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    position, time = (None if x is None else x.detach().requires_grad_() for x in (bias.position, bias.time))
    tables = [x for x in (position, time) if x is not None]
    with torch.enable_grad():
        y = attend_reference(q, k, v, offsets, max_len, replace(bias, position=position, time=time), mask)
    found = iter(torch.autograd.grad(y, (q, k, v, *tables), dy, allow_unused=True, materialize_grads=True))
    for out in (dq, dk, dv):
        out.copy_(next(found))
    return None if position is None else next(found), None if time is None else next(found)


def _attend_row(
    q: Tensor, k: Tensor, v: Tensor, row: slice, max_len: int, bias: Bias, mask: Mask, targets: int
) -> Tensor:
    sees, biased, steps = row_pattern(len(q), targets, mask, q.device)
    scores = torch.einsum("ihd,jhd->hij", q, k)  # [H, L, L]
    if bias.position is not None:
        scores = scores + bias.position[steps] * biased
    if bias.time is not None:
        assert bias.times is not None and bias.next_times is not None
        differences = bias.next_times[row].unsqueeze(1) - bias.times[row]
        scores = scores + bias.time[time_bucket(differences, bias.bucket_width, len(bias.time) - 1)] * biased
    weights = torch.where(sees, torch.nn.functional.silu(scores), 0.0) / max_len
    return torch.einsum("hij,jhd->ihd", weights.to(v.dtype), v)


def row_pattern(length: int, targets: int, mask: Mask, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """What the pairs (i, j) of one row are: seen, biased, and their distance i - j in the history, each [L, L].

    Positions count from the first history token; every target stands at the history's length.
    """
    place = torch.arange(length, device=device)
    in_context, is_target = place < mask.num_context, place >= length - targets
    position = (place.clamp(max=length - targets) - mask.num_context).clamp(min=0)
    i, j = place.unsqueeze(1), place
    steps = (position.unsqueeze(1) - position).clamp(min=0)
    sees = (i >= j) & ((i == j) | ~is_target)
    if mask.window is not None:
        sees &= steps < mask.window
    from_context = ~is_target if mask.context_sees_history else torch.zeros_like(is_target)
    sees = torch.where(in_context.unsqueeze(1), from_context, sees) | in_context
    return sees, ~(in_context.unsqueeze(1) | in_context), steps
