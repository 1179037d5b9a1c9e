"""The encoders' input: the compiled passes against the formula."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.close import assert_close
from tests.support.jagged_cases import noise_of, row_lengths
from turbogr.jagged import offsets_of
from turbogr.ops.dropout import Noise
from turbogr.ops.position_input import position_input


def run(lengths: list[int], dim: int, rate: float, dtype: torch.dtype, backend: str | None = None) -> list[Tensor]:
    """The output and the gradients of x and of the table."""
    generator = torch.Generator().manual_seed(0)
    noise: Noise = noise_of(offsets_of(torch.tensor(lengths, dtype=torch.int64)))
    tokens = len(noise.positions)
    x, table, weights = (torch.randn(rows, dim, generator=generator).to(dtype) for rows in (tokens, 80, tokens))
    x.requires_grad_(), table.requires_grad_()
    out = position_input(x, table, noise.positions, dropout=rate, noise=noise, backend=backend)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), (x, table))]


@given(lengths=row_lengths(), dim=st.sampled_from((1, 16, 50, 70)), rate=st.sampled_from((0.0, 0.4)))
@example([], 16, 0.4)
def test_single_precision_agrees_with_the_formula(lengths: list[int], dim: int, rate: float) -> None:
    """Catches: another scale or mask, a position whose gradient misses a token or a lane."""
    for got, wanted in zip(
        run(lengths, dim, rate, torch.float32), run(lengths, dim, rate, torch.float64, "reference"), strict=True
    ):
        assert_close(got, wanted, 1e-6)


def test_double_precision_stays_double() -> None:
    both = run([5, 8], 6, 0.4, torch.float64), run([5, 8], 6, 0.4, torch.float64, "reference")
    assert all(map(torch.equal, *both))


def test_threads_change_no_bit() -> None:
    """Catches: gradients of one position that are added in the order of the threads."""
    once = run([70] * 30, 50, 0.4, torch.float32)
    torch.set_num_threads(2)
    assert all(map(torch.equal, once, run([70] * 30, 50, 0.4, torch.float32)))


def test_a_table_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"x \[3, 8\], table \[9, 7\] and positions \[3\] do not fit"):
        position_input(torch.zeros(3, 8), torch.zeros(9, 7), torch.zeros(3, dtype=torch.int64))
