"""Jagged batches and their way to and from torch.nested."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turbogr.jagged import Jagged, last_of_rows, offsets_of, position_in_row, row_of_token


@given(st.lists(st.integers(0, 6), max_size=8))
def test_rows_offsets_and_places_fit_together(lengths: list[int]) -> None:
    """Catches: offsets off by one, empty rows that shift what comes after them."""
    offsets = offsets_of(torch.tensor(lengths, dtype=torch.int64))
    tokens = sum(lengths)
    batch = Jagged(torch.arange(tokens), offsets)
    assert batch.lengths.tolist() == lengths
    wanted = [(row, place) for row, length in enumerate(lengths) for place in range(length)]
    got = zip(row_of_token(offsets, tokens).tolist(), position_in_row(offsets, tokens).tolist(), strict=True)
    assert list(got) == wanted
    assert [len(row) for row in batch.rows()] == lengths
    assert [value for row in batch.rows() for value in row.tolist()] == list(range(tokens))


def test_rows_are_packed_and_found_again() -> None:
    rows = [torch.randn(3, 2), torch.randn(0, 2), torch.randn(1, 2)]
    batch = Jagged.from_rows(rows)
    assert batch.offsets.tolist() == [0, 3, 3, 4]
    assert all(torch.equal(one, other) for one, other in zip(batch.rows(), rows, strict=True))


def test_padding_fills_behind_every_row() -> None:
    batch = Jagged(torch.arange(1.0, 5.0), torch.tensor([0, 3, 3, 4]))
    assert batch.to_padded(3, fill=-1.0).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]


def test_a_row_longer_than_the_padding_is_an_error() -> None:
    """Catches: tokens cut off without a word."""
    with pytest.raises(ValueError, match="a row has 3 tokens, more than max_len 2"):
        Jagged(torch.arange(4.0), torch.tensor([0, 3, 4])).to_padded(2)


def test_nested_shares_memory_and_comes_back() -> None:
    batch = Jagged(torch.randn(4, 2), torch.tensor([0, 3, 3, 4]))
    nested = batch.to_nested()
    assert nested.layout == torch.jagged and nested.values().data_ptr() == batch.values.data_ptr()
    back = Jagged.from_nested(nested)
    assert torch.equal(back.values, batch.values) and torch.equal(back.offsets, batch.offsets)


def test_the_last_token_of_every_row() -> None:
    assert last_of_rows(torch.tensor([0, 3, 4])).tolist() == [2, 3]
