"""The HSTU layer put together from its operators, as the formula reads; autograd gives every gradient."""

from dataclasses import replace

import torch
from torch import Tensor

from turbogr.ops.dropout.reference import drop
from turbogr.ops.hstu_attention.reference import attend_reference
from turbogr.ops.hstu_layer.layer import EPS, Layer, Weights


def layer_reference(x: Tensor, weights: Weights, layer: Layer) -> Tensor:
    u, v, q, k = torch.nn.functional.silu(norm(x) @ weights.uvqk).chunk(4, dim=1)
    q, k, v = (part.view(len(x), layer.heads, x.shape[1] // layer.heads) for part in (q, k, v))
    y = attend_reference(q, k, v, layer.offsets, layer.max_len, layer.bias, layer.mask)
    gated = u * norm(y.flatten(1))
    if layer.dropout is not None:
        gated = drop(gated, layer.dropout)
    return x + torch.nn.functional.linear(gated, weights.out, weights.bias)


def reference_gradients(dout: Tensor, x: Tensor, weights: Weights, layer: Layer) -> list[Tensor | None]:
    """Of x, the weights and both bias tables, by running it again with a graph."""
    own_x, *own = (leaf.detach().requires_grad_() for leaf in (x, *weights))
    position, time = (
        None if table is None else table.detach().requires_grad_() for table in (layer.bias.position, layer.bias.time)
    )
    with torch.enable_grad():
        biased = replace(layer, bias=replace(layer.bias, position=position, time=time))
        out = layer_reference(own_x, Weights(*own), biased)
    tables = [table for table in (position, time) if table is not None]
    found = iter(torch.autograd.grad(out, [own_x, *own, *tables], dout, materialize_grads=True))
    return [None if leaf is None else next(found) for leaf in (own_x, *own, position, time)]


def norm(x: Tensor) -> Tensor:
    """LayerNorm over the last dimension, without affine parameters."""
    return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=EPS)
