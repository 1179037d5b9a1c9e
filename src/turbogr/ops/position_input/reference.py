"""The encoders' input by the formula, in torch."""

from torch import Tensor

from turbogr.ops.dropout.reference import Mask, drop


def input_reference(x: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None) -> Tensor:
    out = x * scale + table[positions]
    return out if mask is None else drop(out, mask)
