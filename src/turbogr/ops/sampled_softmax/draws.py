"""Negatives that are not drawn yet: a pure function of the tokens' places, for whoever needs their ids.

T tokens, R negatives, N rows of a table, U distinct ones that are read, D width
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from turbogr.ops.checks import check_whole_numbers
from turbogr.ops.embedding import distinct, embedding_lookup
from turbogr.ops.philox import Key, random_below

MAX_COUNT = 1 << 18
"""Draws of a token: their number has 16 bits of a counter's word, and a counter gives four."""
Loss = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class UniformDraws:
    """`count` items of `bound` for every token, drawn uniformly and with replacement."""

    key: Key
    users: Tensor
    """int64 [T] number of the token's user in the global step."""
    positions: Tensor
    """int64 [T] position in the user's row."""
    count: int
    bound: int

    def check(self, tokens: int, num_rows: int) -> None:
        """Refuse draws of other tokens than these, or from another table."""
        check_whole_numbers("negatives.users", self.users, tokens)
        check_whole_numbers("negatives.positions", self.positions, tokens)
        if not 0 <= self.count <= MAX_COUNT:
            raise ValueError(f"negatives.count is {self.count}, wanted 0 to {MAX_COUNT}.")
        if self.bound != num_rows:
            raise ValueError(f"negatives are drawn from {self.bound} items, the table has {num_rows} rows.")

    def contiguous(self) -> "UniformDraws":
        """The same draws, told by numbers that lie one after the other, as kernels read them."""
        return replace(self, users=self.users.contiguous(), positions=self.positions.contiguous())

    def ids(self) -> Tensor:
        """int64 [T, R]."""
        return random_below(self.key, self.users, self.positions, self.count, self.bound)


def by_ids(loss: Loss) -> Loss:
    """A backend that reads no table in place, taught to: it is given the distinct rows of what is drawn."""

    def run(
        query: Tensor,
        rows: Tensor,
        positive: Tensor,
        negatives: Tensor | UniformDraws,
        temperature: float,
        log_q: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        _check_candidates(positive, negatives, len(rows))
        if isinstance(negatives, Tensor):
            return loss(query, rows, positive, negatives, temperature, log_q, eps)
        unique, places = distinct(torch.cat((positive, negatives.ids().flatten())), len(rows))
        (own,) = embedding_lookup([rows], unique, torch.tensor([0, len(unique)], device="cpu"))
        log_q = None if log_q is None else log_q[unique]
        own_positive, own_negatives = places[: len(positive)], places[len(positive) :]
        own_negatives = own_negatives.view(len(positive), negatives.count)
        return loss(query, own, own_positive, own_negatives, temperature, log_q, eps)

    return run


def _check_candidates(positive: Tensor, negatives: Tensor | UniformDraws, num_rows: int) -> None:
    """Torch counts negative numbers from a table's end."""
    if not positive.is_cpu:
        return
    for ids in (positive.unsqueeze(1), negatives) if isinstance(negatives, Tensor) else (positive.unsqueeze(1),):
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= num_rows):
            token = int(((ids < 0) | (ids >= num_rows)).nonzero()[0, 0])
            raise IndexError(f"token {token} has a candidate that is none of the {num_rows} rows.")


def sparse_rows(ids: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Gradient of a table [N, D] from its touched rows [U], ascending, as `embedding_lookup` answers it."""
    return torch.sparse_coo_tensor(ids.unsqueeze(0), values, shape, check_invariants=False, is_coalesced=True)
