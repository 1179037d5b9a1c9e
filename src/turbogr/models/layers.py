"""What encoders share: the description of a jagged batch, reproducible initial values, the input layer.

T tokens, B rows, D width
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from turbogr.ops.dropout import Noise
from turbogr.ops.hstu_attention.reference import Mask
from turbogr.ops.philox import Key, Purpose, normal_rows, uniform_rows
from turbogr.ops.position_input import position_input


@dataclass(frozen=True)
class Sequences:
    """Where and when the tokens of a jagged batch stand, and who sees whom."""

    offsets: Tensor  # int64 [B+1]
    positions: Tensor  # int64 [T], 0 for the oldest visible event
    times: Tensor  # int64 [T] seconds
    next_times: Tensor  # int64 [T] seconds of the event after it; of the last one: of the target, or now
    noise: Noise | None  # for dropout; None evaluates
    mask: Mask = Mask()  # targets, context, window; nothing of it: causal


class Encoder(Protocol):
    """Jagged tokens in, jagged tokens out; no ranks, no loss."""

    def __call__(self, x: Tensor, sequences: Sequences) -> Tensor: ...


class Initial:
    """Initial values as a pure function of (seed, how many tensors came before, place in the tensor)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._made = 0

    def normal(self, *shape: int, std: float, bound: float = 0.0) -> nn.Parameter:
        """Normal with deviation std, cut at +-bound deviations where bound > 0."""
        rows, dim = self._rows(shape)
        return nn.Parameter(normal_rows(self._key(), rows, dim, std, bound).view(shape))

    def uniform(self, *shape: int, edge: float) -> nn.Parameter:
        rows, dim = self._rows(shape)
        return nn.Parameter(uniform_rows(self._key(), rows, dim, edge).view(shape))

    def xavier_normal(self, *shape: int) -> nn.Parameter:
        return self.normal(*shape, std=math.sqrt(2.0 / sum(shape)))

    def xavier_uniform(self, *shape: int) -> nn.Parameter:
        return self.uniform(*shape, edge=math.sqrt(6.0 / sum(shape)))

    def zeros(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape))

    def _key(self) -> Key:
        self._made += 1
        return Key(self._seed, 0, Purpose.PARAMETERS, self._made)

    @staticmethod
    def _rows(shape: tuple[int, ...]) -> tuple[Tensor, int]:
        return torch.arange(shape[0] if len(shape) > 1 else 1), shape[-1]


class PositionInput(nn.Module):
    """Item embedding * sqrt(D) + learned position, then dropout."""

    def __init__(self, table: nn.Parameter, rate: float) -> None:
        super().__init__()
        self.table = table  # [max_len, D]
        self.rate = rate

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        return position_input(x, self.table, sequences.positions, dropout=self.rate, noise=sequences.noise)


def norm(x: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last dimension, without affine parameters."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
