"""How far two tensors are apart: relative root mean square error, one number for a whole tensor."""

import torch
from torch import Tensor


def relative_rmse(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|, or |got - wanted| where nothing but zero is wanted; inf where got is not finite."""
    assert got.shape == wanted.shape, f"{list(got.shape)} instead of {list(wanted.shape)}"
    if not torch.isfinite(got).all():
        return float("inf")
    got, wanted = got.detach().double(), wanted.detach().double()
    error, size = (got - wanted).norm(), wanted.norm()
    return float(error / size) if size > 0 else float(error)


def assert_close(got: Tensor, wanted: Tensor, tolerance: float, what: str = "values") -> None:
    error = relative_rmse(got, wanted)
    assert error <= tolerance, f"{what} differ by {error:.3g}, more than {tolerance:.3g}"
