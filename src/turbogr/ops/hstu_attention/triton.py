"""HSTU attention on an accelerator: forward and backward of the contract in autograd.py, by Triton kernels.

Sizes the kernels do not know (which rows, how long) stay on the device: nothing waits for it.
    T tokens, B rows, H heads; q, k [T, H, dqk], v [T, H, dv]
"""

import math
from dataclasses import dataclass, replace
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
    with_far_tiles,
    work_list,
)
from turbogr.ops.triton_support import TARGETS, Configuration, target

HALF = (torch.float16, torch.bfloat16)
NO_WINDOW = 1 << 30
BIAS_PROGRAMS = 4224
"""Programs that add up the tables' gradients: a few waves over the largest devices."""


@dataclass(frozen=True)
class Tile:
    """How one kernel is cut and launched."""

    queries: int
    keys: int
    warps: int
    stages: int


KERNELS = {"fwd": hstu_fwd_kernel, "dq": hstu_bwd_dq_kernel, "dkv": hstu_bwd_dkv_kernel, "bias": hstu_bwd_bias_kernel}
# Kind of target, widest head up to -> kernel -> tile: the largest that spill no register (docs/kernels.md), so that the
# products are large and keys are read seldom. On sm_90 without bias those are of two warpgroups with 64 rows each; with
# it most instructions are no products, and two small programs side by side hide them better.
TILES: dict[tuple[str, int], dict[str, Tile]] = {
    ("sm_90, no bias", 64): {
        "fwd": Tile(128, 64, 8, 2), "dq": Tile(128, 64, 8, 2), "dkv": Tile(64, 64, 4, 2),
    },
    ("sm_90, no bias", 128): {
        "fwd": Tile(128, 128, 8, 2), "dq": Tile(128, 128, 8, 2), "dkv": Tile(64, 128, 8, 2),
    },
    ("sm_90, no bias", 256): {
        "fwd": Tile(128, 64, 8, 2), "dq": Tile(128, 32, 8, 2), "dkv": Tile(32, 64, 8, 2),
    },
    ("sm_90", 64): {
        "fwd": Tile(64, 64, 4, 2), "dq": Tile(64, 64, 4, 2), "dkv": Tile(64, 64, 4, 2), "bias": Tile(64, 64, 8, 2),
    },
    ("sm_90", 128): {
        "fwd": Tile(64, 64, 4, 2), "dq": Tile(64, 64, 4, 2), "dkv": Tile(32, 64, 4, 2), "bias": Tile(64, 64, 8, 2),
    },
    ("sm_90", 256): {
        "fwd": Tile(128, 32, 8, 2), "dq": Tile(128, 32, 8, 2), "dkv": Tile(32, 64, 8, 2), "bias": Tile(32, 64, 8, 1),
    },
    ("sm_100", 64): {
        "fwd": Tile(128, 64, 8, 2), "dq": Tile(128, 64, 8, 2), "dkv": Tile(64, 128, 8, 2), "bias": Tile(64, 64, 8, 2),
    },
    ("sm_100", 128): {
        "fwd": Tile(128, 64, 8, 2), "dq": Tile(64, 64, 8, 2), "dkv": Tile(64, 64, 8, 2), "bias": Tile(32, 64, 8, 2),
    },
    ("sm_100", 256): {
        "fwd": Tile(64, 32, 8, 2), "dq": Tile(64, 32, 8, 2), "dkv": Tile(32, 32, 8, 2), "bias": Tile(16, 32, 8, 1),
    },
    ("sm", 64): {
        "fwd": Tile(128, 64, 8, 2), "dq": Tile(64, 64, 8, 2), "dkv": Tile(32, 64, 8, 2), "bias": Tile(32, 64, 8, 2),
    },
    ("sm", 128): {
        "fwd": Tile(128, 64, 8, 2), "dq": Tile(64, 32, 4, 2), "dkv": Tile(32, 32, 4, 2), "bias": Tile(32, 64, 8, 2),
    },
    ("sm", 256): {
        "fwd": Tile(64, 32, 8, 2), "dq": Tile(64, 32, 8, 2), "dkv": Tile(32, 32, 8, 2), "bias": Tile(16, 32, 8, 1),
    },
    ("gfx", 128): {
        "fwd": Tile(64, 64, 4, 2), "dq": Tile(64, 64, 4, 2), "dkv": Tile(32, 64, 4, 2), "bias": Tile(32, 64, 4, 2),
    },
    ("gfx", 256): {
        "fwd": Tile(64, 32, 4, 2), "dq": Tile(32, 32, 4, 2), "dkv": Tile(16, 32, 4, 2), "bias": Tile(32, 32, 4, 2),
    },
    ("sm, fp32", 64): {
        "fwd": Tile(32, 32, 4, 1), "dq": Tile(32, 32, 4, 1), "dkv": Tile(16, 32, 8, 1), "bias": Tile(32, 32, 8, 1),
    },
    ("sm, fp32", 256): {
        "fwd": Tile(16, 32, 8, 1), "dq": Tile(16, 32, 8, 1), "dkv": Tile(16, 32, 8, 1), "bias": Tile(16, 16, 8, 1),
    },
    ("gfx, fp32", 256): {
        "fwd": Tile(16, 16, 4, 1), "dq": Tile(16, 16, 4, 1), "dkv": Tile(16, 16, 4, 1), "bias": Tile(16, 16, 4, 1),
    },
}  # fmt: skip


def forward(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_len: int, bias: Bias, mask: Mask) -> Tensor:
    y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not len(q):
        return y
    if not _takes(q, v):
        return tiles.forward(q, k, v, offsets, max_len, bias, mask)
    call = _Call(q, k, v, offsets, max_len, bias, mask)
    call.launch("fwd", call.tile("fwd"), [q, k, v], [y])
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
    call = _Call(q, k, v, offsets, max_len, bias, mask)
    call.launch("dkv", call.tile("dkv"), [q, k, v, dy], [dk, dv], of_queries=False)
    call.launch("dq", call.tile("dq"), [q, k, v, dy], [dq])
    return _table_gradients(call, dy)


def _table_gradients(call: "_Call", dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    bias, device = call.bias, dy.device
    if bias.position is None and bias.time is None:
        return None, None
    tile = call.tile("bias")
    blocks = work_list(call.offsets, len(dy), tile.queries, of_queries=True)
    distances = -(-(call.max_len + tile.queries) // tile.keys) + 1
    most = 8 if target() == "interpreter" else BIAS_PROGRAMS
    stretch = -(-len(blocks) // max(1, most // distances))
    programs = -(-len(blocks) // stretch) * distances
    empty = torch.empty(0, dtype=torch.float32, device=device)
    position_parts = time_parts = target_parts = empty
    if bias.position is not None:
        position_parts = torch.empty(programs, tile.queries, tile.keys, dtype=torch.float32, device=device)
        if call.mask.num_targets is not None:
            target_parts = torch.zeros(len(blocks), call.max_len, dtype=torch.float32, device=device)
    if bias.time is not None:
        time_parts = torch.empty(programs, call.bucket_block, dtype=torch.float32, device=device)
    parts = (position_parts, time_parts, target_parts)
    call.launch_bias(tile, programs, dy, blocks, stretch, distances, parts)
    dposition = dtime = None
    if bias.position is not None:
        by_distance = position_parts.view(-1, distances, tile.queries, tile.keys).sum(0)
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
        # a pointer that no kernel reads stands in for what is not there
        self.tables = [tables.pairs, tables.values, *[tables.cells] * 3]
        self.event_times = [tables.cells] * 5
        if edges is not None:
            assert bias.times is not None and bias.next_times is not None
            self.times = made = relative_times(bias.times, bias.next_times, offsets)
            self.tables = [tables.pairs, tables.values, edges.edges, edges.edges64, tables.cells]
            self.event_times = [made.times, made.next_times, bias.times, bias.next_times, made.flags]
        general = not mask.causal_only
        self.targets = mask.num_targets
        if general and self.targets is None:
            self.targets = torch.zeros(len(offsets) - 1, dtype=torch.int64, device=q.device)

    def tile(self, kernel: str) -> Tile:
        plain = self.bias.position is None and self.bias.time is None and self.mask.causal_only
        return tile_of(kernel, target(), self.q.dtype, max(self.padded), plain=plain)

    def blocks(self, tile: Tile, *, of_queries: bool) -> tuple[Tensor, Tensor]:
        """The work list, and the buckets of its tiles."""
        block = tile.queries if of_queries else tile.keys
        blocks = work_list(self.offsets, len(self.q), block, of_queries=of_queries)
        if self.bias.time is None:
            return blocks, blocks
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
        }

    def _numbers(self) -> list[Any]:
        window = NO_WINDOW if self.mask.window is None else self.mask.window
        return [self.mask.num_context, window, self.buckets]

    def launch(
        self, kernel: str, tile: Tile, read: list[Tensor], written: list[Tensor], *, of_queries: bool = True
    ) -> None:
        blocks, ranges = self.blocks(tile, of_queries=of_queries)
        strides = [stride for x in (*read, *written) for stride in x.stride()[:2]]
        targets = self.offsets if self.targets is None else self.targets
        heads, rows = self.q.shape[1], len(self.offsets) - 1
        for wide in (False, True) if self.bias.time is not None else (False,):
            KERNELS[kernel][(len(blocks) * heads,)](
                *read, *written, self.offsets, blocks, targets, *self.tables, ranges, *self.event_times, *strides,
                1.0 / self.max_len, heads, rows, *self._numbers(), ranges.shape[1],
                **self.constants(tile), WIDE=wide, num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

    def launch_bias(
        self,
        tile: Tile,
        programs: int,
        dy: Tensor,
        blocks: Tensor,
        stretch: int,
        distances: int,
        parts: tuple[Tensor, ...],
    ) -> None:
        read = [self.q, self.k, self.v, dy]
        strides = [stride for x in read for stride in x.stride()[:2]]
        targets = self.offsets if self.targets is None else self.targets
        heads, rows = self.q.shape[1], len(self.offsets) - 1
        KERNELS["bias"][(programs,)](
            *read, self.offsets, blocks, targets, *parts, *self.tables, *self.event_times, *strides,
            1.0 / self.max_len, self.per_log2, heads, rows, len(blocks), stretch, distances, self.max_len,
            *self._numbers(), **self.constants(tile), BUCKETS=self.bucket_block, num_warps=tile.warps,
            num_stages=tile.stages,
        )  # fmt: skip


def tile_of(kernel: str, where: str, dtype: torch.dtype, dim: int, *, plain: bool) -> Tile:
    """The tile for heads of `dim` on a target; plain: no bias, and no mask but the causal one."""
    kind = "gfx" if where.startswith("gfx") else "sm"
    if dtype not in HALF:
        kind += ", fp32"
    elif where in ("sm_90", "sm_100"):
        kind = "sm_90, no bias" if plain and where == "sm_90" else where
    return TILES[kind, min(widest for name, widest in TILES if name == kind and widest >= dim)][kernel]


POINTERS = {
    "offsets": "*i64", "blocks": "*i32", "num_targets": "*i64",
    "pairs": "*fp32", "values": "*fp32", "edges": "*i32", "edges64": "*i64", "cells": "*i32", "ranges": "*i32",
    "times": "*i32", "next_times": "*i32", "times64": "*i64", "next_times64": "*i64",
    "row_flags": "*i32", "position_parts": "*fp32", "time_parts": "*fp32", "target_parts": "*fp32",
    "scale": "fp32", "per_log2": "fp32",
}  # fmt: skip
"""Types of the arguments that are neither of the run's own type nor 32-bit whole numbers."""
RUN_TENSORS = frozenset(("q", "k", "v", "y", "dy", "dq", "dk", "dv"))


def configurations() -> list[Configuration]:
    """Every tile as the published models launch it: heads of 64, 128 and 256 in bf16 with both biases and without any;
    every mask; heads of 50 and single precision; rows whose times need 64 bits."""
    every = [Shipped("bf16", dim) for dim in (64, 128, 256)]
    every += [replace(one, biases=False) for one in every]
    every += [replace(every[1], general=True), replace(every[1], wide=True)]
    every += [Shipped("fp32", dim) for dim in (50, 256)]
    # masks may take registers that a tile chosen without them does not have
    masked = [replace(one, general=True) for one in (every[0], every[2])]
    found: dict[Any, Configuration] = {}
    for where in TARGETS:
        for one in [*every, *masked] if where == "sm_90" else every:
            for kernel in KERNELS:
                if kernel != "bias" or (one.biases and not one.wide):
                    made = configuration(kernel, where, one)
                    key = (made.name, made.num_warps, made.constants["FAST"])
                    found[key] = replace(made, targets=(*found[key].targets, where)) if key in found else made
    return list(found.values())


@dataclass(frozen=True)
class Shipped:
    """What a configuration is compiled for besides its target."""

    dtype: str
    dim: int
    biases: bool = True
    general: bool = False
    wide: bool = False

    @property
    def name(self) -> str:
        words = [
            self.dtype,
            f"d={self.dim}",
            self.biases * "biases",
            self.general * "masks",
            self.wide * "64-bit times",
        ]
        return ", ".join(filter(None, words))


def configuration(kernel: str, where: str, one: Shipped, tile: Tile | None = None) -> Configuration:
    half = one.dtype != "fp32"
    block, fast = triton.next_power_of_2(one.dim), half and where.startswith("sm_")
    plain = not one.biases and not one.general
    tile = tile or tile_of(kernel, where, torch.bfloat16 if half else torch.float32, block, plain=plain)
    constants = {
        "DQK": one.dim, "DV": one.dim, "BLOCK_DQK": block, "BLOCK_DV": block, "BLOCK_I": tile.queries,
        "BLOCK_J": tile.keys, "POSITION": one.biases, "TIME": one.biases, "GENERAL": one.general,
        "CONTEXT_SEES": False, "FAST": fast, "SHIFT": 2,
    }  # fmt: skip
    constants |= {"BUCKETS": 256} if kernel == "bias" else {"WIDE": one.wide}
    names = [name for name in KERNELS[kernel].arg_names if name not in constants]
    own = {name: f"*{one.dtype}" if name in RUN_TENSORS else "i32" for name in names}
    strides = tuple(name for name in names if name.endswith(("_token", "_head")))
    return Configuration(
        name=f"{kernel}, {one.name}, {tile.queries} x {tile.keys}",
        kernel=KERNELS[kernel],
        signature=own | {name: POINTERS[name] for name in names if name in POINTERS},
        constants=constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        aligned=strides if one.dim % 16 == 0 else (),
        tensor=half,
        targets=(where,),
    )
