"""The encoders' input by the formula, in torch."""

import torch
from torch import Tensor

from turbogr.ops.dropout.reference import Mask, drop


def input_reference(x: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None) -> Tensor:
    out = x * scale + table[positions]
    return out if mask is None else drop(out, mask)


def input_gradients(
    dout: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None
) -> tuple[Tensor, Tensor]:
    """Of x and of the table."""
    dropped = dout if mask is None else drop(dout, mask)
    # unlike index_add_, the same sums at every run on an accelerator, too
    dtable = torch.zeros_like(table).index_put_((positions,), dropped.to(table.dtype), accumulate=True)
    return dropped * scale, dtable
