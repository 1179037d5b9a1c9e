"""The encoders' input: item embedding * sqrt(D) + learned position, then dropout.

T tokens, D width
"""

import math

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.checks import check_below, check_whole_numbers, kind
from turbogr.ops.dropout import Noise, check_noise, mask_of
from turbogr.ops.dropout.reference import Mask
from turbogr.ops.graph_operator import GraphOperator, watched
from turbogr.ops.position_input import cpu
from turbogr.ops.position_input.reference import input_gradients, input_reference
from turbogr.ops.registry import Backend, register

OPERATOR = register(
    "position_input",
    Backend("cpu", cpu.input_cpu, native.rejects("dropout")),
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
    if x.dim() != 2:
        raise ValueError(f"x is {kind(x)}, wanted [T, D].")
    if table.dim() != 2 or table.shape[1] != x.shape[1]:
        raise ValueError(f"table is {kind(table)}, wanted [max_len, {x.shape[1]}].")
    check_whole_numbers("positions", positions, len(x))
    check_noise(dropout, noise, len(x))
    scale, mask = math.sqrt(x.shape[1]), mask_of(dropout, noise, 0)
    if watched():
        return GRAPH_OPERATOR(x, table, positions, scale, mask, backend)
    check_below("positions", positions, len(table))
    chosen, _ = OPERATOR.pick(x.device, backend)
    out: Tensor = chosen.run(x, table, positions, scale, mask)
    return out


def _graph_forward(
    x: Tensor, table: Tensor, positions: Tensor, scale: float, mask: Mask | None, backend: str | None
) -> list[Tensor]:
    check_below("positions", positions, len(table))
    compiled = OPERATOR.pick(x.device, backend)[0].name == "cpu"
    return [(cpu.forward if compiled else input_reference)(x, table, positions, scale, mask)]


def _graph_backward(
    dout: Tensor,
    kept: list[Tensor],
    table: Tensor,
    positions: Tensor,
    scale: float,
    mask: Mask | None,
    backend: str | None,
) -> list[Tensor | None]:
    compiled = OPERATOR.pick(dout.device, backend)[0].name == "cpu"
    return list((cpu.backward if compiled else input_gradients)(dout, table, positions, scale, mask))


def _graph_fake(x: Tensor, table: Tensor, *_: object) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=torch.promote_types(x.dtype, table.dtype), device=x.device)]


GRAPH_OPERATOR = GraphOperator(
    "position_input", _graph_forward, _graph_backward, fake=_graph_fake, gradients=("x", "table")
)
