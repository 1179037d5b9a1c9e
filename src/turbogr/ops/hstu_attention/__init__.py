"""Pointwise SiLU attention over jagged rows, with relative position and time bias (HSTU).

A[i, j] = SiLU(q_i . k_j + position_bias[i - j] + time_bias[bucket(next_times_i - times_j)]) / max_len   for j <= i
y_i = sum_j A[i, j] v_j                                         within a row, per head; biases shared by the heads
bucket(dt) = clamp(floor(ln(max(|dt|, 1)) / bucket_width), 0, buckets)

T tokens, B rows, H heads; q, k [T, H, dqk], v [T, H, dv], y [T, H, dv]
"""

from torch import Tensor

from turbogr.ops.hstu_attention.reference import Bias, attend_reference
from turbogr.ops.hstu_attention.tiles import attend_tiles
from turbogr.ops.registry import Backend, register

OPERATOR = register("hstu_attention", Backend("tiles", attend_tiles), Backend("reference", attend_reference))


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
    backend: str | None = None,
) -> Tensor:
    """Causal HSTU attention [T, H, dv].

    Args:
        q, k: [T, H, dqk]. v: [T, H, dv].
        offsets: int64 [B+1]; rows may be empty, none may be longer than `max_len`.
        max_len: the divisor N, constant for a model.
        position_bias: [max_len], indexed by i - j.
        time_bias: [buckets + 1], indexed by the bucket; needs `times` and `next_times`.
        times, next_times: int64 [T] seconds of every event and of the one after it; any span, any order.
        backend: tiles | reference; None picks.

    Example:
        >>> q = torch.randn(5, 2, 8); offsets = torch.tensor([0, 3, 5])
        >>> hstu_attention(q, q, q, offsets, max_len=16).shape
        torch.Size([5, 2, 8])
    """
    _check(q, k, v, offsets, max_len, position_bias, time_bias, times, next_times)
    chosen, _ = OPERATOR.pick(q.device, backend)
    bias = Bias(position_bias, time_bias, times, next_times, bucket_width)
    out: Tensor = chosen.run(q, k, v, offsets, max_len, bias)
    return out


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    position_bias: Tensor | None,
    time_bias: Tensor | None,
    times: Tensor | None,
    next_times: Tensor | None,
) -> None:
    if q.dim() != 3 or q.shape != k.shape or v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must be [T, H, d] of the same T and H."
        )
    if position_bias is not None and position_bias.shape != (max_len,):
        raise ValueError(f"position_bias has shape {list(position_bias.shape)}, max_len {max_len} wants [{max_len}].")
    if time_bias is not None and (times is None or next_times is None):
        raise ValueError("time_bias needs times and next_times.")
    lengths = offsets.diff()
    if offsets.is_cpu and int(offsets[-1]) != len(q):
        raise ValueError(f"offsets end at {int(offsets[-1])}, q has {len(q)} tokens.")
    if lengths.is_cpu and len(lengths) and int(lengths.max()) > max_len:
        row = int(lengths.argmax())
        raise ValueError(f"row {row} has {int(lengths[row])} tokens, more than max_len {max_len}: cut its history.")
