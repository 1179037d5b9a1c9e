"""FuXi's position and time channels compiled: tile by tile on vectors, fp32 and bf16; see native/src/fuxi_attention*.h.

The result does not depend on the number of threads.

T tokens, B rows, H heads, C channels; v, dv [T, H, dv], y, dy [T, C, H, dv]
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.fuxi_attention.autograd import MapGradients
from turbogr.ops.fuxi_attention.reference import Maps
from turbogr.ops.hstu_attention.cpu import NO_WINDOW, _edges, _Mask, _Tables, _Tensor
from turbogr.ops.hstu_attention.reference import Mask
from turbogr.ops.native import address, function

DECAY_WIDTH, DECAY_BUCKETS = 1.0, 2
"""A decay is handed over in place of a time table of three entries: alpha, beta, gamma."""


class _Call(ctypes.Structure):
    """FuxiCall of native/src/fuxi_attention.h; pointers that are not needed stay null."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "heads", "dv", "max_len")),
        ("offsets", c_void_p),
        ("mask", _Mask),
        ("tables", _Tables),
        *((name, _Tensor) for name in ("v", "y", "dy", "dv_out")),
        *((name, c_int64) for name in ("y_channel", "dy_channel")),
        *((name, c_void_p) for name in ("dposition", "dtime")),
        *((name, c_int32) for name in ("decay", "bf16", "threads")),
    )


def takes(q: Tensor, k: Tensor, v: Tensor, maps: Maps) -> bool:
    tables = (table for table in (maps.position, maps.time, maps.decay) if table is not None)
    return (
        q.dtype in (torch.float32, torch.bfloat16)
        and q.dtype == k.dtype == v.dtype
        and all(table.dtype == torch.float32 for table in tables)
    )


def forward(v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask, y: Tensor) -> None:
    _run("fuxi_forward", offsets, max_len, maps, mask, {"v": v, "y": y})


def backward(dy: Tensor, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask, dv: Tensor) -> MapGradients:
    tables = [None if table is None else torch.empty_like(table) for table in (maps.position, maps.time, maps.decay)]
    position, time, decay = tables
    _run("fuxi_backward", offsets, max_len, maps, mask, {"v": v, "dy": dy, "dv_out": dv}, position, time, decay)
    return position, time, decay


@functools.cache
def _symbol(name: str) -> Callable[..., Any]:
    return function("fuxi_attention", name, ctypes.POINTER(_Call))


def _run(
    symbol: str,
    offsets: Tensor,
    max_len: int,
    maps: Maps,
    mask: Mask,
    tensors: dict[str, Tensor],
    dposition: Tensor | None = None,
    dtime: Tensor | None = None,
    ddecay: Tensor | None = None,
) -> None:
    v = tensors["v"]
    # inputs are copied only where their last dimension is not dense; what is written is dense already
    dense = {name: x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous() for name, x in tensors.items()}
    decays = maps.decay is not None
    time = maps.decay if decays else maps.time
    width, buckets = (
        (DECAY_WIDTH, DECAY_BUCKETS) if decays else (maps.bucket_width, 0 if time is None else len(time) - 1)
    )
    kept = {  # small tensors that must outlive the call
        "offsets": offsets.contiguous(),
        "num_targets": None if mask.num_targets is None else mask.num_targets.contiguous(),
        "position": None if maps.position is None else maps.position.contiguous(),
        "time": None if time is None else time.contiguous(),
        "times": maps.times.contiguous() if time is not None and maps.times is not None else None,
        "next_times": maps.next_times.contiguous() if time is not None and maps.next_times is not None else None,
        "edges": None if time is None else _edges(width, buckets),
    }
    at = {name: address(x) for name, x in kept.items()}
    window = NO_WINDOW if mask.window is None else min(mask.window, NO_WINDOW)
    channel = {f"{name}_channel": dense[name].stride(1) for name in ("y", "dy") if name in dense}
    call = _Call(
        rows=len(offsets) - 1,
        heads=v.shape[1],
        dv=v.shape[2],
        max_len=max_len,
        offsets=at["offsets"],
        mask=_Mask(at["num_targets"], mask.num_context, window, mask.context_sees_history),
        tables=_Tables(at["position"], at["time"], at["times"], at["next_times"], at["edges"], buckets, width),
        **{name: _Tensor(address(x), x.stride(0), x.stride(-2)) for name, x in dense.items()},
        **channel,
        dposition=address(dposition),
        dtime=address(ddecay if decays else dtime),
        decay=decays,
        bf16=v.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
    )
    _symbol(symbol)(ctypes.byref(call))
