"""What this machine can do at best, measured: the ceilings that MFU and `turbogr doctor` compare with.

Rates are medians of several calls after a warm-up. A CPU has no datasheet figure for its dtype and clock, so the best
square GEMM that any library here reaches stands for its peak.
"""

import functools
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator

import torch

from turbogr.device import cores, cpu_model, synchronize

CPU = torch.device("cpu")
CALLS = 7
SIZES = (1024, 2048)
COPY_BYTES = 64 * 2**20
ENOUGH_S = 0.6
"""Measuring one thing ends after that long: old CPUs emulate bf16 at a hundredth of the fp32 rate."""


def measured_gemm_gflops(dtype: torch.dtype, device: torch.device = CPU) -> float:
    """The best square GEMM here in GFLOP/s, with the threads that torch has now; measured once per process."""
    return max(gemm_ways(dtype, device, torch.get_num_threads()).values())


@functools.cache
def gemm_ways(dtype: torch.dtype, device: torch.device, threads: int) -> dict[str, float]:
    """GFLOP/s of each library's square GEMM: torch.mm, and for fp32 oneDNN, which torch.mm takes for bf16 only."""
    assert threads == torch.get_num_threads()
    rates: dict[str, float] = {}
    for name, multiply in _ways(dtype, device):
        # the smaller size warms up and says whether the larger one is worth its time
        rates[name], seconds = _gflops(multiply, SIZES[0], dtype, device)
        if seconds * (SIZES[1] / SIZES[0]) ** 3 < ENOUGH_S:
            rates[name] = max(rates[name], _gflops(multiply, SIZES[1], dtype, device)[0])
    return rates


def copy_gb_per_s(device: torch.device = CPU) -> float:
    """Bytes read plus bytes written per second, in GB/s, by a copy far larger than the caches."""
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), device) / 1e9


def cpu_facts() -> dict[str, str | int | float]:
    able = torch.get_device_module("cpu").get_capabilities()
    sets = [
        name
        for name, has in sorted(able.items())
        if has is True and name.startswith(("avx", "amx", "fma", "sve", "neon"))
    ]
    return {
        "model": cpu_model(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "instruction_sets": " ".join(sets) or platform.machine(),
        "memory_gib": round(memory_bytes() / 2**30, 1),
    }


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's limit where that is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as stream:
            limit = stream.read().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def compiler() -> str | None:
    """First line of `c++ --version` (or of clang++, g++), None without a C++ compiler."""
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            said = subprocess.run([name, "--version"], capture_output=True, text=True, check=False).stdout
            return f"{name}: {said.splitlines()[0]}" if said else name
    return None


def _ways(
    dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]]:
    yield "torch.mm", torch.mm
    if device.type == "cpu" and dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        linear = torch.ops.mkldnn._linear_pointwise
        yield "oneDNN", lambda a, b: linear(a, b, None, "none", [], "")


def _gflops(
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], size: int, dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """GFLOP/s and seconds of one call at [size, size]."""
    a = torch.ones(size, size, device=device, dtype=dtype)
    b = torch.full_like(a, 0.5)
    seconds = _best_seconds(lambda: multiply(a, b), device)
    return 2 * size**3 / seconds / 1e9, seconds


def _best_seconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    synchronize(device)
    times: list[float] = []
    while len(times) < CALLS and sum(times) < ENOUGH_S:
        begin = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return min(times)
