"""Both attentions pair by pair in plain Python: who sees whom, from where and when, told from the words of the docs.

Slow and obvious. Nothing here is shared with the package. A row is [context | history | targets]; H heads
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """What the tokens of one row are."""

    length: int
    targets: int = 0
    context: int = 0
    window: int | None = None
    context_sees_history: bool = False

    def kind(self, place: int) -> str:
        if place < self.context:
            return "context"
        return "target" if place >= self.length - self.targets else "history"

    def position(self, place: int) -> int:
        """0 for the first history token; every target stands right behind the history."""
        return min(place, self.length - self.targets) - self.context

    def sees(self, i: int, j: int) -> bool:
        reader, read = self.kind(i), self.kind(j)
        if read == "context":
            return True
        if reader == "context":
            return read == "history" and self.context_sees_history
        if read == "target":
            return i == j
        near = self.window is None or self.position(i) - self.position(j) < self.window
        return near and (reader == "target" or j <= i)

    def relative(self, i: int, j: int) -> bool:
        """Whether distance and time difference mean anything between the two."""
        return "context" not in (self.kind(i), self.kind(j))


@dataclass(frozen=True)
class Inputs:
    """q, k [T, H, dqk], v [T, H, dv]; both tables may be absent; decay (alpha, beta, gamma) in place of `time`."""

    q: Tensor
    k: Tensor
    v: Tensor
    times: list[int]
    next_times: list[int]
    max_len: int
    position: Tensor | None
    time: Tensor | None
    decay: Tensor | None = None
    width: float = 0.301

    def time_entry(self, i: int, j: int) -> Tensor:
        seconds = abs(self.next_times[i] - self.times[j])
        if self.time is not None:
            return self.time[min(math.floor(math.log(max(seconds, 1)) / self.width), len(self.time) - 1)]
        assert self.decay is not None
        alpha, beta, gamma = self.decay
        return alpha * gamma ** (seconds**beta) if seconds else alpha


def hstu(inputs: Inputs, rows: list[Row]) -> Tensor:
    """[T, H, dv]."""
    return _over_rows(_hstu_token, inputs, rows, inputs.v.shape[1:])


def fuxi(inputs: Inputs, rows: list[Row]) -> Tensor:
    """[T, C, H, dv]: position, time, semantic."""
    count = 1 + (inputs.position is not None) + (inputs.time is not None or inputs.decay is not None)
    return _over_rows(_fuxi_token, inputs, rows, torch.Size((count, *inputs.v.shape[1:])))


def _over_rows(token, inputs: Inputs, rows: list[Row], shape: torch.Size) -> Tensor:  # type: ignore[no-untyped-def]
    outs, start = [], 0
    for row in rows:
        outs += [token(inputs, row, start, i) for i in range(row.length)]
        start += row.length
    return torch.stack(outs) if outs else inputs.v.new_zeros(0, *shape)


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _hstu_token(inputs: Inputs, row: Row, start: int, i: int) -> Tensor:
    y = torch.zeros_like(inputs.v[start])
    for j in range(row.length):
        if not row.sees(i, j):
            continue
        score = (inputs.q[start + i] * inputs.k[start + j]).sum(-1)  # [H]
        if row.relative(i, j) and inputs.position is not None:
            score = score + inputs.position[row.position(i) - row.position(j)]
        if row.relative(i, j) and inputs.time is not None:
            score = score + inputs.time_entry(start + i, start + j)
        y = y + (_silu(score) / inputs.max_len).unsqueeze(-1) * inputs.v[start + j]
    return y


def _fuxi_token(inputs: Inputs, row: Row, start: int, i: int) -> Tensor:
    seen = [j for j in range(row.length) if row.sees(i, j)]
    nothing = torch.zeros_like(inputs.v[start])
    channels = []
    if inputs.position is not None:
        entries = [
            inputs.position[row.position(i) - row.position(j)] * inputs.v[start + j] for j in seen if row.relative(i, j)
        ]
        channels.append(sum(entries, nothing))
    if inputs.time is not None or inputs.decay is not None:
        entries = [inputs.time_entry(start + i, start + j) * inputs.v[start + j] for j in seen if row.relative(i, j)]
        channels.append(sum(entries, nothing))
    scores = [(inputs.q[start + i] * inputs.k[start + j]).sum(-1) for j in seen]
    weighted = [
        (_silu(s) / inputs.max_len).unsqueeze(-1) * inputs.v[start + j] for s, j in zip(scores, seen, strict=True)
    ]
    channels.append(sum(weighted, nothing))
    return torch.stack(channels)
