"""Ranks that read batches of their own swap rows until all have the same work: one all-to-all, few tokens moved.

For sources where no rank knows what the others read. Which rows make up the global step does not change, nor does what
is drawn for them: a row keeps its number.

n rows of a rank, N of all ranks, T tokens, W ranks
"""

import numpy as np
import torch
from torch import Tensor

from turbogr.data.balance import rebalance
from turbogr.data.dealing import Cost
from turbogr.data.loader import Batch
from turbogr.data.store import places_of
from turbogr.ranks import Ranks

COLUMNS = 4  # items, targets, times, next times


def exchange_rows(batch: Batch, ranks: Ranks, cost: Cost, limit: int) -> tuple[Batch, int]:
    """(this rank's batch after the swap, tokens that moved between all ranks)."""
    counts = ranks.gather(torch.tensor([len(batch.users)])).flatten().tolist()
    own = np.stack([batch.numbers.numpy(), batch.users, np.asarray(batch.lengths, np.int64)], 1).reshape(-1, 3)
    facts = torch.cat(ranks.gather_rows(torch.from_numpy(own), counts)).numpy()  # [N, 3], the same on every rank
    holder = np.repeat(np.arange(ranks.world), counts)
    tokens = facts[:, 2]
    owner = rebalance(cost(tokens), tokens, holder, ranks.world, limit)

    mine = np.flatnonzero(holder == ranks.rank)
    leaving = np.argsort(owner[mine], kind="stable")  # rows in the order of the ranks they go to
    _, place = places_of(batch.offsets.numpy()[:-1][leaving], own[leaving, 2])
    columns = torch.stack((batch.items, batch.targets, batch.times, batch.next_times), 1)  # [T, 4]
    send = _tokens_by_rank(owner[mine], tokens[mine], ranks.world)
    coming = np.flatnonzero(owner == ranks.rank)  # in the order of the ranks they come from
    receive = _tokens_by_rank(holder[coming], tokens[coming], ranks.world)
    arrived = ranks.swap(
        columns[torch.from_numpy(place)].flatten(), [COLUMNS * n for n in send], [COLUMNS * n for n in receive]
    )
    moved = int(tokens[owner != holder].sum())
    return _in_order(facts[coming], arrived.view(-1, COLUMNS)), moved


def _tokens_by_rank(rank_of_row: np.ndarray, tokens: np.ndarray, world: int) -> list[int]:
    return [int(count) for count in np.bincount(rank_of_row, weights=tokens, minlength=world)]


def _in_order(facts: np.ndarray, columns: Tensor) -> Batch:
    """A batch of rows in the order of their numbers, whatever the rank that each came from."""
    first = np.cumsum(facts[:, 2]) - facts[:, 2]
    order = np.argsort(facts[:, 0], kind="stable")
    facts = facts[order]
    offsets, place = places_of(first[order], facts[:, 2])
    items, targets, times, next_times = columns[torch.from_numpy(place)].T.contiguous()
    return Batch(
        users=facts[:, 1].copy(),
        lengths=facts[:, 2].tolist(),
        numbers=torch.from_numpy(facts[:, 0].copy()),
        offsets=torch.from_numpy(offsets),
        items=items,
        targets=targets,
        times=times,
        next_times=next_times,
    )
