"""The encoders' input: the compiled passes against the formula."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

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


WAYS = {"eager": nullcontext, "watched": lambda: FlopCounterMode(display=False)}
"""As it is called, and as a graph of torch.compile or a dispatch mode calls it."""
NUMBERS = torch.tensor([0, 1, 2])
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "x of one dimension": ({"x": torch.zeros(3)}, r"x is float32 \[3\], wanted \[T, D\]"),
    "a table of another width": ({"table": torch.zeros(9, 7)}, r"table is float32 \[9, 7\], wanted \[max_len, 8\]"),
    "a position missing": ({"positions": NUMBERS[:2]}, r"positions is int64 \[2\], wanted int64 \[3\]"),
    "short positions": ({"positions": NUMBERS.int()}, r"positions is int32 \[3\], wanted int64 \[3\]"),
    "a position past the table": (
        {"positions": NUMBERS * 5},
        r"positions\[2\] is 10, wanted at least 0 and less than 9",
    ),
    "a position before the table": (
        {"positions": -NUMBERS},
        r"positions\[2\] is -2, wanted at least 0 and less than 9",
    ),
    "noise of other tokens": ({"noise": Noise(1, 2, NUMBERS[:2], NUMBERS[:2])}, r"noise.users is int64 \[2\], wanted"),
    "short users": ({"noise": Noise(1, 2, NUMBERS.int(), NUMBERS)}, r"noise.users is int32 \[3\], wanted int64 \[3\]"),
    "a rate of one": ({"dropout": 1.0}, "dropout rate is 1.0, wanted at least 0 and less than 1"),
}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_its_name(case: str, way: str, backend: str | None) -> None:
    """Catches: memory beside the table read, and written by the backward, for a position that it does not have; a
    position counted from the table's end; users of 32 bits read as such of 64."""
    changed, message = REFUSED[case]
    x = {
        "x": torch.zeros(3, 8),
        "table": torch.zeros(9, 8),
        "positions": NUMBERS,
        "dropout": 0.5,
        "noise": Noise(1, 2, NUMBERS, NUMBERS),
    }
    call: AbstractContextManager[Any] = WAYS[way]()
    with call, pytest.raises(ValueError, match=message):
        position_input(**x | changed, backend=backend)
