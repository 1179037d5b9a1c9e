"""Sampled softmax in torch: as the public code gathers it, and in chunks of tokens, the best that torch alone does.

    loss = sum_t -log softmax([s(t, positive), s(t, negative 1..R)])[0],  s = cosine / temperature, hits masked

T tokens, c tokens of a chunk, R negatives, U rows, D width
"""

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-6
HIT = -5e4
Answer = tuple[Tensor, Tensor, Tensor]
"""Loss, gradient of the query [T, D], gradient of the rows [U, D]."""


def unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=EPS)


def gathered_loss(
    query: Tensor, rows: Tensor, positive: Tensor, negatives: Tensor, temperature: float, sparse: bool = False
) -> Tensor:
    """The public formulation: the negatives' rows [T, R, D] are gathered, normalised and multiplied, under autograd."""
    unit_query = unit(query)
    own = (unit_query * unit(F.embedding(positive, rows, sparse=sparse))).sum(1, keepdim=True) / temperature
    drawn = unit(F.embedding(negatives, rows, sparse=sparse))
    others = torch.bmm(drawn, unit_query.unsqueeze(2)).squeeze(2) / temperature
    others = torch.where(negatives == positive.unsqueeze(1), HIT, others)
    return -F.log_softmax(torch.cat((own, others), dim=1), dim=1)[:, 0].sum()


def gathered(
    query: Tensor, rows: Tensor, positive: Tensor, negatives: Tensor, temperature: float, sparse: bool = False
) -> Answer:
    """With `sparse`, the rows' gradient is sparse, summed by row."""
    query, rows = query.detach().requires_grad_(), rows.detach().requires_grad_()
    loss = gathered_loss(query, rows, positive, negatives, temperature, sparse)
    dquery, drows = torch.autograd.grad(loss, (query, rows))
    return loss.detach(), dquery, drows.coalesce() if sparse else drows


def gathered_in_chunks(
    query: Tensor, rows: Tensor, positive: Tensor, negatives: Tensor, temperature: float, chunk: int = 512
) -> Answer:
    """Rows normalised once, a chunk's rows [c, 1 + R, D] stay in the cache, forward and backward run at once."""
    unit_query, unit_rows = unit(query), unit(rows)
    dquery, drows, loss = torch.empty_like(query), torch.zeros_like(rows), query.new_zeros(())
    for start in range(0, len(query), chunk):
        part = slice(start, start + chunk)
        candidates = torch.cat((positive[part, None], negatives[part]), dim=1)
        gathered_rows = unit_rows.index_select(0, candidates.flatten()).view(*candidates.shape, -1)
        scores = torch.bmm(gathered_rows, unit_query[part].unsqueeze(2)).squeeze(2).div_(temperature)
        part_loss, slopes = _slopes(scores, candidates, temperature)
        loss += part_loss
        dquery[part] = torch.bmm(slopes.unsqueeze(1), gathered_rows).squeeze(1)
        torch.mul(slopes.unsqueeze(2), unit_query[part].unsqueeze(1), out=gathered_rows)
        drows.index_add_(0, candidates.flatten(), gathered_rows.flatten(0, 1))
    return loss, _through_norm(dquery, query, unit_query), _through_norm(drows, rows, unit_rows)


def gathered_in_place_in_chunks(
    query: Tensor, rows: Tensor, positive: Tensor, negatives: Tensor, temperature: float, chunk: int = 64
) -> Answer:
    """The same without unit rows of the whole table: a chunk normalises its own. For large catalogues."""
    unit_query = unit(query)
    dquery, drows, loss = torch.empty_like(query), torch.zeros_like(rows), query.new_zeros(())
    for start in range(0, len(query), chunk):
        part = slice(start, start + chunk)
        candidates = torch.cat((positive[part, None], negatives[part]), dim=1)
        own = rows.index_select(0, candidates.flatten()).view(*candidates.shape, -1)
        norm = torch.linalg.vector_norm(own, dim=2, keepdim=True).clamp_(min=EPS)
        own.div_(norm)
        cosines = torch.bmm(own, unit_query[part].unsqueeze(2)).squeeze(2)
        part_loss, slopes = _slopes(cosines / temperature, candidates, temperature)
        loss += part_loss
        dquery[part] = torch.bmm(slopes.unsqueeze(1), own).squeeze(1)
        slopes = slopes.div_(norm.squeeze(2)).unsqueeze(2)
        own.mul_(slopes * cosines.unsqueeze(2)).neg_().addcmul_(slopes, unit_query[part].unsqueeze(1))
        drows.index_add_(0, candidates.flatten(), own.flatten(0, 1))
    return loss, _through_norm(dquery, query, unit_query), drows


def multiplied_in_chunks(
    query: Tensor, rows: Tensor, positive: Tensor, negatives: Tensor, temperature: float, chunk: int = 512
) -> Answer:
    """Every score of a chunk [c, U] by one GEMM, the candidates' picked out of it: for small catalogues."""
    unit_query, unit_rows = unit(query), unit(rows)
    dquery, drows, loss = torch.empty_like(query), torch.zeros_like(rows), query.new_zeros(())
    for start in range(0, len(query), chunk):
        part = slice(start, start + chunk)
        candidates = torch.cat((positive[part, None], negatives[part]), dim=1)
        square = unit_query[part] @ unit_rows.T
        part_loss, slopes = _slopes(square.gather(1, candidates).div_(temperature), candidates, temperature)
        loss += part_loss
        square.zero_().scatter_add_(1, candidates, slopes)
        dquery[part] = square @ unit_rows
        drows.addmm_(square.T, unit_query[part])
    return loss, _through_norm(dquery, query, unit_query), _through_norm(drows, rows, unit_rows)


def _slopes(scores: Tensor, candidates: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Loss of a chunk and dloss / dcosine [c, 1 + R], in place of the scores."""
    scores[:, 1:].masked_fill_(candidates[:, 1:] == candidates[:, :1], HIT)
    normaliser = torch.logsumexp(scores, dim=1, keepdim=True)
    loss = (normaliser.squeeze(1) - scores[:, 0]).sum()
    slopes = scores.sub_(normaliser).exp_()
    slopes[:, 0] -= 1.0
    return loss, slopes.div_(temperature)


def _through_norm(dunit: Tensor, x: Tensor, unit_x: Tensor) -> Tensor:
    """Gradient of x from that of x / |x|."""
    along = (dunit * unit_x).sum(1, keepdim=True)
    return torch.addcmul(dunit, unit_x, along, value=-1).div_(
        torch.linalg.vector_norm(x, dim=1, keepdim=True).clamp(min=EPS)
    )
