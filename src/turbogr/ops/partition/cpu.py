"""The partition compiled: the same answer as reference.py."""

import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import numpy as np

from turbogr.ops.native import function

if TYPE_CHECKING:
    from turbogr.ops.partition import Goal


@functools.cache
def _symbols() -> tuple[Callable[..., Any], Callable[..., Any]]:
    users, settings = (c_int64, c_void_p, c_void_p), (c_int64, c_int64)
    return (
        function("partition", "partition_largest_first", *users, *settings, c_void_p),
        function("partition", "partition_refine", *users, *settings, c_int64, c_int64, c_void_p, c_void_p),
    )


def partition_cpu(
    cost: np.ndarray, tokens: np.ndarray, ranks: int, limit: int, goal: "Goal", start: np.ndarray | None
) -> np.ndarray:
    """See `turbogr.ops.partition.partition_users`."""
    largest_first, refine = _symbols()
    cost, tokens = (np.ascontiguousarray(one, np.int64) for one in (cost, tokens))
    part = np.empty(len(cost), np.int64) if start is None else np.array(start, np.int64)
    users, answer = (len(cost), cost.ctypes.data, tokens.ctypes.data), part.ctypes.data
    if start is None:
        largest_first(*users, ranks, limit, answer)
        if (part < 0).any():
            return part
    work = np.array([goal.load_work, goal.token_work], np.int64)
    refine(*users, ranks, limit, goal.load, goal.tokens, work.ctypes.data, answer)
    return part
