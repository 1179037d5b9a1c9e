"""The compiled CPU operators: found, checked and called through ctypes.

Libraries are built at installation (see build.py), one per source file and instruction set, and never later at import.
`library(name)` answers the one for this processor, of the best set that the source has code for; `rejects(name)` says
why there is none: every operator has a torch backend that runs instead.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from turbogr.ops.native.build import INSTRUCTION_SETS, SOURCES, digest, library_path, machine, read_facts, sets_of

NEEDS = {
    # what torch calls the processor's abilities that each instruction set needs
    "avx2": ("avx2", "fma3"),
    "avx512": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl"),
    "avx512bf16": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16"),
    "amx": ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16", "amx_tile", "amx_bf16"),
    "neon": (),
}
FORCED_SET = "TURBOGR_INSTRUCTION_SET"
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # Linux on x86_64


def runnable() -> list[str]:
    """The instruction sets that this processor runs, and the kernel lets this process run, plainest first."""
    able = torch.get_device_module("cpu").get_capabilities()
    known = INSTRUCTION_SETS.get(machine(), {})
    runs = [name for name in known if all(able.get(need) for need in NEEDS[name])]
    return [name for name in runs if name != "amx" or _may_use_tiles()]


@functools.cache
def _may_use_tiles() -> bool:
    """Asks for AMX's tile registers, which a Linux process gets only then; all its threads have them from here on."""
    refused: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return refused == 0


@functools.cache
def instruction_set() -> str:
    """The best one that this processor runs, or the one TURBOGR_INSTRUCTION_SET names; raises OSError."""
    known = INSTRUCTION_SETS.get(machine(), {})
    runs = runnable()
    forced = os.environ.get(FORCED_SET)
    if forced and forced not in runs:
        raise OSError(f"{FORCED_SET}={forced} does not run on this processor, {', '.join(runs) or 'none'} would")
    if not runs:
        raise OSError(f"this {machine()} processor has none of the instruction sets {', '.join(known) or 'they need'}")
    return forced or runs[-1]


@functools.cache
def library(name: str) -> ctypes.CDLL:
    """The library built from src/NAME.cpp; raises OSError with the reason where there is none."""
    facts = read_facts()
    if "reason" in facts:
        raise OSError(f"not compiled: {facts['reason']}, then run `turbogr doctor --build`")
    if facts.get("machine") != machine() or name not in facts["sources"]:
        raise OSError("not compiled: run `turbogr doctor --build`")
    if facts["sources"][name] != digest(SOURCES / f"{name}.cpp"):
        raise OSError("compiled from other sources: run `turbogr doctor --build`")
    return ctypes.CDLL(str(library_path(name, library_set(name))))


def library_set(name: str) -> str:
    """The instruction set that library `name` is loaded for: the best of those it has that is none above ours."""
    best = instruction_set()
    order = list(INSTRUCTION_SETS[machine()])
    return [one for one in sets_of(name) if order.index(one) <= order.index(best)][-1]


def rejects(name: str) -> Callable[[torch.device], str | None]:
    """A backend's `rejects`: why library `name` cannot take tensors on a device, or None."""

    def reason(device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"compiled for CPUs, not for {device.type}"
        try:
            library(name)
        except OSError as problem:
            return str(problem)
        return None

    return reason


def function(name: str, symbol: str, *arguments: Any) -> Callable[..., Any]:
    """`symbol` of library `name`, its argument types declared."""
    found = getattr(library(name), symbol)
    found.argtypes, found.restype = arguments, None
    checked: Callable[..., Any] = found
    return checked


def address(x: Tensor | None) -> int | None:
    """Where the first element lies; None is a null pointer."""
    return None if x is None else x.data_ptr()
