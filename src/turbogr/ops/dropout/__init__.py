"""Dropout whose mask is a pure function of (seed, step, layer, user, position, channel).

out[t, c] = x[t, c] / (1 - rate)   where the draw of (t, c) is at least rate * 2^32, else 0
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_whole_numbers, kind
from turbogr.ops.dropout.cpu import drop_cpu
from turbogr.ops.dropout.reference import Mask, drop
from turbogr.ops.graph_operator import GraphOperator, watched
from turbogr.ops.philox import Key, Purpose
from turbogr.ops.registry import Backend, register
from turbogr.ops.triton_support import late, rejects_triton

OPERATOR = register(
    "dropout",
    Backend("triton", late("turbogr.ops.dropout.triton", "drop_triton"), rejects_triton),
    Backend("cpu", drop_cpu, native.rejects("dropout")),
    Backend("reference", drop),
)


@dataclass(frozen=True)
class Noise:
    """Where the tokens of a batch stand, for every mask of one training step. Evaluation passes None in its place."""

    seed: int
    step: int
    users: Tensor
    """[T] number of the token's user in the global step."""
    positions: Tensor
    """[T] position in the user's row."""

    def key(self, purpose: Purpose, layer: int) -> Key:
        return Key(self.seed, self.step, purpose, layer)


def check_noise(rate: float, noise: Noise | None, tokens: int) -> None:
    """Refuse a rate outside [0, 1) and noise that is not of `tokens` tokens. For what takes noise, before mask_of."""
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"The dropout rate is {rate}, wanted at least 0 and less than 1.")
    if noise is not None:
        check_whole_numbers("noise.users", noise.users, tokens)
        check_whole_numbers("noise.positions", noise.positions, tokens)


def mask_of(rate: float, noise: Noise | None, layer: int) -> Mask | None:
    """The mask of one layer; None where nothing is dropped."""
    if noise is None or rate == 0.0:
        return None
    # the compiled operators read whole numbers one after the other
    return Mask(noise.key(Purpose.DROPOUT, layer), rate, noise.users.contiguous(), noise.positions.contiguous())


def dropout(x: Tensor, rate: float, noise: Noise | None, layer: int) -> Tensor:
    """x [T, D] with each value dropped with probability `rate`; unchanged where `noise` is None (evaluation).

    Example:
        >>> noise = Noise(seed=0, step=0, users=torch.tensor([0, 0, 1]), positions=torch.tensor([0, 1, 0]))
        >>> out = dropout(torch.ones(3, 8), 0.5, noise, layer=0)
        >>> out.unique().tolist()
        [0.0, 2.0]
    """
    if x.dim() != 2:
        raise ValueError(f"x is {kind(x)}, wanted [T, D].")
    check_noise(rate, noise, len(x))
    mask = mask_of(rate, noise, layer)
    if mask is None:
        return x
    if watched():
        return GRAPH_OPERATOR(x, mask)
    return _dropped(x, mask)


def _dropped(x: Tensor, mask: Mask) -> Tensor:
    backend, _ = OPERATOR.pick(x.device)
    out: Tensor = backend.run(x, mask)
    return out


def _graph_forward(x: Tensor, mask: Mask) -> list[Tensor]:
    return [_dropped(x, mask)]


def _graph_backward(dout: Tensor, kept: list[Tensor], mask: Mask) -> list[Tensor | None]:
    return [_dropped(dout, mask)]


GRAPH_OPERATOR = GraphOperator(
    "dropout",
    _graph_forward,
    _graph_backward,
    fake=lambda x, mask: [torch.empty(x.shape, dtype=x.dtype, device=x.device)],
    gradients=("x",),
)
