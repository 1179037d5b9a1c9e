"""Distinct ids and the gradients that belong to them.

n ids or occurrences, U distinct ids, N rows of a table, D width
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from turbogr.ops.checks import check_below, check_whole_numbers, kind
from turbogr.ops.embedding.backends import Groups, Rounding, kernels


def distinct(ids: Tensor, num_rows: int | None, *, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """(distinct ids ascending [U], place of every id among them [n]) of int64 ids [n] in [0, num_rows), None: any.

    Example:
        >>> distinct(torch.tensor([7, 2, 7]), 10)
        (tensor([2, 7]), tensor([1, 0, 1]))
    """
    check_whole_numbers("ids", ids, ids.numel())
    return kernels(ids, backend).distinct(ids, num_rows)


def group(places: Tensor, count: int, *, backend: str | None = None) -> Groups:
    """Which occurrences belong to each of `count` places; places int64 [n] in [0, count), as `distinct` gives them."""
    check_whole_numbers("places", places, places.numel())
    check_below("places", places, count)
    return kernels(places, backend).group(places, count)


def sum_groups(values: Tensor, groups: Groups, *, backend: str | None = None) -> Tensor:
    """[U, D] the sums of values [n, D] by group, in the same order and to the same bits for any number of threads."""
    groups.check(groups.starts.numel() - 1)
    occurrences = len(groups.order)
    if values.dim() != 2 or len(values) != occurrences or not values.is_floating_point():
        raise ValueError(f"values is {kind(values)}, wanted floating-point [{occurrences}, D].")
    return kernels(values, backend).sum_groups(values, groups)


def merge_rows(
    ids: Sequence[Tensor], values: Sequence[Tensor], num_rows: int | None, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of several lists of rows as (distinct ids ascending [U], values [U, D]), added in the lists' order.

    Args:
        ids: int64 [u_k] each, distinct and ascending, in [0, num_rows), or any where it is None.
        values: [u_k, D] each.

    Example:
        >>> merge_rows([torch.tensor([1, 4]), torch.tensor([4])], [torch.ones(2, 1), torch.ones(1, 1)], 9)
        (tensor([1, 4]), tensor([[1.],
                [2.]]))
    """
    if not ids or len(ids) != len(values):
        raise ValueError(f"ids are {len(ids)} lists, values {len(values)}, wanted the same number, one at least.")
    for number, (own, part) in enumerate(zip(ids, values, strict=True)):
        if part.dim() != 2 or not part.is_floating_point():
            raise ValueError(f"values[{number}] is {kind(part)}, wanted floating-point [u, D].")
        if part.shape[1] != values[0].shape[1] or part.dtype != values[0].dtype:
            raise ValueError(f"values[{number}] is {kind(part)}, wanted the type and the width of {kind(values[0])}.")
        check_whole_numbers(f"ids[{number}]", own, len(part))
    unique, places = distinct(torch.cat(list(ids)), num_rows, backend=backend)
    parts = list(torch.split(places, [len(own) for own in ids]))
    return unique, kernels(values[0], backend).merge(parts, list(values), len(unique))


def all_finite(values: Tensor, *, backend: str | None = None) -> bool:
    """Whether there is neither an infinity nor a NaN. On an accelerator it waits for the answer."""
    if not values.is_floating_point():
        raise ValueError(f"values is {kind(values)}, wanted a floating-point tensor.")
    return kernels(values, backend).all_finite(values)


def round_rows(values: Tensor, rounding: Rounding, *, backend: str | None = None) -> Tensor:
    """bf16 [n, D] of fp32 values [n, D] as a bf16 table stores them; `rounding.names` [n] are the rows' names.

    Example:
        >>> from turbogr.ops.philox import Key, Purpose
        >>> drawn = round_rows(torch.full((1, 4096), 1 + 2**-9), Rounding(Key(0, 0, Purpose.ROUNDING)))
        >>> sorted(set(drawn.flatten().tolist()))  # a quarter of a bf16 step: up in one of four draws
        [1.0, 1.0078125]
    """
    if values.dim() != 2 or not values.is_floating_point():
        raise ValueError(f"values is {kind(values)}, wanted floating-point [n, D].")
    if rounding.names is not None:
        check_whole_numbers("rounding.names", rounding.names, len(values))
    return kernels(values, backend).round_rows(values, rounding)
