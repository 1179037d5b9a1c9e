"""Sampled softmax as the formula reads: gathers [T, 1 + R, D], fine for tests and small batches."""

import torch
from torch import Tensor


def loss_reference(
    query: Tensor,
    rows: Tensor,
    positive: Tensor,
    negatives: Tensor,
    temperature: float,
    log_q: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    candidates = torch.cat((positive.unsqueeze(1), negatives), dim=1)  # [T, 1 + R]
    unit_query, unit_rows = normalise(query, eps), normalise(rows, eps)
    scores = torch.einsum("td,trd->tr", unit_query, unit_rows[candidates]) / temperature
    if log_q is not None:
        scores = scores - log_q[candidates]
    scores = scores.masked_fill(accidental_hits(candidates), -torch.inf)
    losses = torch.logsumexp(scores, dim=1) - scores[:, 0]
    return losses.sum(), losses.detach()


def normalise(x: Tensor, eps: float) -> Tensor:
    unit: Tensor = x / x.norm(dim=-1, keepdim=True).clamp(min=eps)
    return unit


def accidental_hits(candidates: Tensor) -> Tensor:
    """[T, 1 + R] True where a negative is the positive."""
    hits = candidates == candidates[:, :1]
    hits[:, 0] = False
    return hits
