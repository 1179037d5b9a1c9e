"""The HSTU layer's Triton passes against those in torch in double precision, and the layer put together from them."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.close import assert_close
from tests.support.jagged_cases import noise_of
from tests.support.triton_device import DEVICE, DTYPES, TOLERANCES
from turbogr.jagged import offsets_of
from turbogr.ops.dropout import Noise, mask_of
from turbogr.ops.dropout.reference import Mask
from turbogr.ops.hstu_layer import fused, hstu_layer
from turbogr.ops.hstu_layer import triton as passes

WIDTHS = [1, 6, 50, 130]
TOKENS = 37


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, shift: float = 0.0) -> Tensor:
    """Values that every type holds exactly."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) + shift
    return made.to(torch.bfloat16).to(dtype).to(DEVICE)


def mask() -> Mask:
    offsets = offsets_of(torch.tensor([0, 20, 0, 17]))
    noise = noise_of(offsets)
    found = mask_of(0.3, Noise(noise.seed, noise.step, noise.users.to(DEVICE), noise.positions.to(DEVICE)), layer=2)
    assert found is not None
    return found


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pass_is_that_of_torch(dtype: torch.dtype, width: int) -> None:
    """Catches: a lane beyond the row that counts in a mean, a part of z taken for another, a mask drawn anew."""
    tolerance = TOLERANCES[dtype]
    x, dout = random(TOKENS, width, seed=1, shift=2.0), random(TOKENS, width, seed=2)
    z, dz = random(TOKENS, 4 * width, dtype=dtype, seed=3), random(TOKENS, 4 * width, dtype=dtype, seed=4)
    y, dg = random(TOKENS, width, dtype=dtype, seed=5), random(TOKENS, width, dtype=dtype, seed=6)
    bias = random(width, seed=7)
    # the norm of a single value is 0 / sqrt(eps): nothing to compare
    if width > 1:
        assert_close(passes.norm(x, dtype), fused.norm(x.double(), torch.float64), tolerance, "norm")
        got = passes.norm_backward(x, dg, dout)
        assert got.dtype == torch.float32
        assert_close(got, fused.norm_backward(x.double(), dg.double(), dout.double()), tolerance, "norm backward")
    assert_close(passes.activate(z), fused.activate(z.double()), tolerance, "activate")
    got, wanted = dz.clone(), dz.double()
    passes.activate_backward(z, got)
    fused.activate_backward(z.double(), wanted)
    assert_close(got, wanted, tolerance, "activate backward")
    assert torch.equal(got[:, :width], dz[:, :width])
    total = x.double() + dg.double() + bias.double()
    assert_close(passes.column_sums(x), x.double().sum(0), 1e-6, "sums")
    assert_close(passes.residual(x, dg.clone(), bias), total, tolerance, "residual")
    for dropout in (None, mask()):
        if width > 1:
            check_gate(z, y, dg, dz, dropout, tolerance)


def check_gate(z: Tensor, y: Tensor, dg: Tensor, dz: Tensor, dropout: Mask | None, tolerance: float) -> None:
    wanted = fused.gate(z.double(), y.double(), dropout)
    assert_close(passes.gate(z, y, dropout), wanted, tolerance, "gate")
    got_dz, wanted_dz = dz.clone(), dz.double()
    dy, gated = passes.gate_backward(dg.clone(), z, y, dropout, got_dz)
    wanted_dy, wanted_gated = fused.gate_backward(dg.double(), z.double(), y.double(), dropout, wanted_dz)
    assert_close(gated, wanted_gated, tolerance, "gate again")
    assert_close(dy, wanted_dy, 4 * tolerance, "dy")
    assert_close(got_dz, wanted_dz, tolerance, "dz")


def test_no_token_is_taken() -> None:
    z, x = random(0, 24), random(0, 6)
    assert passes.norm(x, torch.float32).shape == x.shape and passes.activate(z).shape == (0, 18)
    assert passes.gate(z, x, None).shape == x.shape


@pytest.mark.parametrize("recompute", [False, True])
def test_the_layer_is_the_references(recompute: bool) -> None:
    """Catches: passes that do not fit together, strides that the attention does not get."""
    lengths, width = [9, 0, 1, 20], 24
    offsets = offsets_of(torch.tensor(lengths)).to(DEVICE)
    tokens = sum(lengths)
    leaves = [
        random(tokens, width, seed=1),
        random(width, 4 * width, seed=2) / 5,
        random(width, width, seed=3) / 5,
        random(width, seed=4),
        random(32, seed=5),
        random(129, seed=6),
    ]
    weights = random(tokens, width, seed=7)
    times = (torch.arange(tokens) ** 3).to(DEVICE)
    noise = noise_of(offsets.cpu())
    noise = replace(noise, users=noise.users.to(DEVICE), positions=noise.positions.to(DEVICE))

    def run(dtype: torch.dtype, backend: str) -> list[Tensor]:
        own = [leaf.to(dtype).detach().requires_grad_() for leaf in leaves]
        out = hstu_layer(
            own[0], offsets, *own[1:4], heads=2, max_len=32, position_bias=own[4], time_bias=own[5], times=times,
            next_times=times + 100, dropout=0.3, noise=noise, layer=2, recompute=recompute, backend=backend,
        )  # fmt: skip
        return [out, *torch.autograd.grad((out * weights.to(dtype)).sum(), own)]

    for got, wanted in zip(run(torch.float32, "triton"), run(torch.float64, "reference"), strict=True):
        assert_close(got, wanted, 1e-5)
