"""HSTU attention compiled: tile by tile on vectors, fp32 and bf16; see native/src/hstu_attention*.h.

The result does not depend on the number of threads. What the compiled code does not take, float64 above all, goes to
the torch tiles.

T tokens, B rows, H heads; q, k, dq, dk [T, H, dqk], v, dv [T, H, dv], dy, y [T, H, dv]
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.hstu_attention import tiles
from turbogr.ops.hstu_attention.reference import Bias, Mask, bucket_edges
from turbogr.ops.native import address, function

NO_WINDOW = 2**31 - 1


class _Mask(ctypes.Structure):
    _fields_ = (
        ("num_targets", c_void_p),
        ("context", c_int32),
        ("window", c_int32),
        ("context_sees_history", c_int32),
    )


class _Tables(ctypes.Structure):
    _fields_ = (
        ("position", c_void_p),
        ("time", c_void_p),
        ("times", c_void_p),
        ("next_times", c_void_p),
        ("edges", c_void_p),
        ("buckets", c_int64),
        ("width", c_double),
    )


class _Tensor(ctypes.Structure):
    _fields_ = (("data", c_void_p), ("token", c_int64), ("head", c_int64))


class _Call(ctypes.Structure):
    """HstuCall of native/src/hstu_attention.h; pointers that are not needed stay null."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "heads", "dqk", "dv", "max_len")),
        ("offsets", c_void_p),
        ("mask", _Mask),
        ("tables", _Tables),
        *((name, _Tensor) for name in ("q", "k", "v", "y", "dy", "dq", "dk", "dv_out")),
        *((name, c_void_p) for name in ("dposition", "dtime")),
        *((name, c_int32) for name in ("bf16", "threads")),
    )


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias, mask: Mask) -> Tensor:
    if not _takes(q, k, v, bias):
        return tiles.forward(q, k, v, offsets, max_len, bias, mask)
    y = torch.empty(v.shape, dtype=v.dtype)
    _run("hstu_forward", offsets, max_len, bias, mask, {"q": q, "k": k, "v": v, "y": y})
    return y


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    bias: Bias,
    mask: Mask,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    if not _takes(q, k, v, bias):
        return tiles.backward(dy, q, k, v, offsets, max_len, bias, mask, dq, dk, dv)
    tables = [None if table is None else torch.empty_like(table) for table in (bias.position, bias.time)]
    tensors = {"q": q, "k": k, "v": v, "dy": dy, "dq": dq, "dk": dk, "dv_out": dv}
    _run("hstu_backward", offsets, max_len, bias, mask, tensors, *tables)
    return tables[0], tables[1]


def _takes(q: Tensor, k: Tensor, v: Tensor, bias: Bias) -> bool:
    tables = (table for table in (bias.position, bias.time) if table is not None)
    return (
        q.dtype in (torch.float32, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and all(table.dtype == torch.float32 for table in tables)
    )


@functools.cache
def _symbol(name: str) -> Callable[..., Any]:
    return function("hstu_attention", name, ctypes.POINTER(_Call))


@functools.cache
def _edges(width: float, buckets: int) -> Tensor:
    return torch.tensor(bucket_edges(width, buckets), dtype=torch.int64)


def _run(
    symbol: str,
    offsets: Tensor,
    max_len: int,
    bias: Bias,
    mask: Mask,
    tensors: dict[str, Tensor],
    dposition: Tensor | None = None,
    dtime: Tensor | None = None,
) -> None:
    q, v = tensors["q"], tensors["v"]
    # inputs are copied only where their last dimension is not dense; what is written is dense already
    dense = {name: x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous() for name, x in tensors.items()}
    buckets = 0 if bias.time is None else len(bias.time) - 1
    with_times = bias.time is not None
    kept = {  # small tensors that must outlive the call
        "offsets": offsets.contiguous(),
        "num_targets": None if mask.num_targets is None else mask.num_targets.contiguous(),
        "position": None if bias.position is None else bias.position.contiguous(),
        "time": None if bias.time is None else bias.time.contiguous(),
        "times": bias.times.contiguous() if with_times and bias.times is not None else None,
        "next_times": bias.next_times.contiguous() if with_times and bias.next_times is not None else None,
        "edges": _edges(bias.bucket_width, buckets) if with_times else None,
    }
    at = {name: address(x) for name, x in kept.items()}
    window = NO_WINDOW if mask.window is None else min(mask.window, NO_WINDOW)
    call = _Call(
        rows=len(offsets) - 1,
        heads=q.shape[1],
        dqk=q.shape[2],
        dv=v.shape[2],
        max_len=max_len,
        offsets=at["offsets"],
        mask=_Mask(at["num_targets"], mask.num_context, window, mask.context_sees_history),
        tables=_Tables(
            at["position"], at["time"], at["times"], at["next_times"], at["edges"], buckets, bias.bucket_width
        ),
        **{name: _Tensor(address(x), x.stride(0), x.stride(1)) for name, x in dense.items()},
        dposition=address(dposition),
        dtime=address(dtime),
        bf16=q.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
    )
    _symbol(symbol)(ctypes.byref(call))
