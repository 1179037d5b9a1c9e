"""What a table's rows lie in: memory in huge pages, initial values, and how a bf16 table rounds.

N rows of the table, D width, n ids
"""

import ctypes
import mmap
import sys

import torch
from torch import Tensor

from turbogr.ops.embedding import Rounding
from turbogr.ops.philox import Key, Purpose, normal_rows

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INITIAL_STD, INITIAL_BOUND = 0.02, 2.0
INITIAL_CHUNK = 1 << 15
"""Values drawn at a time: what initialising needs beside the table stays in the cache."""
HUGE_PAGE = 1 << 21


def empty_rows(
    num_rows: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> Tensor:
    """[N, D] without values. Rows are read at random, and a page of 4 KiB holds few: most reads would miss the TLB."""
    rows = torch.empty(num_rows, dim, dtype=dtype, device=device)
    _ask_for_huge_pages(rows)
    return rows


def zero_rows(num_rows: int, dim: int, device: torch.device | None = None) -> Tensor:
    """fp32 [N, D] of zeros."""
    return empty_rows(num_rows, dim, device=device).zero_()


def _ask_for_huge_pages(rows: Tensor) -> None:
    """A request only: a kernel that has none gives small ones."""
    begin = -(-rows.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (rows.data_ptr() + rows.nbytes) // HUGE_PAGE * HUGE_PAGE
    if rows.is_cpu and sys.platform == "linux" and begin < end:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE)


def initial_rows(seed: int, number: int, ids: Tensor, dim: int) -> Tensor:
    """fp32 [n, D], a pure function of (seed, table, id)."""
    rows = torch.empty(len(ids), dim, device=ids.device)
    fill_initial(rows, seed, number, ids)
    return rows


def fill_initial(weight: Tensor, seed: int, number: int, names: Tensor | None) -> None:
    """Every row its initial value; `names` int64 [N] are the rows' ids, None: their numbers."""
    key = Key(seed, 0, Purpose.TABLE_ROWS, number)
    count, dim = weight.shape
    chunk = max(1, INITIAL_CHUNK // max(dim, 1))
    for begin in range(0, count, chunk):
        end = min(begin + chunk, count)
        ids = torch.arange(begin, end) if names is None else names[begin:end]
        weight[begin:end] = normal_rows(key, ids, dim, INITIAL_STD, INITIAL_BOUND)


class StepRounding:
    """Rounding keyed by (seed, number of the update, table, name of the row)."""

    def __init__(self, seed: int, number: int) -> None:
        self.seed, self.number = seed, number
        self.step = torch.zeros((), dtype=torch.int64)  # on the CPU whatever the device: reading it waits for nothing

    def next(self, names: Tensor | None) -> Rounding:
        self.step += 1
        return Rounding(Key(self.seed, int(self.step), Purpose.ROUNDING, self.number), names)
