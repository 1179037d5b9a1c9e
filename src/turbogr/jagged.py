"""Jagged batches: rows of different length, packed without padding.

values  [T, ...]  the rows one after another; T is the number of real tokens
offsets [B+1]     int64; row b is values[offsets[b] : offsets[b+1]]

Nothing here but `rows` and `from_rows` waits for a device: where a size decides the shape of an answer, the caller
passes it. All of it is differentiable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Jagged:
    values: Tensor
    offsets: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def rows(self) -> list[Tensor]:
        return list(torch.split(self.values, self.lengths.tolist()))

    def to_padded(self, max_len: int, fill: float = 0.0) -> Tensor:
        """[B, max_len, ...]; longer rows are an error."""
        self._check_lengths(max_len)
        batch = len(self.offsets) - 1
        cells = _padded_cells(self.offsets, len(self.values), max_len)
        padded = _put(self.values, cells, batch * max_len, fill)
        return padded.view(batch, max_len, *self.values.shape[1:])

    @classmethod
    def from_padded(cls, padded: Tensor, offsets: Tensor, tokens: int) -> "Jagged":
        """The first offsets[b+1] - offsets[b] cells of every row of `padded` [B, max_len, ...]; `tokens` = T."""
        cells = _padded_cells(offsets, tokens, padded.shape[1])
        return cls(_take(padded.flatten(0, 1), cells), offsets)

    def last_tokens(self, fill: float = 0.0) -> Tensor:
        """[B, ...] the last token of every row, `fill` for an empty one."""
        shape = (len(self.offsets) - 1, *self.values.shape[1:])
        if not len(self.values):
            return self.values.new_full(shape, fill)
        # an empty row takes a neighbour's token, which is then replaced
        last = self.values.index_select(0, last_of_rows(self.offsets).clamp(min=0))
        return torch.where((self.lengths > 0).view(-1, *[1] * (last.dim() - 1)), last, fill)

    def _check_lengths(self, max_len: int) -> None:
        fits = (self.lengths <= max_len).all()
        if fits.device.type != "cpu":
            torch._assert_async(fits)  # a device says so when it gets there
        elif not fits:
            raise ValueError(f"a row has {int(self.lengths.max())} tokens, more than max_len {max_len}.")

    def to_nested(self) -> Tensor:
        """As a `torch.nested` tensor of layout jagged, sharing memory."""
        nested: Tensor = torch.nested.nested_tensor_from_jagged(self.values, self.offsets)
        return nested

    @classmethod
    def from_nested(cls, nested: Tensor) -> "Jagged":
        return cls(nested.values(), nested.offsets())  # type: ignore[attr-defined]

    @classmethod
    def from_rows(cls, rows: list[Tensor]) -> "Jagged":
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return cls(torch.cat(rows), offsets_of(lengths))


def concat_rows(parts: Sequence[Jagged]) -> Jagged:
    """Row b of the answer is row b of every part, one after the other. The parts have the same number of rows."""
    _check_same_rows([part.offsets for part in parts])
    offsets, place = _places_in_concat([part.offsets for part in parts], [len(part.values) for part in parts])
    return Jagged(_put(torch.cat([part.values for part in parts]), place, len(place)), offsets)


def split_rows(whole: Jagged, parts: Sequence[Tensor], tokens: Sequence[int]) -> list[Jagged]:
    """Cut every row into pieces, one for each part: what `concat_rows` joined.

    Args:
        parts: offsets int64 [B+1] of every part; their rows' lengths add up to those of `whole`.
        tokens: number of tokens of every part.
    """
    if sum(tokens) != len(whole.values) or len(parts) != len(tokens):
        raise ValueError(f"parts of {list(tokens)} tokens do not make up {len(whole.values)}.")
    _check_same_rows([whole.offsets, *parts])
    _, place = _places_in_concat(parts, tokens)
    pieces = torch.split(_take(whole.values, place), list(tokens))
    return [Jagged(values, offsets) for values, offsets in zip(pieces, parts, strict=True)]


def _check_same_rows(offsets: Sequence[Tensor]) -> None:
    rows = [len(one) - 1 for one in offsets]
    if not rows or len(set(rows)) > 1:
        raise ValueError(f"jagged parts must have the same number of rows, not {rows}.")


def _places_in_concat(parts: Sequence[Tensor], tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(offsets [B+1] of the concatenation, where each token of part 0, then of part 1, ... stands in it [T])."""
    offsets = torch.stack(tuple(parts)).sum(0)
    begin, places = offsets[:-1], []
    for own, count in zip(parts, tokens, strict=True):
        shift = begin - own[:-1]
        places.append(torch.arange(count, device=own.device) + shift[row_of_token(own, count)])
        begin = begin + own.diff()
    return offsets, torch.cat(places)


def _take(x: Tensor, place: Tensor) -> Tensor:
    """y[i] = x[place[i]]; the places are distinct."""
    y: Tensor = _Take.apply(x, place)  # type: ignore[no-untyped-call]
    return y


def _put(x: Tensor, place: Tensor, rows: int, fill: float = 0.0) -> Tensor:
    """y [rows, ...] with y[place[i]] = x[i], `fill` elsewhere; the places are distinct."""
    y: Tensor = _Put.apply(x, place, rows, fill)  # type: ignore[no-untyped-call]
    return y


class _Take(torch.autograd.Function):
    """Where places are distinct the gradient is a plain copy; torch's own would be a sum, ten times slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        ctx.rows = len(x)
        return x.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _put(dy, place, ctx.rows), None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, rows: int, fill: float) -> Tensor:
        ctx.save_for_backward(place)
        shape = (rows, *x.shape[1:])
        y = x.new_empty(shape) if rows == len(x) else x.new_full(shape, fill)
        return y.index_copy_(0, place, x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return _take(dy, place), None, None, None


def _padded_cells(offsets: Tensor, tokens: int, max_len: int) -> Tensor:
    """[T] where every token stands in a rectangle of rows of max_len cells."""
    row = row_of_token(offsets, tokens)
    return torch.arange(tokens, device=offsets.device) - offsets[row] + row * max_len


def offsets_of(lengths: Tensor) -> Tensor:
    """[B] lengths -> [B+1] offsets."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


def row_of_token(offsets: Tensor, tokens: int) -> Tensor:
    """[T] the row of every token; `tokens` = T is passed so that no device is waited for."""
    rows = torch.arange(len(offsets) - 1, device=offsets.device)
    return torch.repeat_interleave(rows, offsets.diff(), output_size=tokens)


def position_in_row(offsets: Tensor, tokens: int) -> Tensor:
    """[T] 0 for the first token of every row, counting up."""
    return torch.arange(tokens, device=offsets.device) - offsets[row_of_token(offsets, tokens)]


def last_of_rows(offsets: Tensor) -> Tensor:
    """[B] index of every row's last token (rows must not be empty)."""
    return offsets[1:] - 1
