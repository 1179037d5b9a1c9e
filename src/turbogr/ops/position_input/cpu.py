"""The encoders' input compiled: one pass forward, two backward; the mask is drawn again instead of kept."""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.dropout.cpu import Drawn
from turbogr.ops.dropout.reference import Mask
from turbogr.ops.native import address, function
from turbogr.ops.position_input.reference import input_reference


@functools.cache
def _forward() -> Callable[..., Any]:
    types = (c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int)
    return function("dropout", "position_input", *types)


@functools.cache
def _backward() -> Callable[..., Any]:
    types = (c_int64, c_int64, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_void_p, c_int)
    return function("dropout", "position_input_backward", *types)


def input_cpu(x: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None) -> Tensor:
    if x.dtype != torch.float32 or table.dtype != torch.float32:
        return input_reference(x, table, positions, scale, mask)
    out: Tensor = PositionInputFunction.apply(x, table, positions, scale, mask)  # type: ignore[no-untyped-call]
    return out


class PositionInputFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None) -> Tensor:
        x, table, positions = x.contiguous(), table.contiguous(), positions.contiguous()
        ctx.save_for_backward(positions)
        ctx.scale, ctx.mask, ctx.rows = scale, mask, len(table)
        out, drawn = torch.empty_like(x), ctypes.byref(Drawn.of(mask))
        places = address(x), address(table), address(positions)
        _forward()(*x.shape, *places, scale, drawn, address(out), torch.get_num_threads())
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        dout = dout.contiguous()
        dx, dtable = torch.empty_like(dout), torch.zeros(ctx.rows, dout.shape[1])
        drawn = ctypes.byref(Drawn.of(ctx.mask))
        places = address(dx), address(dtable)
        _backward()(*dout.shape, address(dout), address(positions), ctx.scale, drawn, *places, torch.get_num_threads())
        return dx, dtable, None, None, None
