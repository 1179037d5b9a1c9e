"""Jagged batches and their way to and from torch.nested."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turbogr.jagged import (
    Jagged,
    concat_rows,
    last_of_rows,
    offsets_of,
    position_in_row,
    row_of_token,
    split_rows,
)

LENGTHS = st.lists(st.lists(st.one_of(st.just(0), st.integers(0, 5)), min_size=3, max_size=3), max_size=6)
"""Of every row, its lengths in three jagged parts; no row, and empty rows and parts, among them."""


def parts_of(lengths: list[list[int]], width: int = 2) -> list[Jagged]:
    """Three parts of float64 leaves with as many rows."""
    parts = []
    for number in range(3):
        own = torch.tensor([row[number] for row in lengths], dtype=torch.int64)
        parts.append(Jagged(torch.randn(int(own.sum()), width).double().requires_grad_(), offsets_of(own)))
    return parts


def gradients(out: torch.Tensor, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of a loss that tells every value from every other."""
    return list(torch.autograd.grad((out * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum(), leaves))


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


@given(LENGTHS)
def test_rows_are_joined_one_part_after_the_other(lengths: list[list[int]]) -> None:
    """Catches: rows of the second part that land behind the wrong row, gradients that go to another token."""
    parts = parts_of(lengths)
    joined = concat_rows(parts)
    rows = [[part.rows()[b] for part in parts] for b in range(len(lengths))]
    wanted = torch.cat([torch.cat(row) for row in rows]) if rows else torch.zeros(0, 2).double()
    assert torch.equal(joined.values, wanted)
    assert joined.lengths.tolist() == [sum(row) for row in lengths]
    leaves = [part.values for part in parts]
    if rows:
        for got, one in zip(gradients(joined.values, leaves), gradients(wanted, leaves), strict=True):
            assert torch.equal(got, one)


@given(LENGTHS)
def test_splitting_takes_apart_what_was_joined(lengths: list[list[int]]) -> None:
    """Catches: pieces cut at another part's lengths, gradients of one piece that reach the others."""
    parts = parts_of(lengths)
    joined = concat_rows(parts).values.detach().requires_grad_()
    offsets = concat_rows(parts).offsets
    pieces = split_rows(Jagged(joined, offsets), [p.offsets for p in parts], [len(p.values) for p in parts])
    for piece, part in zip(pieces, parts, strict=True):
        assert torch.equal(piece.values, part.values) and torch.equal(piece.offsets, part.offsets)
    again = concat_rows([Jagged(piece.values * (n + 1), piece.offsets) for n, piece in enumerate(pieces)]).values
    factors = torch.tensor([[n + 1.0] for row in lengths for n, length in enumerate(row) for _ in range(length)])
    (got,) = torch.autograd.grad(again.sum(), [joined])
    assert torch.equal(got, factors.double().view(-1, 1).expand_as(joined))


def test_a_gradient_of_the_gradient_passes_through() -> None:
    """Catches: a backward that is not recorded, which would answer zero instead of raising."""
    parts = parts_of([[1, 2, 0], [0, 3, 1]])
    leaves = tuple(part.values for part in parts)

    def joined(*values: torch.Tensor) -> torch.Tensor:
        whole = concat_rows([Jagged(x, part.offsets) for x, part in zip(values, parts, strict=True)])
        return whole.to_padded(5).sin()

    assert torch.autograd.gradgradcheck(joined, leaves)


def test_parts_with_different_numbers_of_rows_are_refused() -> None:
    one, other = (Jagged(torch.zeros(2), torch.tensor(offsets)) for offsets in ([0, 2], [0, 1, 2]))
    with pytest.raises(ValueError, match=r"same number of rows, not \[1, 2\]"):
        concat_rows([one, other])
    with pytest.raises(ValueError, match=r"parts of \[1, 2\] tokens do not make up 2"):
        split_rows(one, [one.offsets, one.offsets], [1, 2])


@given(LENGTHS)
def test_padding_and_back_keeps_values_and_gradients(lengths: list[list[int]]) -> None:
    """Catches: a row that begins in its neighbour's cells, a gradient of the fill that reaches a token."""
    batch = parts_of(lengths)[0]
    padded = batch.to_padded(6, fill=7.0)
    rows = batch.rows()
    assert padded.shape == (len(lengths), 6, 2)
    for b, row in enumerate(rows):
        assert torch.equal(padded[b, : len(row)], row) and bool((padded[b, len(row) :] == 7.0).all())
    back = Jagged.from_padded(padded, batch.offsets, len(batch.values))
    assert torch.equal(back.values, batch.values)
    weights = torch.randn_like(padded)
    (got,) = torch.autograd.grad((padded * weights).sum(), [batch.values])
    assert torch.equal(got, Jagged.from_padded(weights, batch.offsets, len(batch.values)).values)
    leaf = padded.detach().requires_grad_()
    (dpadded,) = torch.autograd.grad(Jagged.from_padded(leaf, batch.offsets, len(got)).values, [leaf], got)
    assert torch.equal(dpadded, Jagged(got, batch.offsets).to_padded(6))


@given(LENGTHS)
def test_the_last_tokens_of_empty_rows_are_the_fill(lengths: list[list[int]]) -> None:
    """Catches: an empty row that answers its neighbour's token, or sends a gradient there."""
    batch = parts_of(lengths)[0]
    last = batch.last_tokens(fill=-3.0)
    filled = torch.full((2,), -3.0).double()
    wanted = [row[-1] if len(row) else filled for row in batch.rows()]
    assert last.tolist() == [row.tolist() for row in wanted]
    if len(batch.values):
        (got,) = torch.autograd.grad(last.sum(), [batch.values])
        spans = zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)
        ends = {end - 1 for begin, end in spans if end > begin}
        assert torch.equal(got[:, 0], torch.tensor([float(i in ends) for i in range(len(got))]).double())


def test_nothing_on_the_way_of_a_step_reads_a_device() -> None:
    """Catches: an .item() or a size that depends on values; a meta tensor has none, so either raises there."""
    lengths = torch.empty(3, dtype=torch.int64, device="meta")
    offsets = offsets_of(lengths)
    values = torch.empty(8, 2, device="meta", requires_grad=True)
    batch = Jagged(values, offsets)
    joined = concat_rows([batch, batch])
    pieces = split_rows(joined, [offsets, offsets], [8, 8])
    padded = pieces[1].to_padded(4)
    back = Jagged.from_padded(padded, offsets, 8)
    assert joined.values.shape == (16, 2) and padded.shape == (3, 4, 2) and back.values.shape == (8, 2)
    assert row_of_token(offsets, 8).shape == position_in_row(offsets, 8).shape == (8,)
    (back.values.sum() + batch.last_tokens().sum()).backward()
    assert values.grad is not None and values.grad.shape == values.shape
