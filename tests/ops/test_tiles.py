"""Grouping of rows into tiles."""

import torch
from hypothesis import given

from tests.support.jagged_cases import row_lengths
from turbogr.jagged import offsets_of
from turbogr.ops import tiles
from turbogr.ops.tiles import make_tiles


@given(row_lengths())
def test_every_token_stands_in_one_slot_and_padding_repeats_its_row(lengths: list[int]) -> None:
    """Catches: tokens lost or doubled, padding taken from another user."""
    offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64))
    seen = []
    for tile in make_tiles(offsets, heads=2):
        assert torch.equal(tile.tokens.flatten()[tile.slots], tile.real)
        assert torch.equal(tile.valid.flatten().nonzero().squeeze(1), tile.slots)
        for row, (start, length) in zip(tile.tokens.tolist(), tile.name, strict=True):
            assert row == [*range(start, start + length), *[start + length - 1] * (tile.length - length)]
        seen += tile.real.tolist()
    assert sorted(seen) == list(range(sum(lengths)))


@given(row_lengths())
def test_padding_is_bounded(lengths: list[int]) -> None:
    """Catches: one long row that pads all others to its length."""
    for tile in make_tiles(offsets_of(torch.tensor(lengths, dtype=torch.int64)), heads=1):
        shortest = min(length for _, length in tile.name)
        assert tile.length <= max(shortest * tiles.WASTE, shortest + 16)


def test_a_tile_keeps_to_its_cells() -> None:
    """Catches: a batch of many rows in one tile, whose scores fill the memory."""
    made = make_tiles(offsets_of(torch.full((4000,), 40)), heads=2)
    assert len(made) > 1 and all(len(tile.name) * 2 * 40 * 40 <= tiles.CELLS for tile in made)


def test_values_padded_and_written_back_are_the_same() -> None:
    """Catches: slots that do not belong to their tokens."""
    values = torch.randn(15, 3)
    out = torch.zeros_like(values)
    for tile in make_tiles(torch.tensor([0, 4, 4, 15]), heads=1):
        tile.unpad_into(out, tile.pad(values))
    assert torch.equal(out, values)
