"""Sampled softmax compiled: native/src/sampled_softmax.cpp, one pass forward and backward.

Negatives are read, or drawn inside. Candidates of a small table read it from a copy of unit rows, those of a large one
in place. The rows' gradient leaves by id: one entry (id, token, slope) per candidate stands in the bucket of its id, in
the order of the tokens, and is added up there, so the result is the same to the last bit for any number of threads.

T tokens, R negatives, C = 1 + R candidates of a token, N rows, U touched rows, D width, W width padded
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
BLOCK, MAX_BLOCKS = 128, 512
"""Tokens that a thread takes at a time, and the most such blocks that have places of their own in every bucket."""
SMALLEST_BUCKET, MAX_BUCKETS = 64, 1024
"""Rows of a bucket at least; buckets at most, unless an entry would not hold both its id and its token."""
COPIES = 4
"""A table is copied as unit rows where every row is drawn that many times on average."""
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
        *((name, c_void_p) for name in ("unit_query", "unit_rows", "candidates", "entries", "places")),
        *((name, c_void_p) for name in ("first_entry", "first_row")),
        *((name, c_int64) for name in ("blocks", "buckets")),
        *((name, c_int) for name in ("shift", "token_bits", "gradients", "threads")),
    )


@functools.cache
def _compiled(name: str) -> Callable[..., Any]:
    types = {"tokens": (POINTER(Job),), "rows": (POINTER(Job), c_float, c_void_p, c_void_p)}
    return function("sampled_softmax", f"sampled_softmax_{name}", *types[name])


@dataclass(frozen=True)
class Inputs:
    """Contiguous, and of the types that the C++ reads."""

    query: Tensor  # fp32 [T, D]
    rows: Tensor  # fp32 [N, D]
    positive: Tensor  # int64 [T]
    given: Tensor | None  # int64 [T, R]
    drawn: UniformDraws | None
    log_q: Tensor | None  # fp32 [N]

    @property
    def candidates(self) -> int:
        return 1 + (self.given.shape[1] if self.drawn is None else self.drawn.count)  # type: ignore[union-attr]

    def fields(self) -> dict[str, Any]:
        """Of the job."""
        fields: dict[str, Any] = {
            "tokens": len(self.query),
            "negatives": self.candidates - 1,
            "width": self.query.shape[1],
            "rows": len(self.rows),
            **_addresses(query=self.query, table=self.rows, positive=self.positive, given=self.given, log_q=self.log_q),
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
    unit_query: Tensor  # [T, W]
    entries: Tensor  # int64 [T * C]
    first_entry: Tensor  # int64 [buckets + 1]
    first_row: Tensor  # int64 [buckets + 1]

    def row_gradients(self, scale: float) -> tuple[Tensor, Tensor]:
        """(touched rows [U] ascending, `scale` times their gradients [U, D])."""
        touched = int(self.first_row[-1])
        ids, values = torch.empty(touched, dtype=torch.int64), torch.empty(touched, self.inputs.query.shape[1])
        self._add(scale, ids, values)
        return ids, values

    def dense_row_gradients(self, scale: float) -> Tensor:
        """[N, D]"""
        values = torch.zeros_like(self.inputs.rows)
        self._add(scale, None, values)
        return values

    def _add(self, scale: float, ids: Tensor | None, values: Tensor) -> None:
        self.job.threads = torch.get_num_threads()
        _compiled("rows")(self.job, scale, address(ids), address(values))


def forward(x: Inputs, temperature: float, eps: float, gradients: bool) -> tuple[Tensor, Tensor, Known | None]:
    """(sum of losses, losses [T], what the backward needs where `gradients` are wanted)."""
    (tokens, width), num_rows, candidates = x.query.shape, len(x.rows), x.candidates
    assert tokens * candidates < 1 << 32 and num_rows < 1 << 31
    token_bits = max(tokens - 1, 0).bit_length()
    shift = min(KEY_BITS - token_bits, (max(SMALLEST_BUCKET, -(-num_rows // MAX_BUCKETS)) - 1).bit_length())
    blocks, buckets = min(-(-tokens // BLOCK), MAX_BLOCKS), -(-num_rows >> shift)
    padded = -(-width // ALIGNED) * ALIGNED
    copied, kept = num_rows * COPIES <= tokens * candidates, tokens if gradients else 0
    out = {"total": torch.empty(()), "losses": torch.empty(tokens), "outside": torch.full((), -1)}
    keep = {
        "dquery": torch.empty(kept, width),
        "unit_query": torch.empty(tokens, padded),
        "entries": torch.empty(kept * candidates, dtype=torch.int64),
        "first_entry": torch.empty(buckets + 1, dtype=torch.int64),
        "first_row": torch.empty(buckets + 1, dtype=torch.int64),
    }
    scratch = {
        "unit_rows": torch.empty(num_rows, padded) if copied else None,
        "candidates": torch.empty(tokens * candidates + ALIGNED, dtype=torch.int32),
        "places": torch.empty(blocks * buckets, dtype=torch.int32),
    }
    job = Job(
        padded=padded,
        scale=1.0 / temperature,
        eps=eps,
        gradients=gradients,
        blocks=blocks,
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
