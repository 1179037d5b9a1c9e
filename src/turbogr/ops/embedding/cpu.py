"""The embedding operators compiled: native/src/embedding.cpp and embedding_update.cpp.

Rows are looked up in fp32 and bf16 and updated in both; gradients and states of optimizers are fp32.

n ids or occurrences, U distinct ids, N rows of a table, D width
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.embedding import reference
from turbogr.ops.embedding.backends import AdamStep, Gradients, Groups, Rounding
from turbogr.ops.native import address, function

SPARSE = 1024
"""A table with more rows than so many per id is not marked row by row to find the distinct ids: hashing is cheaper."""
SINGLE, HALF_NEAREST, HALF_BY_CHANCE = range(3)  # Kind in native/src/embedding_update.cpp

_KEY = (c_uint64, c_uint32, c_uint32)  # seed, step, purpose and table
_ROWS = (c_int64, c_int64, *[c_void_p] * 4, c_float, c_float, c_void_p, c_int32, *_KEY, c_void_p)
_SYMBOLS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "lookup": ("embedding", (c_int64, *[c_void_p] * 7)),
    "distinct": ("embedding", (c_int64, c_int64, *[c_void_p] * 4)),
    "distinct_any": ("embedding", (c_int64, *[c_void_p] * 4)),
    "group": ("embedding", (c_int64, c_int64, *[c_void_p] * 3)),
    "sum": ("embedding", (c_int64, c_int64, *[c_void_p] * 4)),
    "merge": ("embedding", (c_int64, *[c_void_p] * 3, c_int64, c_int64, c_void_p)),
    "finite": ("embedding", (c_int64, *[c_void_p] * 2)),
    "adagrad": ("embedding_update", (*_ROWS, c_void_p, *[c_float] * 2)),
    "lazy_adam": ("embedding_update", (*_ROWS, *[c_void_p] * 2, *[c_float] * 5)),
    "adamw": ("embedding_update", (c_int64, *_ROWS, *[c_void_p] * 2, *[c_float] * 6)),
    "round": ("embedding_update", (c_int64, c_int64, c_void_p, *_KEY, *[c_void_p] * 2)),
}


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    """embedding_NAME with its argument types; the last one is the number of threads."""
    library, types = _SYMBOLS[name]
    return function(library, f"embedding_{name}", *types, c_int)


def _call(name: str, *arguments: Any) -> None:
    _compiled(name)(*arguments, torch.get_num_threads())


def _numbers(values: Sequence[int]) -> Any:
    return (c_int64 * len(values))(*values)


def _addresses(tensors: Sequence[Tensor]) -> Any:
    return (c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))


def lookup(tables: Sequence[Tensor], ids: Tensor, offsets: list[int]) -> list[Tensor]:
    tables, ids = [table.contiguous() for table in tables], ids.contiguous()
    outs = [
        torch.empty(end - begin, table.shape[1], dtype=table.dtype)
        for table, begin, end in zip(tables, offsets[:-1], offsets[1:], strict=True)
    ]
    num_rows = [len(table) for table in tables]
    sizes = [table.shape[1] * table.element_size() for table in tables]
    bad = c_int64()
    _call(
        "lookup",
        len(tables),
        _addresses(tables),
        _numbers(num_rows),
        _numbers(sizes),
        _numbers(offsets),
        address(ids),
        _addresses(outs),
        ctypes.byref(bad),
    )
    if bad.value < len(ids):
        number = next(t for t, end in enumerate(offsets[1:]) if bad.value < end)
        raise _out_of_range(ids, bad.value, num_rows[number])
    return outs


def distinct(ids: Tensor, num_rows: int | None) -> tuple[Tensor, Tensor]:
    ids = ids.contiguous()
    if num_rows is None or num_rows > SPARSE * len(ids):
        return _distinct_any(ids)
    unique = torch.empty(min(len(ids), num_rows), dtype=torch.int64)
    inverse, counts = torch.empty(len(ids), dtype=torch.int64), _numbers([0, 0])
    _call("distinct", len(ids), num_rows, address(ids), address(unique), address(inverse), counts)
    if counts[1] < len(ids):
        raise _out_of_range(ids, counts[1], num_rows)
    return unique[: counts[0]], inverse


def _distinct_any(ids: Tensor) -> tuple[Tensor, Tensor]:
    assert len(ids) < 1 << 31
    unique, inverse = torch.empty_like(ids), torch.empty_like(ids)
    counts = _numbers([0])
    _call("distinct_any", len(ids), address(ids), address(unique), address(inverse), counts)
    return unique[: counts[0]], inverse


def _out_of_range(ids: Tensor, place: int, num_rows: int) -> IndexError:
    return IndexError(f"id {int(ids[place])} at place {place} is out of range for a table of {num_rows} rows.")


def group(places: Tensor, count: int) -> Groups:
    assert len(places) < 1 << 31
    places = places.contiguous()
    groups = Groups(torch.empty(len(places), dtype=torch.int32), torch.empty(count + 1, dtype=torch.int64))
    _call("group", len(places), count, address(places), address(groups.order), address(groups.starts))
    return groups


def sum_groups(values: Tensor, groups: Groups) -> Tensor:
    if values.dtype != torch.float32:
        return reference.sum_groups(values, groups)
    if not len(groups.order):  # nothing has no address, and none would mean that the values are summed already
        return values.new_zeros(len(groups.starts) - 1, values.shape[1])
    values, order, starts = values.contiguous(), groups.order.contiguous(), groups.starts.contiguous()
    out = torch.empty(len(starts) - 1, values.shape[1])
    _call("sum", *out.shape, address(values), address(order), address(starts), address(out))
    return out


def merge(places: list[Tensor], values: list[Tensor], count: int) -> Tensor:
    if values[0].dtype != torch.float32:
        return reference.merge(places, values, count)
    places, values = [own.contiguous() for own in places], [part.contiguous() for part in values]
    out = torch.empty(count, values[0].shape[1])
    counts = _numbers([len(own) for own in places])
    _call("merge", len(places), counts, _addresses(places), _addresses(values), *out.shape, address(out))
    return out


def all_finite(values: Tensor) -> bool:
    if values.dtype != torch.float32:
        return reference.all_finite(values)
    values, answer = values.contiguous(), c_int()
    _call("finite", values.numel(), address(values), ctypes.byref(answer))
    return bool(answer.value)


def round_rows(values: Tensor, rounding: Rounding) -> Tensor:
    values = values.float().contiguous()
    names = None if rounding.names is None else rounding.names.contiguous()
    out = torch.empty(values.shape, dtype=torch.bfloat16)
    _call("round", *values.shape, address(values), *_words(rounding), address(names), address(out))
    return out


def _words(rounding: Rounding) -> tuple[int, int, int]:
    key = rounding.key
    return key.seed, key.step, int(key.purpose) << 24 | key.layer


def adagrad(
    weight: Tensor, total: Tensor, gradients: Gradients, lr: float, eps: float, rounding: Rounding | None = None
) -> None:
    if total.dtype != torch.float32:
        return reference.adagrad(weight, total, gradients, lr, eps, rounding)
    _update("adagrad", (), gradients, (weight, total), (lr, eps), rounding)


def lazy_adam(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    rounding: Rounding | None = None,
) -> None:
    if moment1.dtype != torch.float32 or moment2.dtype != torch.float32:
        return reference.lazy_adam(weight, moment1, moment2, gradients, step, rounding)
    _update("lazy_adam", (), gradients, (weight, moment1, moment2), _scalars(step), rounding)


def adamw(
    weight: Tensor,
    moment1: Tensor,
    moment2: Tensor,
    gradients: Gradients,
    step: AdamStep,
    rounding: Rounding | None = None,
) -> None:
    if moment1.dtype != torch.float32 or moment2.dtype != torch.float32:
        return reference.adamw(weight, moment1, moment2, gradients, step, rounding)
    scalars = (*_scalars(step), 1 - step.lr * step.weight_decay)
    _update("adamw", (len(weight),), gradients, (weight, moment1, moment2), scalars, rounding)


def _scalars(step: AdamStep) -> tuple[float, ...]:
    unbias1, unbias2 = step.unbias
    return *step.betas, step.eps, step.lr / unbias1, 1 / unbias2


def _update(
    name: str,
    first: tuple[int, ...],
    gradients: Gradients,
    rows: tuple[Tensor, ...],
    scalars: tuple[float, ...],
    rounding: Rounding | None,
) -> None:
    weight, *state = rows
    # a copy would be updated in place of the table
    assert all(one.is_contiguous() for one in rows) and all(one.dtype == torch.float32 for one in state)
    ids, values, groups = gradients.ids.contiguous(), gradients.values.float().contiguous(), gradients.groups
    if groups is not None and not len(groups.order):
        values, groups = sum_groups(values, groups), None
    order, starts = (None, None) if groups is None else (groups.order.contiguous(), groups.starts.contiguous())
    names = None if rounding is None or rounding.names is None else rounding.names.contiguous()
    kind = SINGLE if weight.dtype == torch.float32 else HALF_NEAREST if rounding is None else HALF_BY_CHANCE
    words = (0, 0, 0) if rounding is None else _words(rounding)
    shape = (len(ids), values.shape[1])
    given = (address(ids), address(values), address(order), address(starts), gradients.scale, gradients.row_clip)
    stored = (address(weight), kind, *words, address(names))
    _call(name, *first, *shape, *given, *stored, *(address(one) for one in state), *scalars)
