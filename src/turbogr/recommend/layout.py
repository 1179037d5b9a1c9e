"""The layout of exported tensors: one matrix per projection, [out, in] as torch.nn.Linear holds it.

Encoders fuse projections for speed; this is the one place that takes them apart and puts them together again.

    hstu     blocks.I.uvqk       [in, 4 out]   <->  blocks.I.u.weight, .v.weight, .q.weight, .k.weight   [out, in]
    sasrec   blocks.I.qkv_weight [3 out, in]   <->  blocks.I.q.weight, .k.weight, .v.weight              [out, in]
             blocks.I.qkv_bias   [3 out]       <->  blocks.I.q.bias, .k.bias, .v.bias                    [out]

Everything else, and an encoder that is not listed, keeps names and shapes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fused:
    name: str
    parts: tuple[str, ...]
    dim: int
    """The dimension that runs over the parts; where it is 1 the matrix stands [in, out]."""


FUSED: dict[str, tuple[Fused, ...]] = {
    "hstu": (Fused("uvqk", ("u.weight", "v.weight", "q.weight", "k.weight"), 1),),
    "sasrec": (
        Fused("qkv_weight", ("q.weight", "k.weight", "v.weight"), 0),
        Fused("qkv_bias", ("q.bias", "k.bias", "v.bias"), 0),
    ),
}


def to_plain(encoder: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` of the encoder of that name, taken apart."""
    plain = {}
    for name, tensor in state.items():
        prefix, _, last = name.rpartition(".")
        fused = next((one for one in FUSED.get(encoder, ()) if one.name == last), None)
        if fused is None:
            plain[name] = tensor.contiguous()
            continue
        for part, piece in zip(fused.parts, tensor.chunk(len(fused.parts), fused.dim), strict=True):
            # contiguous() alone would keep a piece that shares the memory of its neighbours
            plain[f"{prefix}.{part}"] = (piece.T if fused.dim else piece).clone(memory_format=torch.contiguous_format)
    return plain


def from_plain(encoder: str, plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_plain`; a part that is missing is left to the caller's check of names."""
    state = dict(plain)
    for fused in FUSED.get(encoder, ()):
        first = "." + fused.parts[0]
        for prefix in [name.removesuffix(first) for name in plain if name.endswith(first)]:
            names = [f"{prefix}.{part}" for part in fused.parts]
            if all(name in state for name in names):
                pieces = [state.pop(name) for name in names]
                state[f"{prefix}.{fused.name}"] = torch.cat([p.T for p in pieces] if fused.dim else pieces, fused.dim)
    return state
