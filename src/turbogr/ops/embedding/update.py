"""Row optimizers: they change a table in place, given gradients by distinct id or, with `groups`, by occurrence.

n occurrences, U distinct ids, N rows of a table, D width; g the summed, scaled and clipped gradient of a row
"""

from torch import Tensor

from turbogr.ops.embedding.backends import AdamStep, Gradients, kernels


def rowwise_adagrad(
    weight: Tensor, total: Tensor, gradients: Gradients, *, lr: float, eps: float, backend: str | None = None
) -> None:
    """On touched rows: total += mean(g^2);  weight -= lr * g / (sqrt(total) + eps).

    weight [N, D], total [N].

    Example:
        >>> weight, total = torch.zeros(3, 2), torch.zeros(3)
        >>> rowwise_adagrad(weight, total, Gradients(torch.tensor([1]), torch.ones(1, 2)), lr=0.5, eps=0.0)
        >>> weight.tolist()
        [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    """
    _check(weight, gradients)
    kernels(weight, backend).adagrad(weight, total, gradients, lr, eps)


def lazy_adam(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    *,
    backend: str | None = None,
) -> None:
    """Adam on touched rows; the moments of the others stand still. weight, moment1, moment2 [N, D]."""
    _check(weight, gradients)
    kernels(weight, backend).lazy_adam(weight, moment1, moment2, gradients, step)


def dense_adamw(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    *,
    backend: str | None = None,
) -> None:
    """AdamW on every row, g = 0 where there is no gradient. weight, moment1, moment2 [N, D]."""
    _check(weight, gradients)
    kernels(weight, backend).adamw(weight, moment1, moment2, gradients, step)


def _check(weight: Tensor, gradients: Gradients) -> None:
    ids, values, groups = gradients.ids, gradients.values, gradients.groups
    rows = len(ids) if groups is None else len(groups.order)
    if values.shape != (rows, weight.shape[1]) or (groups is not None and len(groups.starts) != len(ids) + 1):
        raise ValueError(
            f"gradients {list(values.shape)} of {len(ids)} ids do not fit a table {list(weight.shape)}: [U, D] is "
            "wanted, or [n, D] with the groups of these ids."
        )
