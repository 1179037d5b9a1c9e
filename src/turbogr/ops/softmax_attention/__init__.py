"""Causal softmax attention over jagged rows, with dropout on the attention weights (SASRec).

P[i, :] = softmax_j(q_i . k_j / sqrt(d))  over j <= i within the row
y_i = sum_j dropout(P)[i, j] v_j

T tokens, B rows, H heads; q, k, v, y [T, H, d]
"""

from torch import Tensor

from turbogr.ops.checks import check_offsets
from turbogr.ops.dropout import Noise, check_noise
from turbogr.ops.registry import Backend, register
from turbogr.ops.softmax_attention.reference import attend_reference
from turbogr.ops.softmax_attention.tiles import attend_tiles

OPERATOR = register("softmax_attention", Backend("tiles", attend_tiles), Backend("reference", attend_reference))


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    dropout_rate: float = 0.0,
    noise: Noise | None = None,
    layer: int = 0,
    backend: str | None = None,
) -> Tensor:
    """Causal attention [T, H, d].

    Args:
        q, k, v: [T, H, d].
        offsets: int64 [B+1]; rows may be empty.
        dropout_rate, noise, layer: dropout of the weights; `noise` None (evaluation) drops nothing.
        backend: tiles | reference; None picks.

    Example:
        >>> q = torch.randn(5, 2, 8); offsets = torch.tensor([0, 3, 5])
        >>> softmax_attention(q, q, q, offsets).shape
        torch.Size([5, 2, 8])
    """
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(f"q {list(q.shape)}, k {list(k.shape)} and v {list(v.shape)} must all be the same [T, H, d].")
    check_offsets(offsets, len(q))
    check_noise(dropout_rate, noise, len(q))
    chosen, _ = OPERATOR.pick(q.device, backend)
    out: Tensor = chosen.run(q, k, v, offsets, dropout_rate, noise, layer)
    return out
