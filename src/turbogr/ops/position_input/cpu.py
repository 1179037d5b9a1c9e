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
from turbogr.ops.position_input.reference import input_gradients, input_reference


@functools.cache
def _forward() -> Callable[..., Any]:
    types = (c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int)
    return function("dropout", "position_input", *types)


@functools.cache
def _backward() -> Callable[..., Any]:
    types = (c_int64, c_int64, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_void_p, c_int)
    return function("dropout", "position_input_backward", *types)


def input_cpu(x: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None) -> Tensor:
    if not _compiled(x, table):
        return input_reference(x, table, positions, scale, mask)
    out: Tensor = PositionInputFunction.apply(x, table, positions, scale, mask)  # type: ignore[no-untyped-call]
    return out


class PositionInputFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.scale, ctx.mask, ctx.table = scale, mask, table.detach()
        return forward(x, table, positions, scale, mask)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        (positions,) = ctx.saved_tensors
        return *backward(dout, ctx.table, positions, ctx.scale, ctx.mask), None, None, None


def forward(x: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None) -> Tensor:
    if not _compiled(x, table):
        return input_reference(x, table, positions, scale, mask)
    x, table, positions = x.contiguous(), table.contiguous(), positions.contiguous()
    out, drawn = torch.empty_like(x), ctypes.byref(Drawn.of(mask))
    places = address(x), address(table), address(positions)
    _forward()(*x.shape, *places, scale, drawn, address(out), torch.get_num_threads())
    return out


def backward(dout: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the table, of which the shape is asked only."""
    if not _compiled(dout, table):
        return input_gradients(dout, table, positions, scale, mask)
    dout, positions = dout.contiguous(), positions.contiguous()
    dx, dtable = torch.empty_like(dout), torch.zeros(table.shape)
    drawn = ctypes.byref(Drawn.of(mask))
    places = address(dx), address(dtable)
    _backward()(*dout.shape, address(dout), address(positions), scale, drawn, *places, torch.get_num_threads())
    return dx, dtable


def _compiled(x: Tensor, table: Tensor) -> bool:
    return x.dtype == torch.float32 and table.dtype == torch.float32
