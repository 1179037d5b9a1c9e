"""What the backends of the HSTU layer share: its inputs, and its forward and backward written in passes.

    xhat = norm(x)          z = xhat W                  [u v q k] = SiLU(z)
    y = attention(q, k, v)  g = dropout(norm(y) * u)    out = x + g Wo^T + b

Between forward and backward only x, z and y are kept (with `recompute` only x): SiLU, both norms, the gate and the
dropout mask are computed again. The attention writes dq, dk and dv into the buffer dz [T, 4 D] beside du, where they
are turned into the gradient of z in place.

T tokens, D width, H heads; z and dz are [u | v | q | k]. x and out are the residual stream in its own type, the rest is
in the run's (bf16 under autocast), and so are the GEMMs.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from turbogr.ops.dropout.reference import Mask as Dropout
from turbogr.ops.gemm import gemm
from turbogr.ops.hstu_attention.autograd import Kernels
from turbogr.ops.hstu_attention.reference import Bias, Mask

EPS = 1e-6


class Weights(NamedTuple):
    uvqk: Tensor  # [D, 4 D]
    out: Tensor  # [D, D]
    bias: Tensor  # [D]

    @property
    def types(self) -> tuple[torch.dtype, ...]:
        return tuple(weight.dtype for weight in self)

    def to(self, dtype: torch.dtype) -> "Weights":
        """In the type of the GEMMs but for the bias."""
        return Weights(self.uvqk.to(dtype), self.out.to(dtype), self.bias)


@dataclass(frozen=True)
class Layer:
    """What a layer needs beside x and its weights."""

    offsets: Tensor  # int64 [B+1]
    heads: int
    max_len: int
    bias: Bias
    dropout: Dropout | None = None
    recompute: bool = False
    mask: Mask = Mask()


class Kept(NamedTuple):
    z: Tensor  # [T, 4 D]
    y: Tensor  # [T, H, D / H]


class Gradients(NamedTuple):
    x: Tensor
    uvqk: Tensor
    out: Tensor
    bias: Tensor
    position: Tensor | None
    time: Tensor | None

    def to(self, types: tuple[torch.dtype, ...]) -> "Gradients":
        """Those of the weights in the weights' own types."""
        uvqk, out, bias = (one.to(dtype) for one, dtype in zip(self[1:4], types, strict=True))
        return self._replace(uvqk=uvqk, out=out, bias=bias)


class Passes(Protocol):
    """Everything of a layer that is neither a GEMM nor the attention."""

    def norm(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """xhat [T, D] in `dtype`."""
        ...

    def activate(self, z: Tensor) -> Tensor:
        """[v | q | k], [T, 3 D]."""
        ...

    def gate(self, z: Tensor, y: Tensor, dropout: Dropout | None) -> Tensor:
        """g [T, D]."""
        ...

    def residual(self, x: Tensor, product: Tensor, bias: Tensor) -> Tensor:
        """x + product + bias, in x's type; `product` may be overwritten."""
        ...

    def gate_backward(
        self, dg: Tensor, z: Tensor, y: Tensor, dropout: Dropout | None, dz: Tensor
    ) -> tuple[Tensor, Tensor]:
        """dy and g, [T, D]; writes dz's part of u. dg may be overwritten."""
        ...

    def activate_backward(self, z: Tensor, dz: Tensor) -> None:
        """Multiply dz's parts of v, q and k by SiLU'(z)."""
        ...

    def norm_backward(self, x: Tensor, dxhat: Tensor, dout: Tensor) -> Tensor:
        """dout + the gradient of x through xhat."""
        ...

    def column_sums(self, x: Tensor) -> Tensor:
        """[D]"""
        ...


@torch.no_grad()
def forward(passes: Passes, attention: Kernels, x: Tensor, weights: Weights, layer: Layer) -> tuple[Tensor, Kept]:
    """out [T, D] and what the backward wants; `weights` are in the type of the GEMMs but for the bias."""
    kept = _up_to_attention(passes, attention, x, weights, layer)
    gated = passes.gate(*kept, layer.dropout)
    return passes.residual(x, gemm(gated, weights.out.T), weights.bias), kept


@torch.no_grad()
def backward(
    passes: Passes, attention: Kernels, dout: Tensor, x: Tensor, kept: Kept | None, weights: Weights, layer: Layer
) -> Gradients:
    """`kept` None: it is computed again. Gradients of the weights are in the type of the GEMMs."""
    z, y = kept or _up_to_attention(passes, attention, x, weights, layer)
    dtype = weights.uvqk.dtype
    narrow = dout.to(dtype)
    dz = torch.empty_like(z)
    dy, gated = passes.gate_backward(gemm(narrow, weights.out), z, y, layer.dropout, dz)
    dout_weight = gemm(narrow.T, gated)
    del narrow, gated
    dv, dq, dk = _heads(dz[:, x.shape[1] :], layer.heads)
    v, q, k = _heads(passes.activate(z), layer.heads)
    facts = layer.offsets, layer.max_len, layer.bias, layer.mask
    tables = attention.backward(dy.view(y.shape), q, k, v, *facts, dq, dk, dv)
    del q, k, v, dy
    passes.activate_backward(z, dz)
    duvqk = gemm(passes.norm(x, dtype).T, dz)
    dx = passes.norm_backward(x, gemm(dz, weights.uvqk.T), dout)
    return Gradients(dx, duvqk, dout_weight, passes.column_sums(dout), *tables)


def _up_to_attention(passes: Passes, attention: Kernels, x: Tensor, weights: Weights, layer: Layer) -> Kept:
    z = gemm(passes.norm(x, weights.uvqk.dtype), weights.uvqk)
    v, q, k = _heads(passes.activate(z), layer.heads)
    return Kept(z, attention.forward(q, k, v, layer.offsets, layer.max_len, layer.bias, layer.mask))


def _heads(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """[T, 3 D] -> three [T, H, D / H] by strides."""
    return x.view(len(x), 3, heads, x.shape[1] // (3 * heads)).unbind(1)
