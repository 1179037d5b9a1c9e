"""Distinct ids of a batch.

n ids, U distinct
"""

import torch
from torch import Tensor


def distinct(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(distinct ids ascending [U], place of every id among them [n]).

    Marking a byte per row of the table beats sorting as long as the table is not much larger than the batch.
    """
    if num_rows > 32 * len(ids):
        unique, inverse = torch.unique(ids, return_inverse=True)
        return unique, inverse
    seen = torch.zeros(num_rows, dtype=torch.bool, device=ids.device)
    seen[ids] = True
    place = torch.cumsum(seen, 0, dtype=torch.int32) - 1
    return seen.nonzero().squeeze(1), place[ids].long()
