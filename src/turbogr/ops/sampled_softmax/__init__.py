"""Sampled softmax over the positive and R negatives of every token, on L2-normalised vectors.

c(t, r) = normalise(query_t) . normalise(rows[candidate(t, r)]) / temperature  - log_q[candidate(t, r)]
loss_t = -c(t, 0) + logsumexp_r c(t, r)       candidate 0 is the positive; a negative equal to it is left out
answer: sum_t loss_t and, for diagnosis, every loss_t

T tokens, R negatives, U rows, D width
"""

import math
from typing import Any

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_whole_numbers, kind
from turbogr.ops.graph_operator import GraphOperator, watched
from turbogr.ops.registry import Backend, register
from turbogr.ops.sampled_softmax.cpu import loss_cpu
from turbogr.ops.sampled_softmax.draws import UniformDraws, by_ids
from turbogr.ops.sampled_softmax.reference import loss_reference
from turbogr.ops.sampled_softmax.sparse import loss_sparse
from turbogr.ops.triton_support import late, rejects_triton

__all__ = ["OPERATOR", "UniformDraws", "sampled_softmax"]

OPERATOR = register(
    "sampled_softmax",
    Backend("triton", late("turbogr.ops.sampled_softmax.triton", "loss_triton"), rejects_triton),
    Backend("cpu", loss_cpu, native.rejects("sampled_softmax")),
    Backend("sparse", by_ids(loss_sparse)),
    Backend("reference", by_ids(loss_reference)),
)


def sampled_softmax(
    query: Tensor,
    rows: Tensor,
    positive: Tensor,
    negatives: Tensor | UniformDraws,
    *,
    temperature: float,
    log_q: Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """(sum of losses, losses [T] without gradient).

    Args:
        query: [T, D]. rows: [U, D], distinct items.
        positive: int64 [T], negatives: int64 [T, R]; indices into `rows`. Or `UniformDraws`: the negatives are drawn
            inside, `rows` is a whole table that is read in place, and its gradient is a coalesced sparse tensor, as
            that of `embedding_lookup` (dense in a graph of torch.compile). R may be 0: then every loss is.
        temperature: divides the cosine.
        log_q: [U] log of every row's sampling probability, or None for no correction.
        eps: smallest norm that is divided by.
        backend: triton | cpu | sparse | reference; None picks.

    Example:
        >>> loss, each = sampled_softmax(torch.randn(3, 8), torch.randn(9, 8), torch.tensor([0, 1, 2]),
        ...                              torch.randint(0, 9, (3, 4)), temperature=0.05)
    """
    _check(query, rows, positive, negatives, temperature, log_q, eps)
    negatives = negatives if isinstance(negatives, Tensor) else negatives.contiguous()
    if watched():
        given, draws = (negatives, None) if isinstance(negatives, Tensor) else (None, negatives)
        wanted = torch.is_grad_enabled() and (query.requires_grad or rows.requires_grad)
        found = GRAPH_OPERATOR.answers(query, rows, positive, given, draws, temperature, log_q, eps, wanted, backend)
        return found[0], found[1].detach()
    chosen, _ = OPERATOR.pick(query.device, backend)
    total, losses = chosen.run(query, rows, positive, negatives, temperature, log_q, eps)
    return total, losses


def _check(
    query: Tensor,
    rows: Tensor,
    positive: Tensor,
    negatives: Tensor | UniformDraws,
    temperature: float,
    log_q: Tensor | None,
    eps: float,
) -> None:
    if query.dim() != 2 or not query.shape[1] or not query.is_floating_point():
        raise ValueError(f"query is {kind(query)}, wanted floating-point [T, D] with D at least 1.")
    tokens, width = query.shape
    if rows.dim() != 2 or rows.shape[1] != width or not rows.is_floating_point():
        raise ValueError(f"rows is {kind(rows)}, wanted floating-point [U, {width}].")
    if tokens and not len(rows):
        raise ValueError(f"rows is {kind(rows)}, wanted at least one row for {tokens} tokens.")
    check_whole_numbers("positive", positive, tokens)
    if isinstance(negatives, UniformDraws):
        negatives.check(tokens, len(rows))
    elif negatives.dtype != torch.int64 or negatives.dim() != 2 or len(negatives) != tokens:
        raise ValueError(f"negatives is {kind(negatives)}, wanted int64 [{tokens}, R].")
    if log_q is not None and (log_q.shape != (len(rows),) or not log_q.is_floating_point()):
        raise ValueError(f"log_q is {kind(log_q)}, wanted floating-point [{len(rows)}].")
    for name, number in (("temperature", temperature), ("eps", eps)):
        if not 0.0 < number < math.inf:
            raise ValueError(f"{name} is {number}, wanted a number above 0.")


def _graph_forward(
    query: Tensor,
    rows: Tensor,
    positive: Tensor,
    given: Tensor | None,
    draws: UniformDraws | None,
    temperature: float,
    log_q: Tensor | None,
    eps: float,
    wanted: bool,
    backend: str | None,
) -> list[Tensor]:
    """[total, losses], and the gradients where they are wanted: they are found on the way."""
    negatives = given if draws is None else draws
    chosen, _ = OPERATOR.pick(query.device, backend)
    leaves = [x.detach().requires_grad_(wanted) for x in (query, rows)]
    with torch.set_grad_enabled(wanted):
        total, losses = chosen.run(*leaves, positive, negatives, temperature, log_q, eps)
    if not wanted:
        return [total, losses]
    dquery, drows = torch.autograd.grad(total, leaves)
    return [total.detach(), losses.detach(), dquery, drows.to_dense()]


def _graph_backward(dout: Tensor, kept: list[Tensor], query: Tensor, rows: Tensor) -> list[Tensor | None]:
    _, dquery, drows = kept
    return [dquery * dout, drows * dout]


def _graph_fake(query: Tensor, rows: Tensor, *others: Any) -> list[Tensor]:
    wide = torch.promote_types(torch.promote_types(query.dtype, rows.dtype), torch.float32)
    answers = [query.new_empty((), dtype=wide), query.new_empty(len(query), dtype=wide)]
    return [*answers, torch.empty_like(query), torch.empty_like(rows)] if others[-2] else answers


GRAPH_OPERATOR = GraphOperator(
    "sampled_softmax", _graph_forward, _graph_backward, fake=_graph_fake, gradients=("query", "rows")
)
