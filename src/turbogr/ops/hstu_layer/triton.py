"""The passes of the HSTU layer in Triton, a program for some whole rows of its tensors; sums and functions in fp32.

T tokens, D width; z and dz [T, 4 D] are [u | v | q | k]
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbogr.ops.dropout.reference import Mask as Dropout
from turbogr.ops.dropout.triton import MASK_TYPES, dropout_factors, mask_words, row_tile
from turbogr.ops.hstu_layer.layer import EPS
from turbogr.ops.triton_support import Configuration, next_power_of_two

COLUMNS = 1024
"""Columns of a program where rows need not be whole."""
CELLS = 2048
LEAST_VARIANCE = tl.constexpr(EPS)


@triton.jit
def _centred(x, inside, D: tl.constexpr):
    """((x - mean) / deviation, 1 / deviation [rows, 1]) of rows x [rows, n] whose columns beyond D are not `inside`."""
    mean = tl.sum(x, axis=1)[:, None] / D
    apart = tl.where(inside, x - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(apart * apart, axis=1)[:, None] / D + LEAST_VARIANCE)
    return apart * inverse, inverse


@triton.jit
def _through_norm(dxhat, xhat, inverse, D: tl.constexpr):
    mean = tl.sum(dxhat, axis=1)[:, None] / D
    along = tl.sum(dxhat * xhat, axis=1)[:, None] / D
    return (dxhat - mean - xhat * along) * inverse


@triton.jit
def _load_rows(x, at, inside):
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _norm_kernel(x, out, tokens, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    at, inside = t[:, None] * D + d[None, :], (t < tokens)[:, None] & (d < D)[None, :]
    xhat, _ = _centred(_load_rows(x, at, inside), inside, D)
    tl.store(out + at, xhat.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _norm_backward_kernel(
    x, dxhat, dout, dx, tokens, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    at, inside = t[:, None] * D + d[None, :], (t < tokens)[:, None] & (d < D)[None, :]
    xhat, inverse = _centred(_load_rows(x, at, inside), inside, D)
    slope = _through_norm(_load_rows(dxhat, at, inside), xhat, inverse, D)
    tl.store(dx + at, (_load_rows(dout, at, inside) + slope).to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _activate_kernel(z, out, tokens, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """out [T, 3 D] = SiLU of v, q, k."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    inside = (t < tokens) & (c < 3 * D)
    value = _load_rows(z, t * (4 * D) + D + c, inside)
    tl.store(out + t * (3 * D) + c, (value * tl.sigmoid(value)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_slope(value):
    sigmoid = tl.sigmoid(value)
    return sigmoid + value * sigmoid * (1.0 - sigmoid)


@triton.jit(do_not_specialize=["tokens"])
def _activate_backward_kernel(z, dz, tokens, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """dz's part of v, q, k times SiLU'(z), in place."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    at, inside = t * (4 * D) + D + c, (t < tokens) & (c < 3 * D)
    slope = _load_rows(dz, at, inside) * _silu_slope(_load_rows(z, at, inside))
    tl.store(dz + at, slope.to(dz.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "key_low", "key_high", "step", "purpose", "least"])
def _gate_kernel(
    z, y, out, tokens, users, positions, key_low, key_high, step, purpose, least, scale,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    at, inside = t[:, None] * D + d[None, :], (t < tokens)[:, None] & (d < D)[None, :]
    u = _load_rows(z, t[:, None] * (4 * D) + d[None, :], inside)
    yhat, _ = _centred(_load_rows(y, at, inside), inside, D)
    gated = yhat * u * tl.sigmoid(u)
    if users is not None:
        gated *= dropout_factors(
            users, positions, t, t < tokens, key_low, key_high, step, purpose, least, scale, BLOCK_T, BLOCK_D
        )
    tl.store(out + at, gated.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "key_low", "key_high", "step", "purpose", "least"])
def _gate_backward_kernel(
    dgated_dy, z, y, dz, gated, tokens, users, positions, key_low, key_high, step, purpose, least, scale,
    D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """From the gradient of `gated`: that of y in its place, that of u in dz, and `gated` again."""
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.arange(0, BLOCK_D)
    at, inside = t[:, None] * D + d[None, :], (t < tokens)[:, None] & (d < D)[None, :]
    at_u = t[:, None] * (4 * D) + d[None, :]
    u = _load_rows(z, at_u, inside)
    yhat, inverse = _centred(_load_rows(y, at, inside), inside, D)
    activated, slope = u * tl.sigmoid(u), _load_rows(dgated_dy, at, inside)
    value = yhat * activated
    if users is not None:
        factors = dropout_factors(
            users, positions, t, t < tokens, key_low, key_high, step, purpose, least, scale, BLOCK_T, BLOCK_D
        )
        value *= factors
        slope *= factors
    tl.store(gated + at, value.to(gated.dtype.element_ty), mask=inside)
    tl.store(dz + at_u, (slope * yhat * _silu_slope(u)).to(dz.dtype.element_ty), mask=inside)
    dy = _through_norm(slope * activated, yhat, inverse, D)
    tl.store(dgated_dy + at, dy.to(dgated_dy.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _residual_kernel(
    x, product, bias, out, tokens, D: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    at, inside = t * D + c, (t < tokens) & (c < D)
    change = _load_rows(product, at, inside) + _load_rows(bias, c, c < D)
    tl.store(out + at, (_load_rows(x, at, inside) + change).to(out.dtype.element_ty), mask=inside)


def norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _over_rows(_norm_kernel, x.shape[1], len(x), x, out)
    return out


def norm_backward(x: Tensor, dxhat: Tensor, dout: Tensor) -> Tensor:
    dx = torch.empty_like(x)
    _over_rows(_norm_backward_kernel, x.shape[1], len(x), x, dxhat, dout, dx)
    return dx


def activate(z: Tensor) -> Tensor:
    tokens, width = _sizes(z)
    out = torch.empty(tokens, 3 * width, dtype=z.dtype, device=z.device)
    _over_columns(_activate_kernel, width, 3 * width, tokens, z, out)
    return out


def activate_backward(z: Tensor, dz: Tensor) -> None:
    tokens, width = _sizes(z)
    _over_columns(_activate_backward_kernel, width, 3 * width, tokens, z, dz)


def gate(z: Tensor, y: Tensor, dropout: Dropout | None) -> Tensor:
    tokens, width = _sizes(z)
    out = torch.empty(tokens, width, dtype=z.dtype, device=z.device)
    _over_rows(_gate_kernel, width, tokens, z, y, out, drawn=_mask_arguments(dropout))
    return out


def gate_backward(dg: Tensor, z: Tensor, y: Tensor, dropout: Dropout | None, dz: Tensor) -> tuple[Tensor, Tensor]:
    tokens, width = _sizes(z)
    gated = torch.empty_like(dg)
    _over_rows(_gate_backward_kernel, width, tokens, dg, z, y, dz, gated, drawn=_mask_arguments(dropout))
    return dg, gated


def residual(x: Tensor, product: Tensor, bias: Tensor) -> Tensor:
    out = product if product.dtype == x.dtype else torch.empty_like(x)
    width = x.shape[1]
    _over_columns(_residual_kernel, width, width, len(x), x, product, bias, out)
    return out


def column_sums(x: Tensor) -> Tensor:
    return torch.sum(x, 0, dtype=torch.float32)


def _over_rows(kernel, width: int, tokens: int, *tensors: Tensor, drawn: tuple[Any, ...] = ()) -> None:
    """Launch a kernel that takes whole rows; `drawn` are a mask's arguments where it has one."""
    assert all(x.is_contiguous() for x in tensors)
    if tokens:
        sizes = row_tile(width, CELLS)
        grid = (triton.cdiv(tokens, sizes["BLOCK_T"]),)
        kernel[grid](*tensors, tokens, *drawn, D=width, **sizes, num_warps=_warps(sizes["BLOCK_D"]))


def _mask_arguments(dropout: Dropout | None) -> tuple[Any, ...]:
    if dropout is None:
        return None, None, 0, 0, 0, 0, 0, 1.0
    return dropout.users.contiguous(), dropout.positions.contiguous(), *mask_words(dropout)


def _over_columns(kernel, width: int, columns: int, tokens: int, *tensors: Tensor) -> None:
    """Launch a kernel over tokens x columns, each of them on its own."""
    assert all(x.is_contiguous() for x in tensors)
    if not tokens:
        return
    sizes = column_tile(columns)
    grid = (triton.cdiv(tokens, sizes["BLOCK_T"]), triton.cdiv(columns, sizes["BLOCK_C"]))
    kernel[grid](*tensors, tokens, D=width, **sizes, num_warps=4)


def _warps(block: int) -> int:
    return 8 if block > CELLS else 4


def column_tile(columns: int) -> dict[str, int]:
    block = min(COLUMNS, next_power_of_two(columns))
    return {"BLOCK_T": CELLS // block, "BLOCK_C": block}


def _sizes(z: Tensor) -> tuple[int, int]:
    return len(z), z.shape[1] // 4


def configurations() -> list[Configuration]:
    """Widths of the smallest and the largest published model; x stays in fp32."""
    listed = []
    for dtype, width in (("fp32", 50), ("bf16", 1024)):
        run, wide, tokens = f"*{dtype}", "*fp32", {"tokens": "i32"}
        rows, columns = row_tile(width, CELLS), column_tile(3 * width)
        kernels = {
            "norm": (_norm_kernel, {"x": wide, "out": run} | tokens, rows),
            "norm, backward": (
                _norm_backward_kernel, {"x": wide, "dxhat": run, "dout": wide, "dx": wide} | tokens, rows,
            ),
            "SiLU": (_activate_kernel, {"z": run, "out": run} | tokens, columns),
            "SiLU, backward": (_activate_backward_kernel, {"z": run, "dz": run} | tokens, columns),
            "gate": (_gate_kernel, dict.fromkeys(["z", "y", "out"], run) | MASK_TYPES, rows),
            "gate, backward": (
                _gate_backward_kernel, dict.fromkeys(["dgated_dy", "z", "y", "dz", "gated"], run) | MASK_TYPES, rows,
            ),
            "residual": (
                _residual_kernel, {"x": wide, "product": run, "bias": wide, "out": wide} | tokens, column_tile(width),
            ),
        }  # fmt: skip
        listed += [
            Configuration(
                name=f"{name}, {dtype}, D={width}",
                kernel=kernel,
                signature=types,
                constants={"D": width, **sizes},
                num_warps=4,
            )
            for name, (kernel, types, sizes) in kernels.items()
        ]
    return listed
