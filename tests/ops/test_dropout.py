"""Dropout whose mask belongs to the user, not to the place in the batch."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support.close import assert_close
from tests.support.jagged_cases import noise_of
from tests.support.philox import draw
from turbogr.ops.dropout import Noise, dropout, mask_of
from turbogr.ops.dropout.reference import drop

OFFSETS = torch.tensor([0, 4, 4, 11])


def test_a_value_is_dropped_by_the_draw_of_its_user_position_and_channel() -> None:
    """Catches: another address, another threshold, a kept value that is not scaled by 1 / (1 - rate)."""
    noise = noise_of(OFFSETS, seed=7, step=3)
    out = dropout(torch.full((11, 6), 3.0), 0.25, noise, layer=2)
    for token in range(11):
        user, position = int(noise.users[token]), int(noise.positions[token])
        for channel in range(6):
            kept = draw(7, 3, 3, 2, user, position, channel) >= 2**30
            assert float(out[token, channel]) == pytest.approx(4.0 if kept else 0.0)


def test_the_mask_depends_neither_on_order_nor_on_the_batch() -> None:
    """Catches: masks drawn by place, so that balance or accumulation would change a training."""
    noise = noise_of(OFFSETS)
    x = torch.randn(11, 8)
    whole = dropout(x, 0.5, noise, layer=1)
    some = torch.tensor([9, 0, 5])
    part = Noise(noise.seed, noise.step, noise.users[some], noise.positions[some])
    assert torch.equal(dropout(x[some], 0.5, part, layer=1), whole[some])


def test_rate_and_mean_are_what_was_asked_for() -> None:
    """Catches: a keep rate taken for a drop rate, channels or tokens that share draws."""
    offsets = torch.tensor([0, 500, 1000])
    out = dropout(torch.ones(1000, 100), 0.2, noise_of(offsets), layer=0)
    dropped = (out == 0).double()
    assert abs(float(dropped.mean()) - 0.2) < 4 * (0.16 / 1e5) ** 0.5
    assert float(dropped.mean(0).std()) < 2 * (0.16 / 1000) ** 0.5
    assert float(out.max()) == pytest.approx(1.25)


@pytest.mark.parametrize("other", [{"layer": 2}, {"step": 4}, {"seed": 8}])
def test_layers_steps_and_seeds_have_masks_of_their_own(other: dict[str, int]) -> None:
    """Catches: one mask for the whole run."""
    x, layer = torch.ones(11, 8), other.pop("layer", 1)
    assert not torch.equal(dropout(x, 0.5, noise_of(OFFSETS, **other), layer), dropout(x, 0.5, noise_of(OFFSETS), 1))


def test_the_gradient_has_the_mask_and_the_scale_of_the_value() -> None:
    """Catches: a backward with a mask of its own."""
    x = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.3, noise_of(OFFSETS), layer=1)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert_close(out, x * gradient, 1e-12)
    assert set(gradient.unique().tolist()) == {0.0, 1 / 0.7}


def test_evaluation_drops_nothing() -> None:
    x = torch.randn(11, 8)
    assert dropout(x, 0.5, None, layer=1) is x and dropout(x, 0.0, noise_of(OFFSETS), layer=1) is x


@pytest.mark.parametrize("dim", [3, 16, 50, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_mask_is_the_one_of_the_formula(dim: int, dtype: torch.dtype) -> None:
    """Catches: draws of a later Philox block, or of a row's last lanes, at other channels."""
    noise = noise_of(OFFSETS)
    x = (torch.randn(11, dim, generator=torch.Generator().manual_seed(0)) + 3).to(dtype).requires_grad_()
    mask = mask_of(0.25, noise, 2)
    assert mask is not None
    wanted = drop(x.detach(), mask)
    out = dropout(x, 0.25, noise, 2)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert out.dtype == gradient.dtype == dtype
    assert torch.equal(out == 0, wanted == 0) and torch.equal(gradient == 0, wanted == 0)
    assert_close(out, wanted, 1e-2 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_told_by_strided_numbers_drops_the_same(dtype: torch.dtype) -> None:
    """Catches: an assertion without a word, or users and positions read as if they lay one after the other."""
    noise, x = noise_of(OFFSETS), torch.randn(11, 8, dtype=dtype)
    strided = replace(
        noise, users=noise.users.repeat_interleave(2)[::2], positions=noise.positions.expand(2, 11).t()[:, 0]
    )
    assert not strided.users.is_contiguous()
    assert torch.equal(dropout(x, 0.3, strided, layer=1), dropout(x, 0.3, noise, layer=1))


WAYS = {"eager": nullcontext, "watched": lambda: FlopCounterMode(display=False)}
"""As it is called, and as a graph of torch.compile or a dispatch mode calls it."""
SHORT: dict[str, tuple[dict[str, Any], str]] = {
    "users of other tokens": ({"users": torch.arange(3)}, r"noise.users is int64 \[3\], wanted int64 \[11\]"),
    "positions of other tokens": (
        {"positions": torch.arange(12)},
        r"noise.positions is int64 \[12\], wanted int64 \[11\]",
    ),
    "short users": ({"users": torch.arange(11).int()}, r"noise.users is int32 \[11\], wanted int64 \[11\]"),
    "short positions": ({"positions": torch.arange(11).int()}, r"noise.positions is int32 \[11\], wanted int64 \[11\]"),
    "users of two dimensions": (
        {"users": torch.zeros(11, 1).long()},
        r"noise.users is int64 \[11, 1\], wanted int64 \[11\]",
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rate", [0.3, 0.0])
@pytest.mark.parametrize("case", SHORT)
def test_noise_of_other_tokens_is_refused(case: str, rate: float, way: str) -> None:
    """Catches: users and positions read past their end, or integers of 32 bits read as such of 64: another mask."""
    changed, message = SHORT[case]
    call: AbstractContextManager[Any] = WAYS[way]()
    with call, pytest.raises(ValueError, match=message):
        dropout(torch.ones(11, 8), rate, replace(noise_of(OFFSETS), **changed), layer=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("with_noise", [True, False])
@pytest.mark.parametrize("rate", [1.0, 1.5, -0.5, float("nan")])
def test_a_rate_that_is_no_share_below_one_is_refused(rate: float, with_noise: bool, way: str) -> None:
    """Catches: a division by 0, a scale below 0, a threshold that wraps around and drops what it should keep."""
    call: AbstractContextManager[Any] = WAYS[way]()
    with call, pytest.raises(ValueError, match=f"dropout rate is {rate}, wanted at least 0 and less than 1"):
        dropout(torch.ones(11, 8), rate, noise_of(OFFSETS) if with_noise else None, layer=0)


def test_values_that_are_not_tokens_by_channels_are_refused() -> None:
    """Catches: a third dimension taken for an address."""
    with pytest.raises(ValueError, match=r"x is float32 \[11, 2, 4\], wanted \[T, D\]"):
        dropout(torch.ones(11, 2, 4), 0.5, noise_of(OFFSETS), layer=0)
