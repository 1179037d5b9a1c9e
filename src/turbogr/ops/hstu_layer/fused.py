"""The passes of the HSTU layer in torch: for devices and types without a compiled backend.

T tokens, D width
"""

import torch
from torch import Tensor

from turbogr.ops.dropout.reference import Mask as Dropout
from turbogr.ops.hstu_layer.layer import EPS


def norm(x: Tensor, dtype: torch.dtype) -> Tensor:
    return _centred(x)[0].to(dtype)


def activate(z: Tensor) -> Tensor:
    return torch.nn.functional.silu(z[:, z.shape[1] // 4 :])


def gate(z: Tensor, y: Tensor, dropout: Dropout | None) -> Tensor:
    yhat, _ = _centred(y.flatten(1))
    gated = torch.nn.functional.silu(_wide(_gates(z))).mul_(yhat)
    return _dropped(gated, dropout).to(z.dtype)


def residual(x: Tensor, product: Tensor, bias: Tensor) -> Tensor:
    return x + product + bias.to(x.dtype)


def gate_backward(dg: Tensor, z: Tensor, y: Tensor, dropout: Dropout | None, dz: Tensor) -> tuple[Tensor, Tensor]:
    yhat, inverse = _centred(y.flatten(1))
    u = _wide(_gates(z))
    a = torch.nn.functional.silu(u)
    gated = _dropped(a * yhat, dropout).to(z.dtype)
    slope = _dropped(_wide(dg), dropout)
    dz[:, : z.shape[1] // 4] = torch.ops.aten.silu_backward(slope * yhat, u)
    return _through_norm(slope.mul_(a), yhat, inverse).to(z.dtype), gated


def activate_backward(z: Tensor, dz: Tensor) -> None:
    width = z.shape[1] // 4
    dz[:, width:] = torch.ops.aten.silu_backward(dz[:, width:], z[:, width:])


def norm_backward(x: Tensor, dxhat: Tensor, dout: Tensor) -> Tensor:
    return _through_norm(_wide(dxhat), *_centred(x)).add_(dout).to(x.dtype)


def column_sums(x: Tensor) -> Tensor:
    return _wide(x).sum(0)


def _gates(z: Tensor) -> Tensor:
    return z[:, : z.shape[1] // 4]


def _wide(x: Tensor) -> Tensor:
    """What sums and functions are computed in: fp32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _centred(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x - mean) / deviation [T, D] and 1 / deviation [T, 1]."""
    x = _wide(x)
    centred = x - x.mean(1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(1, keepdim=True) + EPS)
    return centred.mul_(inverse), inverse


def _through_norm(dxhat: Tensor, xhat: Tensor, inverse: Tensor) -> Tensor:
    along = (dxhat * xhat).mean(1, keepdim=True)
    return (dxhat - dxhat.mean(1, keepdim=True)).sub_(xhat * along).mul_(inverse)


def _dropped(x: Tensor, dropout: Dropout | None) -> Tensor:
    return x if dropout is None else x * dropout.kept(x.shape[1]).to(x.dtype) * dropout.scale
