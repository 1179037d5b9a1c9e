"""The passes of the HSTU layer compiled (native/src/hstu_layer.cpp): x in fp32, everything else in fp32 or bf16.

T tokens, D width
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_float, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.dropout.cpu import Drawn
from turbogr.ops.dropout.reference import Mask as Dropout
from turbogr.ops.hstu_layer.layer import EPS
from turbogr.ops.native import address, function


@functools.cache
def _pass(name: str, *arguments: Any) -> Callable[..., Any]:
    """hstu_<name>(bf16, tokens, width, arguments..., threads)"""
    found = function("hstu_layer", f"hstu_{name}", c_int, c_int64, c_int64, *arguments, c_int)

    def call(dtype: torch.dtype, tokens: int, width: int, *given: Any) -> None:
        found(dtype == torch.bfloat16, tokens, width, *given, torch.get_num_threads())

    return call


def norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype)
    _pass("norm", c_void_p, c_float, c_void_p)(dtype, *x.shape, address(x), EPS, address(out))
    return out


def activate(z: Tensor) -> Tensor:
    tokens, width = _sizes(z)
    out = torch.empty(tokens, 3 * width, dtype=z.dtype)
    _pass("activate", c_void_p, c_void_p)(z.dtype, tokens, width, address(z), address(out))
    return out


def gate(z: Tensor, y: Tensor, dropout: Dropout | None) -> Tensor:
    tokens, width = _sizes(z)
    out = torch.empty(tokens, width, dtype=z.dtype)
    run = _pass("gate", c_void_p, c_void_p, c_float, c_void_p, c_void_p)
    run(z.dtype, tokens, width, address(z), address(y), EPS, ctypes.byref(Drawn.of(dropout)), address(out))
    return out


def residual(x: Tensor, product: Tensor, bias: Tensor) -> Tensor:
    out = product if product.dtype == x.dtype else torch.empty_like(x)
    run = _pass("residual", c_void_p, c_void_p, c_void_p, c_void_p)
    run(product.dtype, *x.shape, address(x), address(product), address(bias.float()), address(out))
    return out


def gate_backward(dg: Tensor, z: Tensor, y: Tensor, dropout: Dropout | None, dz: Tensor) -> tuple[Tensor, Tensor]:
    tokens, width = _sizes(z)
    gated = torch.empty_like(dg)
    run = _pass("gate_backward", c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_void_p, c_void_p)
    drawn = ctypes.byref(Drawn.of(dropout))
    run(z.dtype, tokens, width, address(z), address(y), EPS, drawn, address(dg), address(dz), address(gated))
    return dg, gated


def activate_backward(z: Tensor, dz: Tensor) -> None:
    _pass("activate_backward", c_void_p, c_void_p)(z.dtype, *_sizes(z), address(z), address(dz))


def norm_backward(x: Tensor, dxhat: Tensor, dout: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    run = _pass("norm_backward", c_void_p, c_void_p, c_void_p, c_float, c_void_p)
    run(dxhat.dtype, *x.shape, address(x), address(dxhat), address(dout), EPS, address(dx))
    return dx


def column_sums(x: Tensor) -> Tensor:
    out = torch.empty(x.shape[1])
    _column_sums()(*x.shape, address(x), address(out), torch.get_num_threads())
    return out


@functools.cache
def _column_sums() -> Callable[..., Any]:
    return function("hstu_layer", "hstu_column_sums", c_int64, c_int64, c_void_p, c_void_p, c_int)


def _sizes(z: Tensor) -> tuple[int, int]:
    """T and D of z [T, 4 D], which must be dense as every operand of a pass."""
    assert z.is_contiguous()
    return len(z), z.shape[1] // 4
