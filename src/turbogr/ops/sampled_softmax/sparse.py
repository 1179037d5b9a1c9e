"""Sampled softmax by sparse matrix products: the [T, U] score matrix with T * (1 + R) entries is never filled in.

Scores are a sampled dense-dense product, the gradients two sparse-dense ones; the rows' gradient first sorts the
entries by row, so every sum has a fixed order. Forward and backward run in one pass, because the answer is a sum: its
gradient is a scalar times what the forward already knows.
"""

import warnings
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.sampled_softmax.reference import accidental_hits

# torch says once per process that its sparse layout is in beta
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")


def loss_sparse(
    query: Tensor,
    rows: Tensor,
    positive: Tensor,
    negatives: Tensor,
    temperature: float,
    log_q: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    candidates = torch.cat((positive.unsqueeze(1), negatives), dim=1)
    total, losses = SampledSoftmaxFunction.apply(query, rows, candidates, temperature, log_q, eps)  # type: ignore[no-untyped-call]
    return total, losses


class SampledSoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, rows: Tensor, candidates: Tensor, temperature: float, log_q: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        unit_query, query_norm = _normalised(query.to(wide), eps)
        unit_rows, rows_norm = _normalised(rows.to(wide), eps)
        scores = _scores(unit_query, unit_rows, candidates) / temperature
        if log_q is not None:
            scores -= log_q.to(wide)[candidates]
        scores.masked_fill_(accidental_hits(candidates), -torch.inf)
        normaliser = torch.logsumexp(scores, dim=1)
        losses = normaliser - scores[:, 0]
        if any(ctx.needs_input_grad[:2]):
            slopes = (scores - normaliser.unsqueeze(1)).exp_()  # dloss / dscore [T, 1 + R]
            slopes[:, 0] -= 1.0
            slopes /= temperature
            dquery = _by_token(slopes, candidates, len(rows)) @ unit_rows
            drows = _by_row(slopes, candidates, len(rows)) @ unit_query
            ctx.save_for_backward(
                _through_norm(dquery, unit_query, query_norm, eps).to(query.dtype),
                _through_norm(drows, unit_rows, rows_norm, eps).to(rows.dtype),
            )
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        dquery, drows = ctx.saved_tensors
        return dquery * dtotal, drows * dtotal, None, None, None, None


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    norm = x.norm(dim=1, keepdim=True)
    return x / norm.clamp(min=eps), norm


def _through_norm(dunit: Tensor, unit: Tensor, norm: Tensor, eps: float) -> Tensor:
    """Gradient of x from that of x / max(|x|, eps)."""
    along = (dunit * unit).sum(1, keepdim=True) * unit
    return torch.where(norm > eps, dunit - along, dunit) / norm.clamp(min=eps)


def _sparse(starts: Tensor, columns: Tensor, values: Tensor, width: int) -> Tensor:
    # rows may hold a column twice, which the invariants forbid and every product here allows
    return torch.sparse_csr_tensor(starts, columns, values, (len(starts) - 1, width), check_invariants=False)


def _by_token(values: Tensor, candidates: Tensor, width: int) -> Tensor:
    """Sparse [T, U] with values [T, 1 + R] at the candidates."""
    tokens, count = candidates.shape
    starts = torch.arange(0, tokens * count + 1, count, dtype=torch.int32, device=values.device)
    return _sparse(starts, candidates.flatten().to(torch.int32), values.flatten(), width)


def _by_row(values: Tensor, candidates: Tensor, width: int) -> Tensor:
    """The same entries as a sparse [U, T], in token order within a row."""
    tokens, count = candidates.shape
    flat = candidates.flatten().to(torch.int32)
    order = torch.sort(flat, stable=True).indices
    starts = torch.zeros(width + 1, dtype=torch.int32, device=values.device)
    starts[1:] = torch.bincount(flat, minlength=width).cumsum(0)
    columns = torch.div(order, count, rounding_mode="floor").to(torch.int32)
    return _sparse(starts, columns, values.flatten()[order], tokens)


def _scores(unit_query: Tensor, unit_rows: Tensor, candidates: Tensor) -> Tensor:
    """[T, 1 + R] dot products at the candidates only."""
    # torch refuses a pattern with more entries than the matrix has cells, which repeats may bring about
    missing = max(candidates.shape[1] - len(unit_rows), 0)
    unit_rows = torch.nn.functional.pad(unit_rows, (0, 0, 0, missing)) if missing else unit_rows
    pattern = _by_token(unit_query.new_zeros(candidates.shape), candidates, len(unit_rows))
    filled: Tensor = torch.sparse.sampled_addmm(pattern, unit_query, unit_rows.t(), beta=0.0)
    return filled.values().view(candidates.shape)
