"""HSTU attention on an accelerator: forward and backward of the contract in autograd.py, by Triton kernels.

Sizes the kernels do not know (which rows, how long) stay on the device: nothing waits for it.
    T tokens, B rows, H heads; q, k [T, H, dqk], v [T, H, dv]
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from turbogr.ops.hstu_attention import tiles
from turbogr.ops.hstu_attention.reference import Bias, Mask
from turbogr.ops.hstu_attention.triton_bias import hstu_bwd_bias_kernel
from turbogr.ops.hstu_attention.triton_kernels import hstu_bwd_dkv_kernel, hstu_bwd_dq_kernel, hstu_fwd_kernel
from turbogr.ops.hstu_attention.triton_plan import (
    Edges,
    diagonal_sums,
    edge_tables,
    half_tables,
    relative_times,
    tiles_at_distance,
    with_far_tiles,
    work_list,
)
from turbogr.ops.triton_support import Configuration, target

HALF = (torch.float16, torch.bfloat16)
NO_WINDOW = 1 << 30
BIAS_PROGRAMS = 1056
"""Programs that add up the tables' gradients: a few waves over the largest devices."""


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut and launched."""

    queries: int
    keys: int
    warps: int
    stages: int


KERNELS = {"fwd": hstu_fwd_kernel, "dq": hstu_bwd_dq_kernel, "dkv": hstu_bwd_dkv_kernel, "bias": hstu_bwd_bias_kernel}
TILES: dict[tuple[str, int], dict[str, Tile]] = {
    # (kind of target, widest head up to) -> kernel -> tile; halves and singles differ in `_tile`
    ("sm_90", 64): {"fwd": Tile(64, 64, 4, 3), "dq": Tile(64, 64, 4, 3), "dkv": Tile(64, 64, 4, 3), "bias": Tile(64, 128, 8, 2)},
    ("sm_90", 128): {"fwd": Tile(128, 64, 8, 3), "dq": Tile(128, 64, 8, 2), "dkv": Tile(64, 128, 8, 2), "bias": Tile(64, 128, 8, 2)},
    ("sm_90", 256): {"fwd": Tile(128, 64, 8, 2), "dq": Tile(64, 64, 8, 2), "dkv": Tile(64, 64, 8, 1), "bias": Tile(64, 64, 8, 2)},
    ("plain", 256): {"fwd": Tile(64, 32, 4, 2), "dq": Tile(64, 32, 4, 2), "dkv": Tile(32, 64, 4, 2), "bias": Tile(32, 64, 4, 2)},
    ("single", 256): {"fwd": Tile(32, 32, 4, 1), "dq": Tile(32, 32, 4, 1), "dkv": Tile(32, 32, 4, 1), "bias": Tile(32, 32, 4, 1)},
}  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias, mask: Mask) -> Tensor:
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not len(q):
        return y
    if not _takes(q, v):
        return tiles.forward(q, k, v, offsets, max_len, bias, mask)
    call = _Call(q, k, v, offsets, max_len, bias, mask)
    tile = call.tile("fwd")
    blocks = call.blocks(tile, of_queries=True)
    call.launch("fwd", tile, len(blocks) * q.shape[1], [q, k, v], [y], blocks)
    return y


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    max_len: int,
    bias: Bias,
    mask: Mask,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    if not len(q):
        return tuple(None if x is None else torch.zeros_like(x) for x in (bias.position, bias.time))  # type: ignore[return-value]
    if not _takes(q, v):
        return tiles.backward(dy, q, k, v, offsets, max_len, bias, mask, dq, dk, dv)
    dy = dy if dy.stride(2) == 1 else dy.contiguous()
    heads = q.shape[1]
    call = _Call(q, k, v, offsets, max_len, bias, mask)
    tile = call.tile("dkv")
    blocks = call.blocks(tile, of_queries=False)
    call.launch("dkv", tile, len(blocks) * heads, [q, k, v, dy], [dk, dv], blocks)
    tile = call.tile("dq")
    blocks = call.blocks(tile, of_queries=True)
    call.launch("dq", tile, len(blocks) * heads, [q, k, v, dy], [dq], blocks)
    return _table_gradients(call, dy)


def _table_gradients(call: "_Call", dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    bias, device = call.bias, dy.device
    if bias.position is None and bias.time is None:
        return None, None
    tile = call.tile("bias")
    blocks = work_list(call.offsets, len(dy), tile.queries, of_queries=True)
    counts = tiles_at_distance(blocks, call.max_len, tile.queries, tile.keys)
    most = 8 if target() == "interpreter" else BIAS_PROGRAMS
    splits = max(1, min(len(blocks), most // len(counts)))
    programs = splits * len(counts)
    empty = torch.empty(0, dtype=torch.float32, device=device)
    position_parts = time_parts = target_parts = empty
    if bias.position is not None:
        position_parts = torch.empty(programs, tile.queries, tile.keys, dtype=torch.float32, device=device)
        if call.mask.num_targets is not None:
            target_parts = torch.zeros(len(blocks), call.max_len, dtype=torch.float32, device=device)
    if bias.time is not None:
        time_parts = torch.empty(programs, call.bucket_block, dtype=torch.float32, device=device)
    call.launch_bias(tile, programs, splits, dy, blocks, counts, position_parts, time_parts, target_parts)
    dposition = dtime = None
    if bias.position is not None:
        by_distance = position_parts.view(len(counts), splits, tile.queries, tile.keys).sum(1)
        dposition = diagonal_sums(by_distance, call.max_len)
        if len(target_parts):
            dposition = dposition + target_parts.sum(0) * (0.5 / call.max_len)
        dposition = dposition.to(bias.position.dtype)
    if bias.time is not None:
        dtime = time_parts.sum(0)[: len(bias.time)].to(bias.time.dtype)
    return dposition, dtime


def _takes(q: Tensor, v: Tensor) -> bool:
    return q.dtype in (*HALF, torch.float32) and max(q.shape[2], v.shape[2]) <= 256


class _Call:
    """The arguments that all kernels of one call share."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias, mask: Mask) -> None:
        self.q, self.k, self.v, self.offsets, self.max_len, self.bias, self.mask = q, k, v, offsets, max_len, bias, mask
        self.dims = (q.shape[2], v.shape[2])
        self.padded = tuple(max(16, triton.next_power_of_2(dim)) for dim in self.dims)
        self.buckets = 0 if bias.time is None else len(bias.time) - 1
        self.bucket_block = triton.next_power_of_2(self.buckets + 1)
        edges: Edges | None = None
        self.per_log2 = 0.0
        if bias.time is not None:
            edges = edge_tables(bias.bucket_width, self.buckets, q.device)
            self.per_log2 = math.log(2.0) / bias.bucket_width
        self.shift = 0 if edges is None else edges.shift
        tables = half_tables(bias, edges, q.device)
        self.bias_pointers = [tables.position, tables.values, *[tables.values] * 8]
        if edges is not None:
            assert bias.times is not None and bias.next_times is not None
            self.times = made = relative_times(bias.times, bias.next_times, offsets)
            self.bias_pointers = [
                tables.position, tables.values, edges.edges, edges.edges64, tables.cell_values, edges.cell_edges,
                made.times, made.next_times, bias.times, bias.next_times, made.flags,
            ]  # fmt: skip
        else:
            self.bias_pointers.append(tables.values)
        general = not mask.causal_only
        self.targets = mask.num_targets
        if general and self.targets is None:
            self.targets = torch.zeros(len(offsets) - 1, dtype=torch.int64, device=q.device)

    def tile(self, kernel: str) -> Tile:
        return tile_of(kernel, target(), self.q.dtype, max(self.padded))

    def blocks(self, tile: Tile, *, of_queries: bool) -> Tensor:
        block = tile.queries if of_queries else tile.keys
        blocks = work_list(self.offsets, len(self.q), block, of_queries=of_queries)
        if self.bias.time is None:
            return blocks
        return with_far_tiles(
            blocks, self.offsets, self.times, self.max_len, self.per_log2, self.buckets,
            tile.queries, tile.keys, of_queries=of_queries,
        )  # fmt: skip

    def constants(self, tile: Tile) -> dict[str, Any]:
        return {
            "DQK": self.dims[0],
            "DV": self.dims[1],
            "BLOCK_DQK": self.padded[0],
            "BLOCK_DV": self.padded[1],
            "BLOCK_I": tile.queries,
            "BLOCK_J": tile.keys,
            "POSITION": self.bias.position is not None,
            "TIME": self.bias.time is not None,
            "GENERAL": not self.mask.causal_only,
            "CONTEXT_SEES": self.mask.context_sees_history,
            "FAST": target().startswith("sm_") and self.q.dtype in HALF,
            "SHIFT": self.shift,
            "PRECISION": "tf32" if self.q.dtype in HALF else "ieee",
        }

    def _numbers(self) -> list[Any]:
        window = NO_WINDOW if self.mask.window is None else self.mask.window
        return [self.mask.num_context, window, self.buckets]

    def launch(
        self, kernel: str, tile: Tile, programs: int, read: list[Tensor], written: list[Tensor], blocks: Tensor
    ) -> None:
        strides = [stride for x in (*read, *written) for stride in x.stride()[:2]]
        targets = self.offsets if self.targets is None else self.targets
        rows = len(self.offsets) - 1
        KERNELS[kernel][(programs,)](
            *read, *written, self.offsets, blocks, targets, *self.bias_pointers, *strides,
            1.0 / self.max_len, self.per_log2, self.q.shape[1], rows, *self._numbers(),
            **self.constants(tile), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    def launch_bias(
        self, tile: Tile, programs: int, splits: int, dy: Tensor, blocks: Tensor, counts: Tensor, *parts: Tensor
    ) -> None:
        read = [self.q, self.k, self.v, dy]
        strides = [stride for x in read for stride in x.stride()[:2]]
        targets = self.offsets if self.targets is None else self.targets
        KERNELS["bias"][(programs,)](
            *read, self.offsets, blocks, counts, targets, *parts, *self.bias_pointers, *strides,
            1.0 / self.max_len, self.per_log2, self.q.shape[1], splits, self.max_len, *self._numbers(),
            **self.constants(tile), BUCKETS=self.bucket_block, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


def tile_of(kernel: str, where: str, dtype: torch.dtype, dim: int) -> Tile:
    kind = "single" if dtype not in HALF else where if where == "sm_90" else "plain"
    known = min(widest for name, widest in TILES if name == kind and widest >= dim)
    return TILES[kind, known][kernel]


def configurations() -> list[Configuration]:
    return []
