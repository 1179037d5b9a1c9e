"""Rows handed out to the places that ask for them.

n places, U rows, D width
"""

from typing import Any

import torch
from torch import Tensor

from turbogr.ops.checks import check_whole_numbers, kind
from turbogr.ops.embedding.backends import Kernels, kernels
from turbogr.ops.graph_operator import watched


def take_rows(rows: Tensor, places: Tensor, *, backend: str | None = None) -> Tensor:
    """rows[places], [n, D]; its gradient for rows [U, D] is dense, summed by row in the occurrences' order.

    As `torch.index_select`, whose backward adds one occurrence after the other to memory; this one groups them first
    and sums in registers, to the same bits for any number of threads.

    Example:
        >>> rows = torch.eye(3, requires_grad=True)
        >>> take_rows(rows, torch.tensor([2, 0, 2])).sum().backward()
        >>> rows.grad[:, 0].tolist()
        [1.0, 0.0, 2.0]
    """
    if rows.dim() != 2 or not rows.is_floating_point():
        raise ValueError(f"rows is {kind(rows)}, wanted floating-point [U, D].")
    check_whole_numbers("places", places, places.numel())
    if watched():
        return torch.index_select(rows, 0, places)
    taken: Tensor = TakeRowsFunction.apply(kernels(rows, backend), rows, places)  # type: ignore[no-untyped-call]
    return taken


class TakeRowsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chosen: Kernels, rows: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.chosen, ctx.count = chosen, len(rows)
        return chosen.lookup([rows], places, [0, len(places)])[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        (places,) = ctx.saved_tensors
        return None, ctx.chosen.sum_groups(gradient, ctx.chosen.group(places, ctx.count)), None
