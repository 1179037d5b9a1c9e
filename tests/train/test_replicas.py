"""How copies of a table add up their gradients."""

from typing import Any

import torch

from tests.support.ranks import on_ranks
from turbogr.ranks import Ranks
from turbogr.tables import RowGradients
from turbogr.train import replicas
from turbogr.train.replicas import Replicas, owners_pay

ROWS, DIM = 41, 3


def gradients_of(rank: int) -> RowGradients:
    """Rank 2 has touched nothing."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randperm(ROWS, generator=generator)[: 0 if rank == 2 else 12 + rank].sort().values
    return RowGradients(ids, torch.randn(len(ids), DIM, generator=generator))


def summed(ranks: Ranks, by_owners: bool) -> dict[str, Any]:
    replicas.owners_pay = lambda counts, rows: by_owners  # type: ignore[attr-defined]
    total = Replicas(ranks, ranks, []).sum_rows(gradients_of(ranks.rank), ROWS)
    return {"ids": total.ids, "values": total.values}


def test_both_ways_give_every_copy_the_same_bits() -> None:
    """Catches: runs of rows that overlap, an order of addition that differs between the ways or the copies, a copy
    without rows."""
    wanted = RowGradients.merged([gradients_of(rank) for rank in (0, 1, 3)], ROWS)
    for by_owners in (False, True):
        for total in on_ranks(4, summed, by_owners):
            assert torch.equal(total["ids"], wanted.ids) and torch.equal(total["values"], wanted.values)


def test_owners_sum_where_many_copies_touch_the_same_rows() -> None:
    """Catches: lists of all sent to all where most of them name the same rows."""
    assert owners_pay([900] * 16, 1000)
    assert not owners_pay([10, 10], 10_000)
