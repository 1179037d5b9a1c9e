"""Jagged batches for the attention tests: row lengths that hypothesis varies, and inputs made from them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from turbogr.jagged import offsets_of, position_in_row, row_of_token
from turbogr.ops.dropout import Noise

LONG = 70


@st.composite
def row_lengths(draw: st.DrawFn) -> list[int]:
    """No row, empty rows, rows of one token, and sometimes one row much longer than the others."""
    lengths = draw(st.lists(st.one_of(st.sampled_from((0, 1)), st.integers(2, 24)), max_size=7))
    if draw(st.booleans()):
        lengths.insert(draw(st.integers(0, len(lengths))), LONG)
    return lengths


@dataclass(frozen=True)
class Case:
    """Inputs of an attention operator: q, k, v [T, H, d] are parts of one leaf, bias tables are leaves."""

    fused: Tensor  # [T, H, 2 dqk + dv]
    dims: tuple[int, int]  # dqk, dv
    offsets: Tensor
    times: Tensor
    next_times: Tensor
    position: Tensor | None  # [max_len]
    time: Tensor | None  # [129]
    weights: Tensor  # [T, H, dv]: the loss is sum(weights * y)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of the fused buffer: none is contiguous."""
        dqk, dv = self.dims
        q, k, v = torch.split(self.fused, [dqk, dqk, dv], dim=2)
        return q, k, v

    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (self.fused, self.position, self.time) if leaf is not None]

    def to(self, dtype: torch.dtype) -> "Case":
        """The same numbers as fresh leaves of another type."""
        fused, weights = _leaf(self.fused, dtype), self.weights.to(dtype)
        position = None if self.position is None else _leaf(self.position, dtype)
        time = None if self.time is None else _leaf(self.time, dtype)
        return replace(self, fused=fused, weights=weights, position=position, time=time)


def make_case(
    lengths: list[int],
    *,
    seed: int = 0,
    heads: int = 2,
    dims: tuple[int, int] = (4, 4),
    max_len: int = 80,
    span: int = 10**8,
    in_order: bool = True,
    biases: tuple[bool, bool] = (True, True),
) -> Case:
    """A float64 case; the values are such as fp32 holds exactly, so that both types see the same inputs."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).double()

    times = torch.randint(0, span, (tokens,), generator=generator)
    next_times = torch.randint(0, span, (tokens,), generator=generator)
    if in_order:
        times = times.sort().values
        next_times = torch.cat((times[1:], times[-1:] + 1000))
    return Case(
        fused=normal(tokens, heads, 2 * dims[0] + dims[1]).requires_grad_(),
        dims=dims,
        offsets=offsets_of(torch.tensor(lengths, dtype=torch.int64)),
        times=times,
        next_times=next_times,
        position=normal(max_len).requires_grad_() if biases[0] else None,
        time=normal(129).requires_grad_() if biases[1] else None,
        weights=normal(tokens, heads, dims[1]),
    )


def values_and_gradients(attend: Callable[[Case], Tensor], case: Case) -> list[Tensor]:
    """The output, then the gradient of every leaf; zeros where a batch without rows leaves no graph."""
    y = attend(case)
    if not y.requires_grad:
        return [y.detach(), *(torch.zeros_like(leaf) for leaf in case.leaves())]
    loss = (y * case.weights).sum()
    return [y.detach(), *torch.autograd.grad(loss, case.leaves(), materialize_grads=True)]


def noise_of(offsets: Tensor, *, seed: int = 7, step: int = 3, numbers: Tensor | None = None) -> Noise:
    """The noise of a batch whose row b is user numbers[b] of the global step."""
    tokens = int(offsets[-1])
    numbers = torch.arange(len(offsets) - 1) if numbers is None else numbers
    return Noise(seed, step, numbers[row_of_token(offsets, tokens)], position_in_row(offsets, tokens))


def _leaf(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.detach().to(dtype).requires_grad_()
