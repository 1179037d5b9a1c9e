"""Which slot each id has, in a table of so many slots, and which slots are free.

C slots, n ids
"""

import torch
from torch import Tensor

from turbogr.ops import id_map

SCAN = 1 << 16
"""Slots looked at together for free ones."""


class IdMap:
    """Ids, any int64, to slots 0 .. C - 1. All of it lies in the tensors of `state`: there is nothing to rebuild."""

    def __init__(self, capacity: int, device: torch.device | None = None) -> None:
        self.capacity = capacity
        self.index = id_map.empty_index(capacity, device)
        self.names = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.taken = torch.zeros(capacity, dtype=torch.bool, device=device)
        # number of taken slots; all slots below the second number are taken
        self._marks = torch.zeros(2, dtype=torch.int64)

    def __len__(self) -> int:
        return int(self._marks[0])

    def find(self, ids: Tensor) -> Tensor:
        """int64 [n] the slot of every id, or -1."""
        return id_map.find(ids, self.index, self.names)

    def insert(self, ids: Tensor) -> Tensor:
        """Slots for distinct new ids [n], no more than are free: the lowest ones, in the ids' order."""
        slots = self._free(len(ids))
        id_map.insert(ids, slots, self.index, self.names)
        self.taken[slots] = True
        self._marks[0] += len(ids)
        if len(slots):
            self._marks[1] = slots[-1] + 1
        return slots

    def remove(self, slots: Tensor) -> None:
        """Free taken slots [n], distinct."""
        id_map.remove(self.names[slots], self.index, self.names)
        self.taken[slots] = False
        self._marks[0] -= len(slots)
        if len(slots):
            self._marks[1] = torch.minimum(self._marks[1], slots.min().cpu())

    def slots(self) -> Tensor:
        """int64 [len(self)] the taken slots, their ids ascending."""
        slots = self.taken.nonzero().squeeze(1)
        return slots[self.names[slots].argsort()]

    def state(self) -> dict[str, Tensor]:
        return {"index": self.index, "names": self.names, "taken": self.taken, "marks": self._marks}

    def _free(self, count: int) -> Tensor:
        assert count <= self.capacity - len(self)
        begin, left, found = int(self._marks[1]), count, [torch.empty(0, dtype=torch.int64, device=self.names.device)]
        while left:
            free = (~self.taken[begin : begin + SCAN]).nonzero().squeeze(1)[:left] + begin
            found.append(free)
            begin, left = begin + SCAN, left - len(free)
        return torch.cat(found)
