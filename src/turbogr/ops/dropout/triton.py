"""Dropout in Triton: the same mask as reference.py, drawn again in the backward instead of kept.

T tokens, D width
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbogr.ops.dropout.reference import Mask, drop
from turbogr.ops.philox.triton import interleaved, key_words, philox_words, signed
from turbogr.ops.triton_support import Configuration, next_power_of_two

CELLS = 2048
"""Values that a program holds of one tensor."""


@triton.jit
def dropout_factors(
    users, positions, tokens, inside, key_low, key_high, step, purpose, least, scale,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """[BLOCK_T, BLOCK_D] scale or 0 for the first channels of `tokens` [BLOCK_T]."""
    user, position = tl.load(users + tokens, mask=inside, other=0), tl.load(positions + tokens, mask=inside, other=0)
    low = (position[:, None] << 16) | tl.arange(0, BLOCK_D // 4)[None, :]
    x0, x1, x2, x3 = philox_words(key_low, key_high, step, purpose, user[:, None], low)
    words = interleaved(x0, x1, x2, x3, BLOCK_T, BLOCK_D // 4)
    return tl.where(words >= least.to(tl.uint32), scale, 0.0)


@triton.jit(do_not_specialize=["tokens", "key_low", "key_high", "step", "purpose", "least"])
def _dropout_kernel(
    x, out, users, positions, tokens, key_low, key_high, step, purpose, least, scale,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    factors = dropout_factors(
        users, positions, t, t < tokens, key_low, key_high, step, purpose, least, scale, BLOCK_T, BLOCK_D
    )
    at, inside = t[:, None] * D + d[None, :], (t < tokens)[:, None] & (d < D)[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * factors
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def mask_words(mask: Mask) -> tuple[int, int, int, int, int, float]:
    """What the kernels take of a mask beside its tokens."""
    return *key_words(mask.key), signed(min(mask.least, 2**32 - 1)), mask.scale


def row_tile(width: int, cells: int = CELLS) -> dict[str, int]:
    """Whole rows of `width`, several of them where they are short."""
    wide = max(4, next_power_of_two(width))
    return {"BLOCK_T": max(1, cells // wide), "BLOCK_D": wide}


class DropoutFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Mask) -> Tensor:
        ctx.mask = mask
        return _dropped(x, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return _dropped(dout, ctx.mask), None


def _dropped(x: Tensor, mask: Mask) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    tokens, width = x.shape
    sizes = row_tile(width)
    if tokens:
        users, positions = mask.users.contiguous(), mask.positions.contiguous()
        grid = (triton.cdiv(tokens, sizes["BLOCK_T"]),)
        _dropout_kernel[grid](x, out, users, positions, tokens, *mask_words(mask), D=width, **sizes)
    return out


def drop_triton(x: Tensor, mask: Mask) -> Tensor:
    if x.dtype == torch.float64:
        # the kernel multiplies in single precision
        return drop(x, mask)
    out: Tensor = DropoutFunction.apply(x, mask)
    return out


MASK_TYPES = {
    "users": "*i64",
    "positions": "*i64",
    "scale": "fp32",
    **dict.fromkeys(("tokens", "key_low", "key_high", "step", "purpose", "least"), "i32"),
}


def configurations() -> list[Configuration]:
    return [
        Configuration(
            name=f"forward and backward, {dtype}, D={width}",
            kernel=_dropout_kernel,
            signature={"x": f"*{dtype}", "out": f"*{dtype}", **MASK_TYPES},
            constants={"D": width, **row_tile(width)},
            num_warps=4,
        )
        for dtype, width in (("fp32", 50), ("bf16", 1024))
    ]
