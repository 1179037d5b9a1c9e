"""Row optimizers: they change a table in place, given gradients by distinct id or, with `groups`, by occurrence.

A bf16 table is updated in fp32, from fp32 gradients and optimizer state, and stored by `rounding`; to the nearest
without one, where steps below half a bf16 step are lost.

n occurrences, U distinct ids, N rows of a table, D width; g the summed, scaled and clipped gradient of a row
"""

import torch
from torch import Tensor

from turbogr.ops.checks import check_whole_numbers, kind
from turbogr.ops.embedding.backends import AdamStep, Gradients, Rounding, kernels


def rowwise_adagrad(
    weight: Tensor,
    total: Tensor,
    gradients: Gradients,
    *,
    lr: float,
    eps: float,
    rounding: Rounding | None = None,
    backend: str | None = None,
) -> None:
    """On touched rows: total += mean(g^2);  weight -= lr * g / (sqrt(total) + eps).

    weight [N, D], total [N].

    Example:
        >>> weight, total = torch.zeros(3, 2), torch.zeros(3)
        >>> rowwise_adagrad(weight, total, Gradients(torch.tensor([1]), torch.ones(1, 2)), lr=0.5, eps=0.0)
        >>> weight.tolist()
        [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    """
    _check(weight, {"total": (total, weight.shape[:1])}, gradients, rounding)
    kernels(weight, backend).adagrad(weight, total, gradients, lr, eps, rounding)


def lazy_adam(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    *,
    rounding: Rounding | None = None,
    backend: str | None = None,
) -> None:
    """Adam on touched rows; the moments of the others stand still. weight, moment1, moment2 [N, D]."""
    _check(weight, {"moment1": (moment1, weight.shape), "moment2": (moment2, weight.shape)}, gradients, rounding)
    kernels(weight, backend).lazy_adam(weight, moment1, moment2, gradients, step, rounding)


def dense_adamw(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    *,
    rounding: Rounding | None = None,
    backend: str | None = None,
) -> None:
    """AdamW on every row, g = 0 where there is no gradient. weight, moment1, moment2 [N, D]."""
    _check(weight, {"moment1": (moment1, weight.shape), "moment2": (moment2, weight.shape)}, gradients, rounding)
    kernels(weight, backend).adamw(weight, moment1, moment2, gradients, step, rounding)


def _check(
    weight: Tensor, state: dict[str, tuple[Tensor, torch.Size]], gradients: Gradients, rounding: Rounding | None
) -> None:
    """`state`: what is kept beside the table, and the shape that it must have."""
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight is {kind(weight)}, wanted floating-point [N, D].")
    # moments and gradients of a table in half precision may be in single
    types = (weight.dtype, torch.float32)
    for name, (kept, shape) in {"weight": (weight, weight.shape), **state}.items():
        if kept.shape != shape or kept.dtype not in types or kept.device != weight.device:
            raise ValueError(f"{name} is {kind(kept)} on {kept.device}, wanted {_like(weight, shape)}.")
        if not kept.is_contiguous():
            raise ValueError(f"{name} has strides {kept.stride()}, wanted it contiguous: it is changed in place.")
    ids, values, groups = gradients.ids, gradients.values, gradients.groups
    check_whole_numbers("gradients.ids", ids, ids.numel())
    if groups is not None:
        groups.check(len(ids))
    shape = torch.Size((len(ids) if groups is None else len(groups.order), weight.shape[1]))
    if values.shape != shape or values.dtype not in types or values.device != weight.device:
        raise ValueError(f"gradients.values is {kind(values)} on {values.device}, wanted {_like(weight, shape)}.")
    if ids.device != weight.device:
        raise ValueError(f"gradients.ids is on {ids.device}, wanted it on {weight.device}, where the table is.")
    if rounding is not None and rounding.names is not None:
        check_whole_numbers("rounding.names", rounding.names, len(weight))
    if not gradients.distinct:
        _check_ids(ids, len(weight))


def _like(weight: Tensor, shape: torch.Size) -> str:
    return f"{str(weight.dtype).removeprefix('torch.')} {list(shape)} on {weight.device}"


def _check_ids(ids: Tensor, num_rows: int) -> None:
    """Distinct, ascending, and rows of the table; looked at on the CPU."""
    if not ids.is_cpu or not len(ids):
        return
    rises = ids[1:] > ids[:-1]
    if not bool(rises.all()):
        place = int((~rises).nonzero()[0])
        raise ValueError(
            f"gradients.ids go from {int(ids[place])} to {int(ids[place + 1])} at place {place}, wanted distinct "
            "ascending ids."
        )
    first, last = int(ids[0]), int(ids[-1])
    if first < 0 or last >= num_rows:
        raise ValueError(f"gradients.ids go from {first} to {last}, wanted 0 to {num_rows - 1}.")
