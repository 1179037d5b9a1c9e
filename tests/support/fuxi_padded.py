"""FuXi written a second time, padded: rows [B, N, ...] with masks and maps of the whole batch.

Nothing here is shared with the package but the parameters. B rows, N maximal length, H heads, D width
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.padded import bucketed, relative_positions


def position_map(table: Tensor) -> Tensor:
    """[N, N]; the half of the table about later events is never seen: it is poisoned to show it."""
    return relative_positions(torch.cat((table.flip(0), torch.full_like(table[1:], 1e3))))


def time_differences(ext_times: Tensor) -> Tensor:
    """[B, N, N]; ext_times [B, N + 1] holds the target's time behind the last event."""
    return (ext_times[:, 1:, None] - ext_times[:, None, :-1]).abs()


def decayed(differences: Tensor, alpha: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    """alpha * gamma ** (T ** beta); where T is 0 the power is taken of 1 and its result put aside."""
    power = differences.clamp(min=1).double() ** beta
    return alpha * torch.where(differences == 0, torch.ones_like(power), gamma**power)


def attention(q: Tensor, k: Tensor, v: Tensor, maps: list[Tensor]) -> Tensor:
    """q, k, v [B, N, H, d], maps [N, N] or [B, N, N] -> [B, N, C, H, d]."""
    length = q.shape[1]
    causal = torch.ones(length, length, dtype=q.dtype).tril()
    channels = [
        torch.einsum("bnm,bmhd->bnhd", (channel * causal).expand(len(q), length, length), v) for channel in maps
    ]
    semantic = F.silu(torch.einsum("bnhd,bmhd->bhnm", q, k)) / length * causal
    channels.append(torch.einsum("bhnm,bmhd->bnhd", semantic, v))
    return torch.stack(channels, 2)


def rms(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def encoder(state: Mapping[str, Tensor], x: Tensor, ext_times: Tensor, heads: int) -> Tensor:
    """x [B, N, D] -> [B, N, D]; no dropout."""
    width = x.shape[2]
    x = x * math.sqrt(width) + state["input.table"]
    block = 0
    while f"blocks.{block}.uvqk" in state:
        part = {key.split(".")[2]: value for key, value in state.items() if key.startswith(f"blocks.{block}.")}
        maps = []
        if "position_table" in part:
            maps.append(position_map(part["position_table"]))
        if "time_table" in part:
            table = part["time_table"]
            maps.append(table[bucketed(time_differences(ext_times), len(table) - 1)])
        if "time_decay" in part:
            alpha, beta, gamma = part["time_decay"]
            decay = (alpha, torch.log1p(beta.exp()), 1 / (1 + torch.exp(-gamma)))
            maps.append(decayed(time_differences(ext_times), *decay))
        mixed = F.silu(rms(x) @ part["uvqk"])
        u, v, q, k = mixed.split([(len(maps) + 1) * width, width, width, width], dim=2)
        v, q, k = (one.unflatten(2, (heads, width // heads)) for one in (v, q, k))
        h = x + (u * rms(attention(q, k, v, maps).flatten(2))) @ part["out_weight"].T
        n = rms(h)
        gated = F.silu(n @ part["ffn_gate_weight"].T) * (n @ part["ffn_in_weight"].T)
        x = h + gated @ part["ffn_out_weight"].T
        block += 1
    return x
