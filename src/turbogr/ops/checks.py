"""What operators refuse before a kernel sees it: a wrong type or length would have it read memory that is not there.

Types and shapes are always looked at; values only on the CPU, because reading them on a device would wait for it.
"""

import torch
from torch import Tensor


def check_whole_numbers(name: str, x: Tensor, length: int) -> None:
    """int64 [length]."""
    if x.dtype != torch.int64 or x.shape != (length,):
        raise ValueError(f"{name} is {kind(x)}, wanted int64 [{length}].")


def check_offsets(offsets: Tensor, tokens: int) -> None:
    """int64 [B+1], rising from 0 to `tokens`; equal neighbours are an empty row."""
    if offsets.dtype != torch.int64 or offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"offsets is {kind(offsets)}, wanted int64 [B+1].")
    if not offsets.is_cpu:
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if (first, last) != (0, tokens):
        raise ValueError(f"offsets go from {first} to {last}: {tokens} tokens want 0 to {tokens}.")
    falls = offsets.diff() < 0
    if bool(falls.any()):
        row = int(falls.nonzero()[0])
        raise ValueError(f"offsets fall from {int(offsets[row])} to {int(offsets[row + 1])} at row {row}.")


def check_below(name: str, x: Tensor, bound: int) -> None:
    """Whole numbers [n], each at least 0 and less than `bound`."""
    if not x.is_cpu or not len(x):
        return
    low, high = (int(edge) for edge in x.aminmax())
    if low < 0 or high >= bound:
        bad = low if low < 0 else high
        place = int((x == bad).nonzero()[0])
        raise ValueError(f"{name}[{place}] is {bad}, wanted at least 0 and less than {bound}.")


def kind(x: Tensor) -> str:
    """Type and shape, for a sentence."""
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
