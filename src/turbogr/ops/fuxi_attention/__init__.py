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
from collections.abc import Callable

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.fuxi_attention import cpu
from turbogr.ops.fuxi_attention.autograd import Kernels, attend, differentiated, gradients
from turbogr.ops.fuxi_attention.reference import Maps, attend_reference
from turbogr.ops.fuxi_attention.tiles import attend_tiles
from turbogr.ops.graph_operator import GraphOperator, watched
from turbogr.ops.hstu_attention import causal_pairs, check_event_times, check_heads, check_rows
from turbogr.ops.hstu_attention.reference import Mask
from turbogr.ops.registry import Backend, register
from turbogr.ops.triton_support import rejects_triton


def _triton() -> Kernels:
    # imported when called: `import turbogr` needs no Triton
    from turbogr.ops.fuxi_attention import triton

    return triton


KERNELS: dict[str, Callable[[], Kernels]] = {"triton": _triton, "cpu": lambda: cpu}
"""Of the backends that have some; the others are torch's own operations, which autograd differentiates."""
OPERATOR = register(
    "fuxi_attention",
    Backend("triton", lambda *arguments: attend(_triton(), *arguments), rejects_triton),
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
    if watched():
        return GRAPH_OPERATOR(q, k, v, offsets, max_len, maps, mask, backend)
    return _attend(q, k, v, offsets, max_len, maps, mask, backend)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    maps: Maps,
    mask: Mask,
    backend: str | None,
) -> Tensor:
    check_rows(len(q), offsets, max_len, mask)
    chosen, _ = OPERATOR.pick(q.device, backend)
    # autocast would round maps and scores; the backends choose their own precision
    with torch.autocast(q.device.type, enabled=False):
        out: Tensor = chosen.run(q, k, v, offsets, max_len, maps, mask)
    return out


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, max_len: int, maps: Maps) -> None:
    check_heads(q, k, v)
    if maps.position is not None and maps.position.shape != (max_len,):
        raise ValueError(f"position_table has shape {list(maps.position.shape)}, max_len {max_len} wants [{max_len}].")
    if maps.time is not None and maps.decay is not None:
        raise ValueError("time_table and time_decay are two forms of one map: give one of them.")
    if maps.decay is not None and maps.decay.shape != (3,):
        raise ValueError(f"time_decay has shape {list(maps.decay.shape)}, wanted [3]: alpha, beta, gamma.")
    if maps.time is not None and (maps.time.dim() != 1 or not len(maps.time)):
        raise ValueError(f"time_table has shape {list(maps.time.shape)}, wanted [buckets + 1].")
    if maps.has_time:
        check_event_times("a map over times", maps.times, maps.next_times, len(q), maps.bucket_width)


def _graph_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    maps: Maps,
    mask: Mask,
    backend: str | None,
) -> list[Tensor]:
    return [_attend(q, k, v, offsets, max_len, maps, mask, backend)]


def _graph_backward(
    dout: Tensor,
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    maps: Maps,
    mask: Mask,
    backend: str | None,
) -> list[Tensor | None]:
    chosen, _ = OPERATOR.pick(q.device, backend)
    given = dout, q, k, v, offsets, max_len, maps, mask
    with torch.autocast(q.device.type, enabled=False):
        if chosen.name in KERNELS and (kernels := KERNELS[chosen.name]()).takes(q, k, v, maps):
            return gradients(kernels, *given)
        return differentiated(chosen.run, *given)


def _graph_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    maps: Maps,
    mask: Mask,
    backend: str | None,
) -> list[Tensor]:
    tokens, *heads = v.shape
    return [torch.empty(tokens, maps.channels, *heads, dtype=v.dtype, device=v.device)]


def _flops(q: Tensor, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, scores: int, values: int) -> float:
    """So many products over dqk, and so many over dv for every channel."""
    tokens, heads, dqk = q.shape
    widths = scores * dqk + values * maps.channels * v.shape[2]
    return 2.0 * heads * widths * causal_pairs(offsets, tokens, max_len)


GRAPH_OPERATOR = GraphOperator(
    "fuxi_attention",
    _graph_forward,
    _graph_backward,
    fake=_graph_fake,
    gradients=("q", "k", "v", "maps.position", "maps.time", "maps.decay"),
    # Q K^T, and each channel times V
    flops=lambda q, v, offsets, max_len, maps: _flops(q, v, offsets, max_len, maps, 1, 1),
    # Q K^T once more, dQ and dK; of each channel its own gradient and its part of dV
    backward_flops=lambda q, v, offsets, max_len, maps: _flops(q, v, offsets, max_len, maps, 3, 2),
)
