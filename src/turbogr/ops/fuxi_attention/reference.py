"""FuXi attention row by row, as the formula reads; autograd gives every gradient."""

from dataclasses import dataclass

import torch
from torch import Tensor

from turbogr.ops.hstu_attention.reference import Mask, row_pattern, time_bucket

LARGEST_EXPONENT = 40.0
"""T ** beta stops at e ** 40: gamma to that power is 0 in single precision already, and its gradient stays finite."""


@dataclass(frozen=True)
class Maps:
    """What the position and the time channel are made of; a channel that has nothing is left out."""

    position: Tensor | None  # [max_len]
    time: Tensor | None  # [buckets + 1]
    decay: Tensor | None  # [3] alpha, beta, gamma
    times: Tensor | None  # int64 [T]
    next_times: Tensor | None  # int64 [T]
    bucket_width: float

    @property
    def has_time(self) -> bool:
        return self.time is not None or self.decay is not None

    @property
    def channels(self) -> int:
        return 1 + (self.position is not None) + self.has_time


def time_decay(differences: Tensor, decay: Tensor) -> Tensor:
    """alpha * gamma ** (T ** beta) of every time difference T = |dt| in seconds; alpha where T is 0."""
    alpha, beta, gamma = decay.to(wide(decay.dtype)).unbind()
    seconds = differences.abs()
    # T is whole: where it is not 0 its logarithm is finite and at least 0
    exponent = (beta * seconds.clamp(min=1).to(alpha.dtype).log()).clamp(max=LARGEST_EXPONENT)
    power = torch.where(seconds > 0, exponent.exp(), 0.0)
    return alpha * (power * gamma.log()).exp()


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums are made in: single precision for the half types."""
    return torch.promote_types(dtype, torch.float32)


def attend_reference(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask) -> Tensor:
    bounds = offsets.tolist()
    targets = [0] * (len(bounds) - 1) if mask.num_targets is None else mask.num_targets.tolist()
    rows = [
        _attend_row(q[start:stop], k[start:stop], v[start:stop], slice(start, stop), max_len, maps, mask, count)
        for start, stop, count in zip(bounds, bounds[1:], targets, strict=False)
    ]
    return torch.cat([torch.stack([v[:0]] * maps.channels, dim=1), *rows])


def _attend_row(
    q: Tensor, k: Tensor, v: Tensor, row: slice, max_len: int, maps: Maps, mask: Mask, targets: int
) -> Tensor:
    sees, mapped, steps = row_pattern(len(q), targets, mask, q.device)
    exact = wide(v.dtype)
    values = v.to(exact)

    def channel(weights: Tensor) -> Tensor:
        """[L, L] weights of all heads -> [L, H, dv]; pairs with context have none."""
        return torch.einsum("ij,jhd->ihd", torch.where(sees & mapped, weights, 0.0).to(exact), values)

    channels = []
    if maps.position is not None:
        channels.append(channel(maps.position[steps]))
    if maps.has_time:
        assert maps.times is not None and maps.next_times is not None
        differences = maps.next_times[row].unsqueeze(1) - maps.times[row]
        if maps.decay is not None:
            channels.append(channel(time_decay(differences, maps.decay)))
        if maps.time is not None:
            channels.append(channel(maps.time[time_bucket(differences, maps.bucket_width, len(maps.time) - 1)]))
    scores = torch.einsum("ihd,jhd->hij", q.to(exact), k.to(exact))  # [H, L, L]
    semantic = torch.where(sees, torch.nn.functional.silu(scores), 0.0) / max_len
    channels.append(torch.einsum("hij,jhd->ihd", semantic, values))
    return torch.stack(channels, dim=1).to(v.dtype)  # [L, C, H, dv]
