"""What the Triton backends share: whether they can run here, and the list of what is shipped.

Triton is imported by the modules that hold kernels, and those when one of them is first called: `import turbogr` needs
neither Triton nor a GPU. With TRITON_INTERPRET=1 the kernels run on the CPU, as numpy, for tests.
"""

import functools
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""What every shipped configuration is compiled for ahead of time (tools/kernel_report.py)."""
INTERPRETER = "interpreter"


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One compiled form of a kernel, as a launch on a GPU makes it; a module with kernels lists its own in
    `configurations()`."""

    name: str
    kernel: Any
    """What @triton.jit made."""
    signature: Mapping[str, str]
    """Triton's type of every argument that is no constant: "*bf16", "*i64", "i32", "fp32"."""
    constants: Mapping[str, Any]
    """The constexpr arguments, and None for pointers that are not given."""
    num_warps: int
    num_stages: int = 3
    aligned: tuple[str, ...] = ()
    """Whole-number arguments that are multiples of 16; all pointers are taken to be."""
    tensor: bool = False
    """It has matrix products that must run on tensor cores."""
    targets: tuple[str, ...] = field(default=TARGETS)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def rejects_triton(device: torch.device) -> str | None:
    """A backend's `rejects`: why Triton's kernels cannot take tensors on a device, or None."""
    if device.type == "cpu" and not interpreted():
        return "Triton kernels need a GPU"
    if device.type not in ("cpu", "cuda"):
        return f"Triton kernels are for NVIDIA and AMD GPUs, not for {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'turbogr[gpu]'"
    return None


def late(module: str, name: str) -> Callable[..., Any]:
    """The function `name` of `module`, which is imported at the first call."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return call


@functools.cache
def target() -> str:
    """What kernels are compiled for here: "sm_90", "gfx942", ... or "interpreter"."""
    if interpreted():
        return INTERPRETER
    driver = importlib.import_module("triton.runtime.driver").driver
    found = driver.active.get_current_target()
    return f"sm_{found.arch}" if found.backend == "cuda" else str(found.arch)


def next_power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
