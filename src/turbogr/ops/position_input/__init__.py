"""The encoders' input: item embedding * sqrt(D) + learned position, then dropout.

T tokens, D width
"""

import math

from torch import Tensor

from turbogr.ops import native
from turbogr.ops.dropout import Noise, mask_of
from turbogr.ops.position_input.cpu import input_cpu
from turbogr.ops.position_input.reference import input_reference
from turbogr.ops.registry import Backend, register

OPERATOR = register(
    "position_input",
    Backend("cpu", input_cpu, native.rejects("dropout")),
    Backend("reference", input_reference),
)


def position_input(
    x: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    dropout: float = 0.0,
    noise: Noise | None = None,
    backend: str | None = None,
) -> Tensor:
    """[T, D], with gradients for x [T, D] and table [max_len, D]; positions int64 [T] are its rows.

    Example:
        >>> position_input(torch.randn(3, 8), torch.randn(16, 8), torch.tensor([0, 1, 0])).shape
        torch.Size([3, 8])
    """
    if x.shape[1:] != table.shape[1:] or positions.shape != x.shape[:1]:
        raise ValueError(
            f"x {list(x.shape)}, table {list(table.shape)} and positions {list(positions.shape)} do not fit: "
            "[T, D], [max_len, D] and [T] are wanted."
        )
    chosen, _ = OPERATOR.pick(x.device, backend)
    out: Tensor = chosen.run(x, table, positions, math.sqrt(x.shape[1]), mask_of(dropout, noise, 0))
    return out
