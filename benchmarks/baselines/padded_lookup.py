"""Lookup in several embedding tables, one table after the other, padding included.

Every table t gets a padded rectangle of ids [b_t, N], 0 standing for padding (row 0, without a gradient).
D width
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def forward(tables: Sequence[Tensor], ids: Sequence[Tensor]) -> list[Tensor]:
    """[b_t, N, D] of every table."""
    return [F.embedding(own, table, padding_idx=0) for table, own in zip(tables, ids, strict=True)]


def backward(tables: Sequence[Tensor], ids: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Dense gradient of every table, as autograd computes it for `forward`."""
    return [
        torch.ops.aten.embedding_dense_backward(gradient, own, len(table), 0, False)
        for table, own, gradient in zip(tables, ids, gradients, strict=True)
    ]


def backward_index_add(tables: Sequence[Tensor], ids: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """The same by index_add, for where that is faster."""
    answers = []
    for table, own, gradient in zip(tables, ids, gradients, strict=True):
        total = torch.zeros_like(table).index_add_(0, own.flatten(), gradient.flatten(0, 1))
        total[0] = 0.0
        answers.append(total)
    return answers
