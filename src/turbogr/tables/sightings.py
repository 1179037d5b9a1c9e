"""How often ids without a row were seen, in memory of a fixed size: a count-min sketch that forgets.

n ids, W cells of a hash
"""

import torch
from torch import Tensor

from turbogr.ops.id_map.reference import id_hash

CELLS_PER_ROW, LEAST_CELLS, MOST = 4, 1 << 12, 255
_SALTS = (0x243F6A8885A308D3, 0x13198A2E03707344, 0x24093822299F31D0, 0x082EFA98EC4E6C89)  # pi, one for each hash


class Sightings:
    """Counts are never too low but by the halvings; ids that share a cell in every hash are counted together.

    After half as many sightings as a hash has cells all counts are halved, so that what is rare stays out for ever and
    few ids share all their cells.
    """

    def __init__(self, capacity: int, device: torch.device | None = None) -> None:
        self.width = 1 << (max(LEAST_CELLS, CELLS_PER_ROW * capacity) - 1).bit_length()
        self.counts = torch.zeros(len(_SALTS), self.width, dtype=torch.uint8, device=device)
        self.since = torch.zeros((), dtype=torch.int64)

    def add(self, ids: Tensor) -> Tensor:
        """int64 [n] how often each of these distinct ids was seen, this time included."""
        cells = [id_hash(ids ^ salt) & (self.width - 1) for salt in _SALTS]
        before = torch.stack([row[own] for row, own in zip(self.counts, cells, strict=True)]).amin(0)
        seen = before.clamp(max=MOST - 1) + 1
        for row, own in zip(self.counts, cells, strict=True):
            row.scatter_reduce_(0, own, seen, "amax")  # only a cell that is too low rises; the order does not matter
        self.since += len(ids)
        if 2 * int(self.since) >= self.width:
            self.counts >>= 1
            self.since.zero_()
        return seen.long()

    def state(self) -> dict[str, Tensor]:
        return {"counts": self.counts, "since": self.since}
