"""Jagged batches: rows of different length, packed without padding.

values  [T, ...]  the rows one after another; T is the number of real tokens
offsets [B+1]     int64; row b is values[offsets[b] : offsets[b+1]]
"""

from dataclasses import dataclass

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
        if len(self.lengths) and int(self.lengths.max()) > max_len:
            raise ValueError(f"a row has {int(self.lengths.max())} tokens, more than max_len {max_len}.")
        padded: Tensor = torch.nested.to_padded_tensor(
            self.to_nested(), fill, (len(self.lengths), max_len, *self.values.shape[1:])
        )
        return padded

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
