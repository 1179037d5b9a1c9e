"""Rows of like length, padded together: how the torch backends of the attention operators batch their work.

    T tokens, L longest row of a tile, b rows of a tile

Causal attention makes padding at the end of a row harmless: no real query sees it, and its own outputs are dropped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CELLS = 1 << 20
"""Score cells (rows x L x L) that a tile aims at: few enough for the cache, enough for a GEMM."""
WASTE = 1.15
"""A row joins a tile when the tile's longest is at most this times as long (or 16 tokens longer)."""


@dataclass(frozen=True)
class Tile:
    tokens: Tensor  # [b, L] packed index of every cell; padding repeats the row's last token
    valid: Tensor  # [b, L] False on padding
    real: Tensor  # [n] packed index of the real tokens
    slots: Tensor  # [n] where they stand in the flattened [b * L]
    name: tuple[tuple[int, int], ...]  # (start, length) of every row

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    def pad(self, values: Tensor) -> Tensor:
        """[T, ...] -> [b, L, ...]."""
        # index_select copies whole rows, advanced indexing element by element
        return torch.index_select(values, 0, self.tokens.flatten()).view(*self.tokens.shape, *values.shape[1:])

    def unpad_into(self, out: Tensor, padded: Tensor) -> None:
        """Write the real cells of [b, L, ...] to their tokens of out [T, ...]."""
        out.index_copy_(0, self.real, torch.index_select(padded.flatten(0, 1), 0, self.slots).to(out.dtype))


def make_tiles(offsets: Tensor, heads: int) -> list[Tile]:
    """Group the rows of a jagged batch, longest first; empty rows are in no tile."""
    starts, lengths = offsets[:-1].tolist(), offsets.diff().tolist()
    order = sorted((row for row in range(len(lengths)) if lengths[row]), key=lambda row: -lengths[row])
    tiles: list[Tile] = []
    while order:
        longest = lengths[order[0]]
        most = max(1, CELLS // (heads * longest * longest))
        take = 1
        while take < min(most, len(order)) and longest <= max(lengths[order[take]] * WASTE, lengths[order[take]] + 16):
            take += 1
        tiles.append(
            _tile([starts[row] for row in order[:take]], [lengths[row] for row in order[:take]], offsets.device)
        )
        order = order[take:]
    return tiles


def _tile(starts: list[int], lengths: list[int], device: torch.device) -> Tile:
    steps, length = torch.arange(lengths[0]), torch.tensor(lengths).unsqueeze(1)
    # 0 * inf is not 0: padding taken from another row would let one user's overflow reach its neighbours
    index = torch.tensor(starts).unsqueeze(1) + torch.minimum(steps, length - 1)
    valid = steps < length
    slots = valid.flatten().nonzero().squeeze(1)
    real = index.flatten()[slots]
    return Tile(
        tokens=index.to(device, non_blocking=True),
        valid=valid.to(device, non_blocking=True),
        real=real.to(device, non_blocking=True),
        slots=slots.to(device, non_blocking=True),
        name=tuple(zip(starts, lengths, strict=True)),
    )
