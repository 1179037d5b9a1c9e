"""Three attention channels over jagged rows, each applied to the values on its own (FuXi).

position[i, j] = position_table[p_i - p_j]
time[i, j]     = time_table[bucket(T)],  or  alpha * gamma ** (T ** beta);  T = |next_times_i - times_j| seconds
semantic[i, j] = SiLU(q_i . k_j) / max_len
y[i, channel]  = sum_j channel[i, j] v_j     over the j that i sees, within a row, per head

Position and time maps are shared by the heads, enter no SiLU and are not divided; where a context token stands on
either side they are 0. Rows [context | history | targets], who sees whom, p and bucket are those of `hstu_attention`.

T tokens, B rows, H heads, C channels; q, k [T, H, dqk], v [T, H, dv], y [T, C, H, dv]
"""

import functools

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.fuxi_attention import cpu
from turbogr.ops.fuxi_attention.autograd import attend
from turbogr.ops.fuxi_attention.reference import Maps, attend_reference
from turbogr.ops.fuxi_attention.tiles import attend_tiles
from turbogr.ops.hstu_attention import check_rows
from turbogr.ops.hstu_attention.reference import Mask
from turbogr.ops.registry import Backend, register
from turbogr.ops.triton_support import rejects_triton


def _attend_triton(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask) -> Tensor:
    # imported when called: `import turbogr` needs no Triton
    from turbogr.ops.fuxi_attention import triton

    return attend(triton, q, k, v, offsets, max_len, maps, mask)


OPERATOR = register(
    "fuxi_attention",
    Backend("triton", _attend_triton, rejects_triton),
    Backend("cpu", functools.partial(attend, cpu), native.rejects("fuxi_attention")),
    Backend("tiles", attend_tiles),
    Backend("reference", attend_reference),
)


def fuxi_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_len: int,
    position_table: Tensor | None = None,
    time_table: Tensor | None = None,
    time_decay: Tensor | None = None,
    times: Tensor | None = None,
    next_times: Tensor | None = None,
    bucket_width: float = 0.301,
    num_targets: Tensor | None = None,
    num_context: int = 0,
    window: int | None = None,
    context_sees_history: bool = False,
    backend: str | None = None,
) -> Tensor:
    """FuXi's channels [T, C, H, dv] in the order position, time, semantic; one whose map is not given is left out.

    Args:
        q, k: [T, H, dqk]. v: [T, H, dv]. May be strided views of one buffer; the last dimension must be dense.
        offsets: int64 [B+1]; rows may be empty, none may be longer than `max_len`.
        max_len: the divisor of the semantic channel, constant for a model.
        position_table: [max_len], indexed by p_i - p_j.
        time_table: [buckets + 1], indexed by the bucket; needs `times` and `next_times`.
        time_decay: [3] alpha, beta > 0 and 0 < gamma < 1, in place of `time_table`.
        times, next_times: int64 [T] seconds of every event and of the one after it; any span, any order.
        num_targets: int64 [B] candidates at the end of every row.
        num_context: tokens before the history, the same for every row that is not empty.
        window: a history token sees this many latest ones, itself among them.
        context_sees_history: lets context see the history. It leaks the future from the second layer on.
        backend: triton | cpu | tiles | reference; None picks.

    Example:
        >>> q = torch.randn(5, 2, 8); offsets = torch.tensor([0, 3, 5])
        >>> fuxi_attention(q, q, q, offsets, max_len=16, position_table=torch.randn(16)).shape
        torch.Size([5, 2, 2, 8])
    """
    maps = Maps(position_table, time_table, time_decay, times, next_times, bucket_width)
    mask = Mask(num_targets, num_context, window, context_sees_history)
    _check_shapes(q, k, v, max_len, maps)
    check_rows(len(q), offsets, max_len, mask)
    chosen, _ = OPERATOR.pick(q.device, backend)
    # autocast would round maps and scores; the backends choose their own precision
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = chosen.run(q, k, v, offsets, max_len, maps, mask)
    return out


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, max_len: int, maps: Maps) -> None:
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3 or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must be [T, H, d] of the same T and H."
        )
    if maps.position is not None and maps.position.shape != (max_len,):
        raise ValueError(f"position_table has shape {list(maps.position.shape)}, max_len {max_len} wants [{max_len}].")
    if maps.time is not None and maps.decay is not None:
        raise ValueError("time_table and time_decay are two forms of one map: give one of them.")
    if maps.decay is not None and maps.decay.shape != (3,):
        raise ValueError(f"time_decay has shape {list(maps.decay.shape)}, wanted [3]: alpha, beta, gamma.")
    if maps.has_time and (maps.times is None or maps.next_times is None):
        raise ValueError("time_table and time_decay need times and next_times.")
