"""The embedding operators in torch: what every other backend must agree with, and what other devices and types run.

n ids or occurrences, U distinct ids, N rows of a table, D width
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from turbogr.ops.embedding.backends import AdamStep, Gradients, Groups, Rounding
from turbogr.ops.philox import row_words


def lookup(tables: Sequence[Tensor], ids: Tensor, offsets: list[int]) -> list[Tensor]:
    sizes = [end - begin for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]
    return [F.embedding(own, table) for table, own in zip(tables, torch.split(ids, sizes), strict=True)]


def distinct(ids: Tensor, num_rows: int | None) -> tuple[Tensor, Tensor]:
    # marking a byte per row beats sorting as long as the table is not much larger than the batch
    if num_rows is None or num_rows > 32 * len(ids):
        unique, inverse = torch.unique(ids, return_inverse=True)
        return unique, inverse
    seen = torch.zeros(num_rows, dtype=torch.bool, device=ids.device)
    seen[ids] = True
    place = torch.cumsum(seen, 0, dtype=torch.int32) - 1
    return seen.nonzero().squeeze(1), place[ids].long()


def group(places: Tensor, count: int) -> Groups:
    order = torch.sort(places, stable=True).indices.to(torch.int32)
    starts = torch.zeros(count + 1, dtype=torch.int64, device=places.device)
    starts[1:] = torch.bincount(places, minlength=count).cumsum(0)
    return Groups(order, starts)


def sum_groups(values: Tensor, groups: Groups) -> Tensor:
    count = len(groups.starts) - 1
    group_of = torch.repeat_interleave(
        torch.arange(count, device=values.device), groups.starts.diff(), output_size=len(groups.order)
    )
    return values.new_zeros(count, values.shape[1]).index_add_(0, group_of, values[groups.order])


def merge(places: list[Tensor], values: list[Tensor], count: int) -> Tensor:
    total = values[0].new_zeros(count, values[0].shape[1])
    for own, part in zip(places, values, strict=True):
        # places are distinct within a part, so this adds in a fixed order
        total[own] += part
    return total


def all_finite(values: Tensor) -> bool:
    return bool(values.isfinite().all())


def _settled(gradients: Gradients) -> Tensor:
    """[U, D] summed, scaled and clipped."""
    values = gradients.values if gradients.groups is None else sum_groups(gradients.values, gradients.groups)
    values = values * gradients.scale
    if gradients.row_clip > 0:
        values = values * (gradients.row_clip / values.norm(dim=1, keepdim=True).clamp(min=gradients.row_clip))
    return values


def round_rows(values: Tensor, rounding: Rounding) -> Tensor:
    names = rounding.names if rounding.names is not None else torch.arange(len(values), device=values.device)
    chances = (row_words(rounding.key, names, values.shape[1]) >> 16).int()  # 16 bits, as many as are cut off
    up = (values.float().contiguous().view(torch.int32) + chances) & -0x10000
    return torch.where(values.isfinite(), up.view(torch.float32), values).bfloat16()


def _store(weight: Tensor, ids: Tensor | None, rows: Tensor, rounding: Rounding | None) -> None:
    """weight[ids] = rows, of the whole table where ids is None."""
    if rounding is not None and weight.dtype == torch.bfloat16:
        names = rounding.names if ids is None or rounding.names is None else rounding.names[ids]
        rows = round_rows(rows, replace(rounding, names=ids if names is None else names))
    if ids is None:
        weight.copy_(rows)
    else:
        weight[ids] = rows.to(weight.dtype)


def _wide(weight: Tensor) -> Tensor:
    """Halves are computed with in fp32."""
    return weight.float() if weight.element_size() == 2 else weight


def adagrad(
    weight: Tensor, total: Tensor, gradients: Gradients, lr: float, eps: float, rounding: Rounding | None = None
) -> None:
    ids, g = gradients.ids, _settled(gradients)
    summed = total[ids] + g.square().mean(1)
    total[ids] = summed
    rows = _wide(weight[ids]) - lr * g / (summed.sqrt() + eps).unsqueeze(1)
    _store(weight, ids, rows, rounding)


def lazy_adam(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    rounding: Rounding | None = None,
) -> None:
    ids, g = gradients.ids, _settled(gradients)
    own1 = torch.lerp(g, moment1[ids], step.betas[0])
    own2 = torch.lerp(g.square(), moment2[ids], step.betas[1])
    moment1[ids], moment2[ids] = own1, own2
    _store(weight, ids, _wide(weight[ids]) - _change(own1, own2, step), rounding)


def adamw(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    rounding: Rounding | None = None,
) -> None:
    ids, g = gradients.ids, _settled(gradients)
    moment1 *= step.betas[0]
    moment2 *= step.betas[1]
    moment1[ids] += (1 - step.betas[0]) * g
    moment2[ids] += (1 - step.betas[1]) * g.square()
    rows = _wide(weight)  # the table itself, unless it is of halves
    rows *= 1 - step.lr * step.weight_decay
    rows -= _change(moment1, moment2, step)
    if rows is not weight:
        _store(weight, None, rows, rounding)


def _change(moment1: Tensor, moment2: Tensor, step: AdamStep) -> Tensor:
    unbias1, unbias2 = step.unbias
    return (step.lr / unbias1) * moment1 / ((moment2 / unbias2).sqrt() + step.eps)
