"""Sampled softmax compiled: native/src/sampled_softmax.cpp, one pass forward and backward.

Negatives are read, or drawn inside. A row's gradient is the sum over its candidates in the order of the tokens, by
(row, token, slope) entries sorted by row, so the result is the same to the last bit for any number of threads. With a
small table tokens come in parts whose entries stay in a cache and are added up at once. With a large one they wait for
the backward, which answers the touched rows alone.

T tokens, P tokens of a part, R negatives, C = 1 + R candidates, N rows, U touched rows, D width, W width padded
"""

import ctypes
import functools
from collections.abc import Callable
from ctypes import POINTER, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.native import address, function
from turbogr.ops.sampled_softmax.draws import UniformDraws, by_ids, sparse_rows
from turbogr.ops.sampled_softmax.sparse import loss_sparse

ALIGNED = 16  # floats; no vector is longer
COPIES = 4
"""A table is copied as unit rows where every row is drawn that many times on average."""
SMALL = 1 << 20
"""Numbers of a table whose gradients are added up part after part."""
PART, PART_BLOCKS = 2048, 8
"""Tokens of a part around a small table, and its blocks, each of which counts every row."""
BLOCK = 32
"""Tokens that a thread takes at a time around a large table."""
MAX_BLOCKS = 512
BUCKET, MAX_BUCKETS = 64, 1024
"""Rows of a bucket at least; buckets at most, unless an entry would not hold both its row and its token."""
KEY_BITS = 32
"""Of an entry, for its token and its row's number in the bucket."""


class Job(ctypes.Structure):
    """`Job` of the C++, field by field."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "negatives", "width", "padded", "rows")),
        *((name, c_void_p) for name in ("query", "table", "positive", "given", "users", "positions")),
        ("seed", c_uint64),
        ("word0", c_uint32),
        ("word1", c_uint32),
        ("log_q", c_void_p),
        ("scale", c_float),
        ("eps", c_float),
        *((name, c_void_p) for name in ("total", "losses", "dquery", "outside")),
        *((name, c_void_p) for name in ("unit_query", "unit_rows", "sums", "touched", "candidates", "entries")),
        *((name, c_void_p) for name in ("places", "first_entry", "first_row")),
        *((name, c_int64) for name in ("part", "block", "buckets")),
        *((name, c_int) for name in ("shift", "token_bits", "gradients", "threads")),
    )


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    types = {"tokens": (), "rows": (c_float, c_void_p, c_void_p), "summed_rows": (c_float, c_int64, c_void_p, c_void_p)}
    return function("sampled_softmax", f"sampled_softmax_{name}", POINTER(Job), *types[name])


@dataclass(frozen=True)
class Inputs:
    """Contiguous, and of the types that the C++ reads."""

    query: Tensor  # fp32 [T, D]
    rows: Tensor  # fp32 [N, D]
    positive: Tensor  # int64 [T]
    given: Tensor | None  # int64 [T, R]
    drawn: UniformDraws | None
    log_q: Tensor | None  # fp32 [N]

    def __post_init__(self) -> None:
        for x in (self.query, self.rows, self.positive, self.given, self.log_q):
            assert x is None or x.is_contiguous()
        assert self.drawn is None or (self.drawn.users.is_contiguous() and self.drawn.positions.is_contiguous())

    @property
    def candidates(self) -> int:
        return 1 + (self.given.shape[1] if self.drawn is None else self.drawn.count)  # type: ignore[union-attr]

    def fields(self) -> dict[str, Any]:
        """Of the job."""
        # an empty tensor's address is null, which would say that the negatives are drawn; none of it is read
        given = self.positive if self.given is not None and not self.given.numel() else self.given
        fields: dict[str, Any] = {
            "tokens": len(self.query),
            "negatives": self.candidates - 1,
            "width": self.query.shape[1],
            "rows": len(self.rows),
            **_addresses(query=self.query, table=self.rows, positive=self.positive, given=given, log_q=self.log_q),
        }
        if self.drawn is not None:
            key = self.drawn.key
            fields |= {"seed": key.seed, "word0": key.step, "word1": int(key.purpose) << 24 | key.layer}
            fields |= _addresses(users=self.drawn.users, positions=self.drawn.positions)
        return fields


def _addresses(**tensors: Tensor | None) -> dict[str, int | None]:
    return {name: address(x) for name, x in tensors.items()}


@dataclass(frozen=True)
class Known:
    """What a forward pass leaves for the backward one: the job, and the tensors that it still points to."""

    job: Job
    inputs: Inputs
    dquery: Tensor  # [T, D]
    sums: Tensor | None  # [N, W] gradients of the unit rows
    touched: Tensor | None  # bool [N]
    unit_query: Tensor  # [T, W], where there are no sums
    entries: Tensor  # int64 [T * C]
    first_entry: Tensor  # int64 [buckets + 1]
    first_row: Tensor  # int64 [buckets + 1]

    def row_gradients(self, scale: float) -> tuple[Tensor, Tensor]:
        """(touched rows [U] ascending, `scale` times their gradients [U, D])."""
        self.job.threads = torch.get_num_threads()
        if self.touched is not None:
            ids = self.touched.nonzero().squeeze(1)
            values = torch.empty(len(ids), self.inputs.rows.shape[1])
            _compiled("summed_rows")(self.job, scale, len(ids), address(ids), address(values))
            return ids, values
        ids = torch.empty(int(self.first_row[-1]), dtype=torch.int64)
        values = torch.empty(len(ids), self.inputs.rows.shape[1])
        _compiled("rows")(self.job, scale, address(ids), address(values))
        return ids, values

    def dense_row_gradients(self, scale: float) -> Tensor:
        """[N, D]"""
        self.job.threads = torch.get_num_threads()
        values = torch.zeros_like(self.inputs.rows)
        if self.sums is not None:
            _compiled("summed_rows")(self.job, scale, len(values), None, address(values))
        else:
            _compiled("rows")(self.job, scale, None, address(values))
        return values


def forward(x: Inputs, temperature: float, eps: float, gradients: bool) -> tuple[Tensor, Tensor, Known | None]:
    """(sum of losses, losses [T], what the backward needs where `gradients` are wanted)."""
    (tokens, width), num_rows, candidates = x.query.shape, len(x.rows), x.candidates
    assert tokens * candidates < 1 << 32 and num_rows < 1 << 31
    padded = -(-width // ALIGNED) * ALIGNED
    copied = num_rows * COPIES <= tokens * candidates
    summed = copied and num_rows * padded <= SMALL and gradients
    part = min(tokens, PART) if summed else tokens
    block = -(-part // PART_BLOCKS) if summed else -(-part // MAX_BLOCKS)
    block = max(block, BLOCK)
    token_bits = max(part - 1, 0).bit_length()
    shift = 0 if summed else min(KEY_BITS - token_bits, (max(BUCKET, -(-num_rows // MAX_BUCKETS)) - 1).bit_length())
    buckets = -(-num_rows >> shift)
    kept = part * candidates if gradients else 0
    out = {"total": torch.empty(()), "losses": torch.empty(tokens), "outside": torch.full((), -1)}
    keep: dict[str, Any] = {
        "dquery": torch.empty(tokens if gradients else 0, width),
        "sums": torch.empty(num_rows, padded) if summed else None,
        "touched": torch.empty(num_rows, dtype=torch.bool) if summed else None,
        "unit_query": torch.empty(part, padded),
        "entries": torch.empty(kept, dtype=torch.int64),
        "first_entry": torch.empty(buckets + 1, dtype=torch.int64),
        "first_row": torch.empty(buckets + 1, dtype=torch.int64),
    }
    scratch = {
        "unit_rows": torch.empty(num_rows, padded) if copied else None,
        "candidates": torch.empty(part * candidates + ALIGNED, dtype=torch.int32),
        "places": torch.empty(-(-part // block) * buckets, dtype=torch.int32),
    }
    job = Job(
        padded=padded,
        scale=1.0 / temperature,
        eps=eps,
        gradients=gradients,
        part=part,
        block=block,
        buckets=buckets,
        shift=shift,
        token_bits=token_bits,
        threads=torch.get_num_threads(),
        **x.fields(),
        **_addresses(**out, **keep, **scratch),
    )
    _compiled("tokens")(job)
    if out["outside"] >= 0:
        raise IndexError(f"token {int(out['outside'])} has a candidate that is none of the {num_rows} rows.")
    return out["total"], out["losses"], Known(job, x, **keep) if gradients else None


class SampledSoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        rows: Tensor,
        positive: Tensor,
        negatives: Tensor | UniformDraws,
        temperature: float,
        log_q: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        given, drawn = (negatives.contiguous(), None) if isinstance(negatives, Tensor) else (None, negatives)
        log_q = None if log_q is None else log_q.float().contiguous()
        x = Inputs(query.contiguous(), rows.contiguous(), positive.contiguous(), given, drawn, log_q)
        total, losses, ctx.known = forward(x, temperature, eps, any(ctx.needs_input_grad[:2]))
        ctx.save_for_backward(query, rows)  # autograd notices when they change before the backward
        ctx.mark_non_differentiable(losses)
        return total, losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dtotal: Tensor, dlosses: Tensor) -> tuple[Tensor | None, ...]:
        _, rows = ctx.saved_tensors
        known: Known = ctx.known
        drows = None
        if ctx.needs_input_grad[1] and known.inputs.drawn is None:
            drows = known.dense_row_gradients(float(dtotal))
        elif ctx.needs_input_grad[1]:
            drows = sparse_rows(*known.row_gradients(float(dtotal)), rows.shape)
        return known.dquery * dtotal, drows, None, None, None, None, None


def loss_cpu(
    query: Tensor,
    rows: Tensor,
    positive: Tensor,
    negatives: Tensor | UniformDraws,
    temperature: float,
    log_q: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    if torch.float64 in (query.dtype, rows.dtype):
        # the C++ adds up in single precision
        return by_ids(loss_sparse)(query, rows, positive, negatives, temperature, log_q, eps)
    total, losses = SampledSoftmaxFunction.apply(  # type: ignore[no-untyped-call]
        query.float(), rows.float(), positive, negatives, temperature, log_q, eps
    )
    return total, losses
