"""The map compiled: native/src/id_map.cpp."""

import functools
from collections.abc import Callable
from ctypes import c_int, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.native import address, function

_TYPES = {
    "find": (c_int64, c_void_p, c_void_p, c_int32, c_void_p, c_void_p, c_int),
    "insert": (c_int64, c_void_p, c_void_p, c_void_p, c_int32),
    "remove": (c_int64, c_void_p, c_void_p, c_int32, c_void_p),
}


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    return function("id_map", f"id_map_{name}", *_TYPES[name])


def _bits(index: Tensor) -> int:
    return len(index).bit_length() - 1


def find(ids: Tensor, index: Tensor, names: Tensor) -> Tensor:
    ids = ids.contiguous()
    slots = torch.empty_like(ids)
    threads = torch.get_num_threads()
    _compiled("find")(len(ids), address(ids), address(index), _bits(index), address(names), address(slots), threads)
    return slots


def insert(ids: Tensor, slots: Tensor, index: Tensor, names: Tensor) -> None:
    ids, slots = ids.contiguous(), slots.contiguous()
    _compiled("insert")(len(ids), address(ids), address(slots), address(index), _bits(index))


def remove(ids: Tensor, index: Tensor, names: Tensor) -> None:
    ids = ids.contiguous()
    _compiled("remove")(len(ids), address(ids), address(index), _bits(index), address(names))
