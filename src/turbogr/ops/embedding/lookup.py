"""Lookup in several tables at once, its gradients by distinct id.

n ids, U distinct ids of a table, N rows of a table, D width
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.checks import check_whole_numbers, kind
from turbogr.ops.embedding.backends import Kernels, kernels
from turbogr.ops.graph_operator import GraphOperator, watched


def embedding_lookup(
    tables: Sequence[Tensor], ids: Tensor, offsets: Tensor, *, backend: str | None = None
) -> tuple[Tensor, ...]:
    """Rows of every table: answer t is tables[t][ids[offsets[t] : offsets[t+1]]], [n_t, D_t].

    The work is spread over all cores by ids, not by tables. The gradient of a table is a coalesced sparse tensor, as
    that of `nn.Embedding(sparse=True)` after coalescing: its distinct ids ascending, and for each the sum over its
    occurrences, to the same bits for any number of threads. In a graph of torch.compile it is dense, as every gradient
    there, and the tables are looked up one after the other.

    Args:
        tables: [N_t, D_t] each, of one type and device; widths may differ.
        ids: int64 [n] grouped by table, valid ones only. An id that its table does not have is an IndexError.
        offsets: int64 [tables + 1], on the CPU, because it says how large the answers are.
        backend: triton | cpu | reference; None picks.

    Example:
        >>> tables = [torch.randn(100, 8, requires_grad=True), torch.randn(20, 4)]
        >>> items, genres = embedding_lookup(tables, torch.tensor([5, 5, 99, 3]), torch.tensor([0, 3, 4]))
        >>> items.sum().backward()  # into `.grad`, which autograd does not mark as coalesced
        >>> tables[0].grad.coalesce().indices().tolist()
        [[5, 99]]
    """
    if not tables:
        raise ValueError("tables is empty, wanted one at least.")
    check_whole_numbers("ids", ids, ids.numel())
    check_whole_numbers("offsets", offsets, len(tables) + 1)
    for number, table in enumerate(tables):
        if table.dim() != 2 or not table.is_floating_point() or table.dtype != tables[0].dtype:
            raise ValueError(f"tables[{number}] is {kind(table)}, wanted floating-point [N, D], as all tables.")
        if table.device != ids.device:
            raise ValueError(f"tables[{number}] is on {table.device}, wanted it on {ids.device}, where the ids are.")
    if watched():
        return tuple(
            GRAPH_OPERATOR(table, ids, offsets, number, len(tables), backend) for number, table in enumerate(tables)
        )
    bounds = _bounds(offsets, len(ids))
    chosen = kernels(tables[0], backend)
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        rows: tuple[Tensor, ...] = EmbeddingLookupFunction.apply(chosen, ids, bounds, *tables)  # type: ignore[no-untyped-call]
        return rows
    return tuple(chosen.lookup(tables, ids, bounds))


def _bounds(offsets: Tensor, count: int) -> list[int]:
    bounds: list[int] = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != count or sorted(bounds) != bounds:
        raise ValueError(f"offsets must rise from 0 to the number of ids, {count}, not {bounds}.")
    return bounds


class EmbeddingLookupFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chosen: Kernels, ids: Tensor, bounds: list[int], *tables: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(ids)
        ctx.chosen, ctx.bounds, ctx.shapes = chosen, bounds, [table.shape for table in tables]
        ctx.set_materialize_grads(False)
        return tuple(chosen.lookup(tables, ids, bounds))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        answers: list[Tensor | None] = []
        for number, (shape, gradient) in enumerate(zip(ctx.shapes, gradients, strict=True)):
            if gradient is None or not ctx.needs_input_grad[3 + number]:
                answers.append(None)
                continue
            unique, values = _summed(ctx.chosen, ids[ctx.bounds[number] : ctx.bounds[number + 1]], gradient, shape[0])
            answers.append(
                torch.sparse_coo_tensor(unique.unsqueeze(0), values, shape, check_invariants=False, is_coalesced=True)
            )
        return None, None, None, *answers


def _summed(chosen: Kernels, ids: Tensor, gradients: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    unique, places = chosen.distinct(ids, num_rows)
    return unique, chosen.sum_groups(gradients, chosen.group(places, len(unique)))


def _graph_forward(
    table: Tensor, ids: Tensor, offsets: Tensor, number: int, count: int, backend: str | None
) -> list[Tensor]:
    bounds = _bounds(offsets, len(ids))
    own = ids[bounds[number] : bounds[number + 1]]
    return kernels(table, backend).lookup([table], own, [0, len(own)])


def _graph_backward(
    dout: Tensor,
    kept: list[Tensor],
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    number: int,
    count: int,
    backend: str | None,
) -> list[Tensor | None]:
    bounds = _bounds(offsets, len(ids))
    unique, values = _summed(kernels(table, backend), ids[bounds[number] : bounds[number + 1]], dout, len(table))
    return [torch.zeros_like(table).index_copy_(0, unique, values.to(table.dtype))]


def _graph_fake(
    table: Tensor, ids: Tensor, offsets: Tensor, number: int, count: int, backend: str | None
) -> list[Tensor]:
    rows = len(ids) if count == 1 else torch.library.get_ctx().new_dynamic_size()
    return [table.new_empty(rows, table.shape[1])]


GRAPH_OPERATOR = GraphOperator(
    "embedding_lookup", _graph_forward, _graph_backward, fake=_graph_fake, gradients=("table",)
)
