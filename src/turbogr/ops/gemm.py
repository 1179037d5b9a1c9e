"""Matrix products by the faster of torch's libraries.

torch.mm takes MKL in fp32, which runs AVX2 code on AMD's AVX-512 cores and reaches half of what oneDNN does there, at
every width of a layer; in bf16 torch.mm takes oneDNN by itself. The library follows from the processor by a fixed rule,
never from a measurement, so that a run repeats; `device.gemm` overrides it and `turbogr doctor` checks it.

MKL shares a long sum with few answers, such as a weight's gradient, among its threads, so that the last bits depend on
how many there are. Importing this module asks it not to, wherever it can be asked. oneDNN does not in fp32, nor in bf16
but for its AMX code, which nothing can ask: there the last bits of bf16 weights' gradients depend on the threads.
"""

import functools
import os
import re
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Library = Literal["mkl", "onednn"]

_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
_taken: list[Library] = []
"""What `take` chose for this process; empty until it is asked for."""


def strict_mode() -> str | None:
    """The value of MKL_CBWR that makes MKL's fp32 products on this processor the same to the last bit for any number
    of threads; None where MKL has none (on other makers' processors it would fall back to SSE2)."""
    able = torch.get_device_module("cpu").get_capabilities()
    if _vendor_and_family()[0] != "GenuineIntel" or not able.get("avx2"):
        return None
    return "AVX512,STRICT" if able.get("avx512_f") else "AVX2,STRICT"


def _ask_for_equal_bits() -> None:
    # MKL reads the variable once, at its first product; it costs 0 to 15 %, most where a layer is narrow
    wanted = strict_mode()
    if wanted is not None:
        os.environ.setdefault("MKL_CBWR", wanted)


def bits_by_threads() -> str:
    """Which products' last bits depend on the number of threads on this processor."""
    kinds = []
    if rule()[0] == "mkl" and not os.environ.get("MKL_CBWR", "").endswith(",STRICT"):
        kinds.append("fp32 (MKL, no strict MKL_CBWR)")
    if torch.get_device_module("cpu").get_capabilities().get("amx_bf16"):
        kinds.append("bf16 (oneDNN's AMX code)")
    return ", ".join(kinds) or "none"


@functools.cache
def rule() -> tuple[Library, str]:
    """(library, reason) for fp32 on this processor; "mkl" stands for whatever torch.mm takes."""
    if _linear is None:
        return "mkl", "this build of torch has no oneDNN"
    vendor, family = _vendor_and_family()
    if vendor == "AuthenticAMD" and torch.get_device_module("cpu").get_capabilities().get("avx512_f"):
        return "onednn", f"AMD family {family} with AVX-512: MKL runs AVX2 code there"
    return "mkl", f"torch's own choice on {vendor} family {family}"


def take(wanted: Literal["auto"] | Library = "auto") -> Library:
    """Compute with that library from now on, auto with the rule's; answers which."""
    _taken[:] = [rule()[0] if wanted == "auto" or _linear is None else wanted]
    return _taken[0]


def gemm(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [K, N], either of them possibly a transposed view."""
    if a.is_cpu and a.dtype == torch.float32 and (_taken or [take()])[0] == "onednn" and a.numel() and b.numel():
        assert _linear is not None
        product: Tensor = _linear(a, b.T, None, "none", [], "")
        return product
    return torch.mm(a, b)


def _vendor_and_family() -> tuple[str, str]:
    try:
        said = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "unknown", "unknown"
    found = [re.search(rf"^{key}\s*:\s*(\S+)", said, re.MULTILINE) for key in ("vendor_id", "cpu family")]
    return found[0][1] if found[0] else "unknown", found[1][1] if found[1] else "unknown"


_ask_for_equal_bits()
