"""Read the rows of a batch from the store.

B rows, T tokens: the last max_history + 1 training events of a user give its (event, next event) pairs
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turbogr.data.batching import Selection
from turbogr.data.split import Split
from turbogr.data.store import Store, places_of


@dataclass(frozen=True)
class Batch:
    users: np.ndarray  # int64 [B] index in the store
    lengths: list[int]  # tokens of every row
    numbers: Tensor  # int64 [B] number of the row in the global step
    offsets: Tensor  # int64 [B+1]
    items: Tensor  # int64 [T] the event
    targets: Tensor  # int64 [T] the next event
    times: Tensor  # int64 [T] seconds
    next_times: Tensor  # int64 [T] seconds

    @property
    def tokens(self) -> int:
        return len(self.items)

    def to(self, device: torch.device) -> "Batch":
        columns = (self.numbers, self.offsets, self.items, self.targets, self.times, self.next_times)
        return Batch(self.users, self.lengths, *(column.to(device, non_blocking=True) for column in columns))


def read_batch(store: Store, split: Split, rows: Selection, max_history: int) -> Batch:
    """The training pairs of `rows`, in their order."""
    last = split.train_end[rows.users] - 1  # the last event is only a target
    first = np.maximum(np.asarray(store.offsets[rows.users]), last - max_history) + rows.skips
    offsets, place = places_of(first, rows.tokens)
    unit = store.manifest.time_units_per_second
    return Batch(
        users=rows.users,
        lengths=rows.tokens.tolist(),
        numbers=torch.from_numpy(rows.numbers),
        offsets=torch.from_numpy(offsets),
        items=torch.from_numpy(store.item[place].astype(np.int64)),
        targets=torch.from_numpy(store.item[place + 1].astype(np.int64)),
        times=torch.from_numpy(store.time[place] // unit),
        next_times=torch.from_numpy(store.time[place + 1] // unit),
    )
