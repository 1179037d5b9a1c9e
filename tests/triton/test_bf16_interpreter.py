"""The mend of the interpreter's bf16, against torch's bf16; on a GPU the same tests check the hardware."""

import pytest
import torch
import triton
import triton.language as tl

from tests.support.triton_device import DEVICE


@triton.jit
def _arithmetic_kernel(x, y, total, product, quotient, larger, less, N: tl.constexpr):
    place = tl.arange(0, N)
    a, b = tl.load(x + place), tl.load(y + place)
    tl.store(total + place, a + b)
    tl.store(product + place, a * b)
    tl.store(quotient + place, (a.to(tl.float32) / b.to(tl.float32)).to(tl.bfloat16))
    tl.store(larger + place, tl.where(a > b, a, b))
    tl.store(less + place, (a < b).to(tl.int32))


@triton.jit
def _dot_kernel(x, y, out, N: tl.constexpr):
    rows, columns = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    a, b = tl.load(x + rows * N + columns), tl.load(y + rows * N + columns)
    tl.store(out + rows * N + columns, tl.dot(a, b, input_precision="ieee"))


@triton.jit
def _round_kernel(x, out, N: tl.constexpr):
    place = tl.arange(0, N)
    tl.store(out + place, tl.load(x + place).to(tl.bfloat16))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(DEVICE)


def test_sums_products_and_comparisons_are_those_of_bf16() -> None:
    x, y = _random(2, 256)
    total, product, quotient, larger = (torch.empty_like(x) for _ in range(4))
    less = torch.empty(256, dtype=torch.int32, device=DEVICE)
    _arithmetic_kernel[(1,)](x, y, total, product, quotient, larger, less, 256)
    assert torch.equal(total, x + y)
    assert torch.equal(product, x * y)
    assert torch.equal(quotient, x / y)
    assert torch.equal(larger, torch.maximum(x, y))
    assert torch.equal(less, (x < y).int())


def test_a_matrix_product_adds_in_single_precision() -> None:
    x, y = _random(2, 32, 32)
    out = torch.empty(32, 32, device=DEVICE)
    _dot_kernel[(1,)](x, y, out, 32)
    torch.testing.assert_close(out, x.float() @ y.float(), rtol=1e-5, atol=1e-5)


def test_rounding_goes_to_the_nearest_and_ties_to_even() -> None:
    # 1 + k / 256 lies halfway between two neighbours where k is odd
    ties = 1 + torch.arange(8) / 256
    edges = torch.tensor([float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-40, -0.0, 0.1, 2.0**-133])
    x = torch.cat((ties, edges)).to(DEVICE)
    out = torch.empty(16, dtype=torch.bfloat16, device=DEVICE)
    _round_kernel[(1,)](x, out, 16)
    torch.testing.assert_close(out, x.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the hardware has these")
def test_what_is_not_mended_is_refused() -> None:
    @triton.jit
    def exponential(x, N: tl.constexpr):
        place = tl.arange(0, N)
        tl.store(x + place, tl.exp(tl.load(x + place)))

    with pytest.raises(Exception, match="exp|bf16|bfloat16|fp32"):
        exponential[(1,)](_random(16), 16)
