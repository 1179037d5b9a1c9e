"""Dropout in Triton drops what the reference drops."""

import pytest
import torch

from tests.support.close import assert_close
from tests.support.triton_device import DEVICE, DTYPES
from turbogr.ops.dropout import Noise, mask_of
from turbogr.ops.dropout.reference import drop
from turbogr.ops.dropout.triton import drop_triton

ROUNDING = {torch.float32: 1e-7, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 6, 50, 300])
def test_the_same_values_are_dropped_and_the_same_gradients(dtype: torch.dtype, width: int) -> None:
    """Catches: a channel that takes another's draw, a threshold compared as a signed number."""
    for tokens, rate in ((0, 0.5), (1, 0.2), (67, 0.7)):
        generator = torch.Generator().manual_seed(width)
        x = torch.randn(tokens, width, generator=generator).to(dtype).to(DEVICE).requires_grad_()
        users = torch.randint(0, 1 << 32, (tokens,), generator=generator).to(DEVICE)
        positions = torch.randint(0, 1 << 16, (tokens,), generator=generator).to(DEVICE)
        mask = mask_of(rate, Noise((3 << 33) | 5, 11, users, positions), layer=4)
        assert mask is not None
        got, wanted = drop_triton(x, mask), drop(x.double(), mask)
        assert got.dtype == dtype and torch.equal(got == 0, wanted == 0)
        assert_close(got, wanted, ROUNDING[dtype])
        weights = torch.randn(tokens, width, generator=generator).to(dtype).to(DEVICE)
        (dx,) = torch.autograd.grad(got, x, weights)
        assert_close(dx, drop(weights.double(), mask), ROUNDING[dtype])
