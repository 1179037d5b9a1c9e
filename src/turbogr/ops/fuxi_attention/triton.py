"""FuXi's position and time channels on an accelerator: the contract of autograd.py, by Triton kernels.

Which rows there are and how long they are stays on the device: nothing waits for it.
    T tokens, B rows, H heads, C channels; v [T, H, dv], y [T, C, H, dv]; W = H dv columns
"""

import functools
import math
from typing import Any

import torch
import triton
from torch import Tensor

from turbogr.ops.fuxi_attention.autograd import MapGradients
from turbogr.ops.fuxi_attention.reference import Maps
from turbogr.ops.fuxi_attention.triton_kernels import fuxi_bwd_dv_kernel, fuxi_bwd_maps_kernel, fuxi_fwd_kernel
from turbogr.ops.hstu_attention.reference import Mask, bucket_edges
from turbogr.ops.hstu_attention.triton import BIAS_PROGRAMS, HALF, NO_WINDOW, Tile
from turbogr.ops.hstu_attention.triton_plan import diagonal_sums, work_list
from turbogr.ops.triton_support import TARGETS, Configuration, target

KERNELS = {"fwd": fuxi_fwd_kernel, "dv": fuxi_bwd_dv_kernel, "maps": fuxi_bwd_maps_kernel}
TILES: dict[str, dict[str, Tile]] = {
    # kind of target -> kernel -> tile
    "sm_90": {"fwd": Tile(64, 64, 8, 2), "dv": Tile(64, 64, 8, 2), "maps": Tile(64, 64, 8, 2)},
    "plain": {"fwd": Tile(64, 32, 8, 2), "dv": Tile(32, 64, 8, 2), "maps": Tile(64, 64, 8, 1)},
    "single": {"fwd": Tile(32, 32, 4, 1), "dv": Tile(32, 32, 4, 1), "maps": Tile(32, 32, 4, 1)},
}
COLUMNS = {"sm_90": 64, "plain": 64, "single": 32}
"""Columns of v that a program multiplies by one tile of a map, at most."""
DECAY_SUMS = 4


def takes(q: Tensor, k: Tensor, v: Tensor, maps: Maps) -> bool:
    return q.dtype in (*HALF, torch.float32) and q.dtype == k.dtype == v.dtype


def forward(v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask, y: Tensor) -> None:
    if len(v):
        call = _Call(v, offsets, max_len, maps, mask)
        call.launch("fwd", [call.v, y], [call.v.stride(0), y.stride(0), y.stride(1)], of_queries=True)


def backward(dy: Tensor, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask, dv: Tensor) -> MapGradients:
    tables = (maps.position, maps.time, maps.decay)
    if not len(v):
        return tuple(None if x is None else torch.zeros_like(x) for x in tables)  # type: ignore[return-value]
    call = _Call(v, offsets, max_len, maps, mask)
    dy, added = _dense_heads(dy), _dense_heads(dv)
    call.launch("dv", [dy, added], [dy.stride(0), dy.stride(1), added.stride(0)], of_queries=False)
    if added is not dv:
        dv.copy_(added)
    return _map_gradients(call, dy)


def _map_gradients(call: "_Call", dy: Tensor) -> MapGradients:
    maps, device = call.maps, dy.device
    tile = call.tile("maps")
    blocks = work_list(call.offsets, len(dy), tile.queries, of_queries=True)
    distances = -(-(call.max_len + tile.queries) // tile.keys) + 1
    most = 8 if target() == "interpreter" else BIAS_PROGRAMS
    stretch = -(-len(blocks) // max(1, most // distances))
    programs = -(-len(blocks) // stretch) * distances
    position_parts = time_parts = target_parts = torch.empty(0, dtype=torch.float32, device=device)
    if maps.position is not None:
        position_parts = torch.empty(programs, tile.queries, tile.keys, dtype=torch.float32, device=device)
        if call.mask.num_targets is not None:
            target_parts = torch.zeros(len(blocks), call.max_len, dtype=torch.float32, device=device)
    if maps.has_time:
        time_parts = torch.empty(programs, call.sums, dtype=torch.float32, device=device)
    KERNELS["maps"][(programs,)](
        call.v, dy, call.offsets, blocks, call.targets, position_parts, time_parts, target_parts, *call.tables,
        call.v.stride(0), dy.stride(0), dy.stride(1), call.width, call.parts, len(call.offsets) - 1,
        len(blocks), stretch, distances, call.max_len, *call.numbers,
        **call.constants(tile), BUCKETS=call.sums, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    dposition = dtime = ddecay = None
    if maps.position is not None:
        dposition = diagonal_sums(position_parts.view(-1, distances, tile.queries, tile.keys).sum(0), call.max_len)
        dposition = dposition + target_parts.sum(0) if len(target_parts) else dposition
        dposition = dposition.to(maps.position.dtype)
    if maps.time is not None:
        dtime = time_parts.sum(0)[: len(maps.time)].to(maps.time.dtype)
    if maps.decay is not None:
        ddecay = _decay_gradient(maps.decay, time_parts.sum(0))
    return dposition, dtime, ddecay


def _decay_gradient(decay: Tensor, sums: Tensor) -> Tensor:
    """Of alpha * gamma ** (T ** beta), from sums of gate, gate * power and gate * power * ln T times the gradients."""
    alpha, _, gamma = decay.float().unbind()
    of_gate, of_power, of_log, _ = sums.unbind()
    return torch.stack((of_gate, alpha * gamma.log() * of_log, alpha / gamma * of_power)).to(decay.dtype)


def _dense_heads(x: Tensor) -> Tensor:
    """x [.., H, d] with its heads next to each other."""
    heads, dim = x.shape[-2:]
    dense = (x.stride(-1) == 1 or dim == 1) and (x.stride(-2) == dim or heads == 1)
    return x if dense else x.contiguous()


@functools.cache
def _edges(width: float, buckets: int, device: torch.device) -> Tensor:
    """int64 [buckets + 1] the smallest |dt| of every bucket."""
    return torch.tensor((0, *bucket_edges(width, buckets)), dtype=torch.int64, device=device)


class _Call:
    """The arguments that all kernels of one call share."""

    def __init__(self, v: Tensor, offsets: Tensor, max_len: int, maps: Maps, mask: Mask) -> None:
        self.v, self.offsets, self.max_len, self.maps, self.mask = _dense_heads(v), offsets, max_len, maps, mask
        self.width = v.shape[1] * v.shape[2]
        self.columns = min(COLUMNS[self._kind], max(16, triton.next_power_of_2(self.width)))
        self.parts = -(-self.width // self.columns)
        self.general = not mask.causal_only
        buckets = 0 if maps.time is None else len(maps.time) - 1
        self.sums = DECAY_SUMS if maps.decay is not None else triton.next_power_of_2(buckets + 1)
        window = NO_WINDOW if mask.window is None else mask.window
        per_log2 = math.log(2.0) / maps.bucket_width
        self.numbers = [mask.num_context, window, buckets, per_log2]
        self.targets = offsets
        if self.general:
            self.targets = torch.zeros_like(offsets[1:]) if mask.num_targets is None else mask.num_targets
        self.tables = self._tables(buckets)

    @property
    def _kind(self) -> str:
        if self.v.dtype not in HALF:
            return "single"
        return "sm_90" if target() == "sm_90" else "plain"

    def _tables(self, buckets: int) -> list[Tensor]:
        maps, device = self.maps, self.v.device
        # a pointer that no kernel reads stands in for what is not there
        position, time, edges, decay = (self.offsets,) * 4
        if maps.position is not None:
            position = maps.position.float().contiguous()
        if maps.time is not None:
            time, edges = maps.time.float().contiguous(), _edges(maps.bucket_width, buckets, device)
        if maps.decay is not None:
            decay = maps.decay.float()
        times = [self.offsets] * 2
        if maps.has_time:
            assert maps.times is not None and maps.next_times is not None
            times = [maps.times.contiguous(), maps.next_times.contiguous()]
        return [position, time, edges, decay, *times]

    def tile(self, kernel: str) -> Tile:
        return TILES[self._kind][kernel]

    def constants(self, tile: Tile) -> dict[str, Any]:
        half = self.v.dtype in HALF
        return {
            "BLOCK_I": tile.queries,
            "BLOCK_J": tile.keys,
            "BLOCK_C": self.columns,
            "EVEN": self.width % self.columns == 0,
            "POSITION": self.maps.position is not None,
            "TIME": self.maps.has_time,
            "DECAY": self.maps.decay is not None,
            "GENERAL": self.general,
            "FAST": target().startswith("sm_") and half,
        }

    def launch(self, kernel: str, tensors: list[Tensor], strides: list[int], *, of_queries: bool) -> None:
        tile = self.tile(kernel)
        blocks = work_list(self.offsets, len(self.v), tile.queries if of_queries else tile.keys, of_queries=of_queries)
        KERNELS[kernel][(len(blocks) * self.parts,)](
            *tensors, self.offsets, blocks, self.targets, *self.tables, *strides,
            self.width, self.parts, len(self.offsets) - 1, *self.numbers,
            **self.constants(tile), num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip


POINTERS = {
    "offsets": "*i64", "blocks": "*i32", "num_targets": "*i64",
    "position": "*fp32", "time": "*fp32", "edges": "*i64", "decay": "*fp32", "times": "*i64", "next_times": "*i64",
    "position_parts": "*fp32", "time_parts": "*fp32", "target_parts": "*fp32", "per_log2": "fp32",
}  # fmt: skip
"""Types of the arguments that are neither of the run's own type nor 32-bit whole numbers."""
RUN_TENSORS = frozenset(("v", "y", "dy", "dv"))
KINDS = {"sm_90": ("sm_90",), "plain": tuple(name for name in TARGETS if name != "sm_90")}


def configurations() -> list[Configuration]:
    """Both time maps with a position map; every mask with the table; single precision."""
    shipped = [
        (where, "bf16", *one) for one in (("table", False), ("decay", False), ("table", True)) for where in KINDS
    ]
    shipped.append(("single", "fp32", "table", False))
    return [_configuration(name, *one) for one in shipped for name in KERNELS]


@functools.cache
def _configuration(kernel: str, kind: str, dtype: str, time: str, general: bool) -> Configuration:
    half = dtype != "fp32"
    tile, columns = TILES[kind][kernel], COLUMNS[kind]
    constants = {
        "BLOCK_I": tile.queries, "BLOCK_J": tile.keys, "BLOCK_C": columns, "EVEN": True,
        "POSITION": True, "TIME": True, "DECAY": time == "decay", "GENERAL": general,
        "FAST": kind == "sm_90",
    }  # fmt: skip
    if kernel == "maps":
        constants["BUCKETS"] = DECAY_SUMS if time == "decay" else 256
    names = [name for name in KERNELS[kernel].arg_names if name not in constants]
    own = {name: f"*{dtype}" if name in RUN_TENSORS else "i32" for name in names}
    return Configuration(
        name=f"{kernel}, {dtype}, {time}{', masks' if general else ''}, {tile.queries} x {tile.keys} x {columns}"
        f"{', sm_90' if kind == 'sm_90' else ''}",
        kernel=KERNELS[kernel],
        signature=own | {name: POINTERS[name] for name in names if name in POINTERS},
        constants=constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        aligned=tuple(name for name in names if name.endswith(("_token", "_channel"))),
        tensor=half,
        targets=KINDS.get(kind, TARGETS),
    )
