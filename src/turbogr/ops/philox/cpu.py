"""Philox compiled: the same words as reference.py."""

import functools
from collections.abc import Callable
from ctypes import c_int, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.native import address, function


@functools.cache
def _words() -> Callable[..., Any]:
    types = (c_int64, c_uint64, c_uint32, c_uint32, c_void_p, c_void_p, c_void_p, c_int)
    return function("philox", "philox_words", *types)


def philox_cpu(seed: int, word0: int, word1: int, word2: Tensor, word3: Tensor) -> Tensor:
    """[n, 4] int64, see `turbogr.ops.philox.reference.philox4x32`."""
    word2, word3 = word2.contiguous(), word3.contiguous()
    out = torch.empty(len(word2), 4, dtype=torch.int64)
    threads = torch.get_num_threads()
    _words()(len(word2), seed, word0, word1, address(word2), address(word3), address(out), threads)
    return out
