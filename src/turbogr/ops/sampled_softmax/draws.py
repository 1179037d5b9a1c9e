"""Negatives that are not drawn yet: a pure function of the tokens' places, for whoever needs their ids.

T tokens, R negatives, N rows of a table, U distinct ones that are read, D width
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from turbogr.ops.embedding import distinct, embedding_lookup
from turbogr.ops.philox import Key, random_below

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
        if isinstance(negatives, Tensor):
            return loss(query, rows, positive, negatives, temperature, log_q, eps)
        unique, places = distinct(torch.cat((positive, negatives.ids().flatten())), len(rows))
        (own,) = embedding_lookup([rows], unique, torch.tensor([0, len(unique)], device="cpu"))
        log_q = None if log_q is None else log_q[unique]
        own_positive, own_negatives = places[: len(positive)], places[len(positive) :].view(-1, negatives.count)
        return loss(query, own, own_positive, own_negatives, temperature, log_q, eps)

    return run


def sparse_rows(ids: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """Gradient of a table [N, D] from its touched rows [U], ascending, as `embedding_lookup` answers it."""
    return torch.sparse_coo_tensor(ids.unsqueeze(0), values, shape, check_invariants=False, is_coalesced=True)
