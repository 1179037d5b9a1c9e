"""Pointwise SiLU attention over jagged rows, with relative position and time bias (HSTU).

A[i, j] = SiLU(q_i . k_j + position_bias[p_i - p_j] + time_bias[bucket(next_times_i - times_j)]) / max_len
y_i = sum_j A[i, j] v_j     over the j that i sees, within a row, per head; biases shared by the heads
bucket(dt) = clamp(floor(ln(max(|dt|, 1)) / bucket_width), 0, buckets), its edges kept as integers

A row is [context | history | targets], the first and the last part possibly empty:
    history i  sees every context token and the history j <= i (with a window w: p_i - p_j < w)
    target     sees every context token, the history as if it stood right behind it, and itself
    context    sees every context token, and with `context_sees_history` the whole history
A pair with a context token on either side has no bias. p counts from the first history token.

T tokens, B rows, H heads; q, k [T, H, dqk], v [T, H, dv], y [T, H, dv]
"""

import functools

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from turbogr.ops import native
from turbogr.ops.checks import check_offsets, check_whole_numbers
from turbogr.ops.graph_operator import GraphOperator, watched
from turbogr.ops.hstu_attention import cpu, reference, tiles
from turbogr.ops.hstu_attention.autograd import Kernels, attend, gradients
from turbogr.ops.hstu_attention.reference import Bias, Mask, attend_reference
from turbogr.ops.registry import Backend, register
from turbogr.ops.triton_support import rejects_triton

KERNELS: dict[str, Kernels] = {"cpu": cpu, "tiles": tiles, "reference": reference}


def _named(backend: str) -> Kernels:
    if backend != "triton":
        return KERNELS[backend]
    # Triton is loaded where its kernels run
    from turbogr.ops.hstu_attention import triton

    return triton


OPERATOR = register(
    "hstu_attention",
    Backend("triton", lambda *arguments: attend(_named("triton"), *arguments), rejects_triton),
    Backend("cpu", functools.partial(attend, cpu), native.rejects("hstu_attention")),
    Backend("tiles", functools.partial(attend, tiles)),
    Backend("reference", attend_reference),
)


def kernels(device: torch.device, backend: str | None = None) -> Kernels:
    """The forward and backward of the backend that is picked, for operators that fuse attention with their own work."""
    return _named(OPERATOR.pick(device, backend)[0].name)


def hstu_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    max_len: int,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    next_times: Tensor | None = None,
    bucket_width: float = 0.301,
    num_targets: Tensor | None = None,
    num_context: int = 0,
    window: int | None = None,
    context_sees_history: bool = False,
    backend: str | None = None,
) -> Tensor:
    """HSTU attention [T, H, dv].

    Args:
        q, k: [T, H, dqk]. v: [T, H, dv]. May be strided views of one buffer; the last dimension must be dense.
        offsets: int64 [B+1]; rows may be empty, none may be longer than `max_len`.
        max_len: the divisor N, constant for a model.
        position_bias: [max_len], indexed by p_i - p_j.
        time_bias: [buckets + 1], indexed by the bucket; needs `times` and `next_times`.
        times, next_times: int64 [T] seconds of every event and of the one after it; any span, any order.
        num_targets: int64 [B] candidates at the end of every row.
        num_context: tokens before the history, the same for every row that is not empty.
        window: a history token sees this many latest ones, itself among them.
        context_sees_history: lets context see the history. It leaks the future from the second layer on.
        backend: triton | cpu | tiles | reference; None picks.

    Example:
        >>> q = torch.randn(5, 2, 8); offsets = torch.tensor([0, 3, 5])
        >>> hstu_attention(q, q, q, offsets, max_len=16).shape
        torch.Size([5, 2, 8])
    """
    bias = Bias(position_bias, time_bias, times, next_times, bucket_width)
    mask = Mask(num_targets, num_context, window, context_sees_history)
    _check_shapes(q, k, v, max_len, bias)
    if watched():
        return GRAPH_OPERATOR(q, k, v, offsets, max_len, bias, mask, backend)
    check_rows(len(q), offsets, max_len, mask)
    chosen, _ = OPERATOR.pick(q.device, backend)
    out: Tensor = chosen.run(q, k, v, offsets, max_len, bias, mask)
    return out


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, max_len: int, bias: Bias) -> None:
    check_heads(q, k, v)
    check_bias(bias, len(q), max_len)


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """[T, H, d] of one T, H and type; d of q and k is the same."""
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3 or v.shape[:2] != q.shape[:2] or not q.shape[1]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must be [T, H, d] of the same T and H."
        )
    if not (q.dtype == k.dtype == v.dtype) or not q.dtype.is_floating_point:
        raise ValueError(f"q, k and v must be of one floating type, they are {q.dtype}, {k.dtype} and {v.dtype}.")


def check_bias(bias: Bias, tokens: int, max_len: int) -> None:
    if bias.position is not None and bias.position.shape != (max_len,):
        raise ValueError(f"position_bias has shape {list(bias.position.shape)}, max_len {max_len} wants [{max_len}].")
    if bias.time is None:
        return
    if bias.time.dim() != 1 or not len(bias.time):
        raise ValueError(f"time_bias has shape {list(bias.time.shape)}, wanted [buckets + 1].")
    check_event_times("time_bias", bias.times, bias.next_times, tokens, bias.bucket_width)


def check_event_times(
    table: str, times: Tensor | None, next_times: Tensor | None, tokens: int, bucket_width: float
) -> None:
    if times is None or next_times is None:
        raise ValueError(f"{table} needs times and next_times.")
    check_whole_numbers("times", times, tokens)
    check_whole_numbers("next_times", next_times, tokens)
    if not bucket_width > 0:
        raise ValueError(f"bucket_width {bucket_width} must be above 0.")


def check_rows(tokens: int, offsets: Tensor, max_len: int, mask: Mask) -> None:
    """Refuse rows that the operator cannot take; offsets on a device are trusted, reading them would wait for it."""
    if mask.num_context < 0 or (mask.window is not None and mask.window < 1):
        raise ValueError(f"num_context {mask.num_context} must be at least 0 and window {mask.window} at least 1.")
    check_offsets(offsets, tokens)
    if mask.num_targets is not None:
        check_whole_numbers("num_targets", mask.num_targets, len(offsets) - 1)
    if not offsets.is_cpu:
        return
    lengths = offsets.diff()
    if len(lengths) and int(lengths.max()) > max_len:
        row = int(lengths.argmax())
        raise ValueError(
            f"row {row}, the user with that number in the batch, has {int(lengths[row])} tokens, more than max_len "
            f"{max_len}: cut its history."
        )
    if mask.num_targets is not None or mask.num_context:
        targets = torch.zeros_like(lengths) if mask.num_targets is None else mask.num_targets
        short = (
            (lengths > 0) & (lengths < targets + mask.num_context) | (targets < 0) | ((lengths == 0) & (targets > 0))
        )
        if bool(short.any()):
            row = int(short.nonzero()[0])
            raise ValueError(
                f"row {row} has {int(lengths[row])} tokens for {mask.num_context} of context and {int(targets[row])} "
                "targets: give it all of them, or no token at all."
            )


def causal_pairs(offsets: Tensor, tokens: int, max_len: int) -> float:
    """Pairs of a token and one that it sees; where only shapes are known, rows are taken to be of the longest."""
    if isinstance(offsets, FakeTensor) or offsets.is_meta:
        return tokens * (max_len + 1) / 2
    lengths = offsets.diff().double()
    return float((lengths * (lengths + 1) / 2).sum())


def _graph_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    bias: Bias,
    mask: Mask,
    backend: str | None,
) -> list[Tensor]:
    check_rows(len(q), offsets, max_len, mask)
    return [kernels(q.device, backend).forward(q, k, v, offsets, max_len, bias, mask)]


def _graph_backward(
    dout: Tensor,
    kept: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    bias: Bias,
    mask: Mask,
    backend: str | None,
) -> list[Tensor | None]:
    return gradients(kernels(q.device, backend), dout, q, k, v, offsets, max_len, bias, mask)


def _flops(q: Tensor, v: Tensor, offsets: Tensor, max_len: int) -> float:
    return 2.0 * q.shape[1] * (q.shape[2] + v.shape[2]) * causal_pairs(offsets, len(q), max_len)


GRAPH_OPERATOR = GraphOperator(
    "hstu_attention",
    _graph_forward,
    _graph_backward,
    fake=lambda q, k, v, *_: [torch.empty(v.shape, dtype=v.dtype, device=v.device)],
    gradients=("q", "k", "v", "bias.position", "bias.time"),
    flops=_flops,
    backward_flops=lambda q, v, offsets, max_len: 2.5 * _flops(q, v, offsets, max_len),
)
