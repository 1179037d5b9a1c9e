"""Dropout compiled: the same mask as reference.py, drawn again in the backward instead of kept."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.dropout.reference import Mask, drop
from turbogr.ops.native import address, function

COMPILED = (torch.float32, torch.bfloat16)


class Drawn(ctypes.Structure):
    """struct Dropout of dropout.h."""

    _fields_ = (
        ("seed", c_uint64),
        ("step", c_uint32),
        ("purpose", c_uint32),
        ("least", c_uint32),
        ("scale", c_float),
        ("users", c_void_p),
        ("positions", c_void_p),
    )

    @classmethod
    def of(cls, mask: Mask | None) -> "Drawn":
        """For a call that `mask` outlives; None drops nothing."""
        if mask is None:
            return cls(scale=1.0)
        assert mask.users.is_contiguous() and mask.positions.is_contiguous()
        key, least = mask.key, min(mask.least, 2**32 - 1)
        purpose = int(key.purpose) << 24 | key.layer
        return cls(key.seed, key.step, purpose, least, mask.scale, address(mask.users), address(mask.positions))


@functools.cache
def _dropout() -> Callable[..., Any]:
    return function("dropout", "dropout", c_int, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int)


def drop_cpu(x: Tensor, mask: Mask) -> Tensor:
    if x.dtype not in COMPILED:
        return drop(x, mask)
    out: Tensor = DropoutFunction.apply(x, mask)  # type: ignore[no-untyped-call]
    return out


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
    out, drawn = torch.empty_like(x), Drawn.of(mask)
    is_bf16 = x.dtype == torch.bfloat16
    _dropout()(is_bf16, *x.shape, address(x), ctypes.byref(drawn), address(out), torch.get_num_threads())
    return out
