"""The map in torch: what the compiled one must agree with, on the same tensors.

An id stands at the first free cell from the leading bits of its hash on, so there is no empty cell between the two.
"""

import torch
from torch import Tensor

FACTORS = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))


def id_hash(ids: Tensor) -> Tensor:
    """int64 [n], all 64 bits mixed: the finaliser of MurmurHash3, as native/src/id_hash.h."""
    x = ids ^ _right(ids, 33)
    for factor in FACTORS:
        x = x * factor  # wraps modulo 2^64
        x = x ^ _right(x, 33)
    return x


def _right(x: Tensor, bits: int) -> Tensor:
    """A shift that brings in zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _home(ids: Tensor, index: Tensor) -> Tensor:
    return _right(id_hash(ids), 65 - len(index).bit_length())


def find(ids: Tensor, index: Tensor, names: Tensor) -> Tensor:
    slots, cells = torch.full_like(ids, -1), _home(ids, index)
    left = torch.arange(len(ids), device=ids.device)
    while len(left):
        found = index[cells].long() - 1
        left_ids = ids[left]
        hit = (found >= 0) & (names[found.clamp(min=0)] == left_ids)
        slots[left[hit]] = found[hit]
        on = (found >= 0) & ~hit
        left, cells = left[on], (cells[on] + 1) % len(index)
    return slots


def insert(ids: Tensor, slots: Tensor, index: Tensor, names: Tensor) -> None:
    for home, slot in zip(_home(ids, index).tolist(), slots.tolist(), strict=True):
        cell = home
        while int(index[cell]):
            cell = (cell + 1) % len(index)
        index[cell] = slot + 1


def remove(ids: Tensor, index: Tensor, names: Tensor) -> None:
    mask = len(index) - 1
    for one, hole in zip(ids.tolist(), _home(ids, index).tolist(), strict=True):
        while int(names[int(index[hole]) - 1]) != one:
            hole = (hole + 1) & mask
        cell = (hole + 1) & mask
        while int(index[cell]):
            home = int(_home(names[int(index[cell]) - 1].view(1), index))
            if (cell - home) & mask >= (cell - hole) & mask:  # it would be found at the hole, too: it moves up
                index[hole] = index[cell]
                hole = cell
            cell = (cell + 1) & mask
        index[hole] = 0
