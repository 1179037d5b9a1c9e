"""A map from ids, any int64, to slots, in tensors that the caller keeps: what a checkpoint saves is all there is.

find, insert, remove     by open addressing; the answers do not depend on the backend, on the order of insertion or on
                         what was removed before

n ids, C slots; index int32 [2^bits] is slot + 1 or 0, names int64 [C] the id of every slot
"""

from typing import Protocol

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_below, check_whole_numbers, kind
from turbogr.ops.registry import Backend, register


class Kernels(Protocol):
    def find(self, ids: Tensor, index: Tensor, names: Tensor) -> Tensor: ...

    def insert(self, ids: Tensor, slots: Tensor, index: Tensor, names: Tensor) -> None: ...

    def remove(self, ids: Tensor, index: Tensor, names: Tensor) -> None: ...


def _compiled() -> Kernels:
    from turbogr.ops.id_map import cpu

    return cpu


def _reference() -> Kernels:
    from turbogr.ops.id_map import reference

    return reference


OPERATOR = register("id_map", Backend("cpu", _compiled, native.rejects("id_map")), Backend("reference", _reference))


def empty_index(capacity: int, device: torch.device | None = None) -> Tensor:
    """An index for so many slots, at most half full: probes stay short."""
    assert 0 < capacity < 1 << 31
    return torch.zeros(1 << (2 * capacity - 1).bit_length(), dtype=torch.int32, device=device)


def find(ids: Tensor, index: Tensor, names: Tensor, *, backend: str | None = None) -> Tensor:
    """int64 [n] the slot of every id, or -1.

    Example:
        >>> index, names = empty_index(4), torch.zeros(4, dtype=torch.int64)
        >>> insert(torch.tensor([-5, 7]), torch.tensor([2, 0]), index, names)
        >>> find(torch.tensor([7, 0, -5]), index, names).tolist()
        [0, -1, 2]
    """
    _check(ids, index, names)
    return _kernels(ids, backend).find(ids, index, names)


def insert(ids: Tensor, slots: Tensor, index: Tensor, names: Tensor, *, backend: str | None = None) -> None:
    """Enter distinct ids that are not there, into slots that no id has."""
    _check(ids, index, names)
    check_whole_numbers("slots", slots, len(ids))
    check_below("slots", slots, len(names))
    names[slots] = ids
    _kernels(ids, backend).insert(ids, slots, index, names)


def remove(ids: Tensor, index: Tensor, names: Tensor, *, backend: str | None = None) -> None:
    """Take distinct ids out; one that is not there is a KeyError and nothing is taken."""
    missing = find(ids, index, names, backend=backend) < 0
    if bool(missing.any()):
        raise KeyError(f"id {int(ids[missing][0])} is not in the map.")
    _kernels(ids, backend).remove(ids, index, names)


def _kernels(ids: Tensor, backend: str | None) -> Kernels:
    chosen, _ = OPERATOR.pick(ids.device, backend)
    module: Kernels = chosen.run()
    return module


def _check(ids: Tensor, index: Tensor, names: Tensor) -> None:
    check_whole_numbers("ids", ids, ids.numel())
    check_whole_numbers("names", names, names.numel())
    size = index.numel()
    # an index without a free cell would be searched for ever
    if index.dtype != torch.int32 or index.dim() != 1 or size & (size - 1) or size < 2 * len(names):
        raise ValueError(f"index is {kind(index)}, wanted int32 [a power of two, at least {2 * len(names)}].")
    if not (index.is_contiguous() and names.is_contiguous()):
        raise ValueError("index and names must be contiguous: they are changed in place.")
