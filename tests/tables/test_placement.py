"""Where the rows of a sharded table lie."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from turbogr.tables.placement import Placement


@given(num_rows=st.integers(1, 500), ranks=st.integers(1, 9))
def test_every_row_lies_on_one_rank_and_finds_back(num_rows: int, ranks: int) -> None:
    """Catches: two ids at one place, a place without an id, runs that overlap or leave rows out."""
    ids = torch.arange(num_rows)
    places = [Placement(num_rows, rank, ranks) for rank in range(ranks)]
    positions = places[0].positions(ids)
    assert sorted(positions.tolist()) == ids.tolist()
    assert torch.equal(places[0].ids(positions), ids)
    held = [position for place in places for position in range(place.begin, place.end)]
    assert held == list(range(num_rows))
    assert places[0].bounds().tolist() == [place.begin for place in places] + [num_rows]


def test_regular_patterns_of_ids_fall_on_all_ranks_alike() -> None:
    """Catches: the most popular items, or every k-th one, on one rank."""
    place = Placement(1_000_000, 0, 8)
    for pattern in (torch.arange(1000), torch.arange(0, 800_000, 8), torch.arange(0, 1_000_000, 4096)):
        ranks = place.positions(pattern) // place.run
        counts = torch.bincount(ranks, minlength=8).float()
        assert counts.max() < 1.3 * counts.mean() and counts.min() > 0.7 * counts.mean()


def test_a_table_of_two_thousand_million_rows_does_not_overflow() -> None:
    place = Placement(2**31, 3, 5)
    ids = torch.tensor([0, 1, 2**31 - 1, 2**30 + 7])
    assert torch.equal(place.ids(place.positions(ids)), ids)
