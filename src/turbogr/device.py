"""The device a run computes on: picked, timed and measured the same way on a CPU and on any accelerator.

The code speaks torch.accelerator, so CUDA, ROCm and Ascend are one path. A machine without an accelerator has no
current one and torch.accelerator raises there; these functions answer for the CPU itself.
"""

import ctypes
import os
import platform
import re
import resource
import sys
from typing import Any

import torch

from turbogr.errors import ConfigError
from turbogr.launch import local_ranks

_DATASHEET = {
    # Dense bf16 rates without sparsity in FLOP/s, whatever a run's dtype: MFU is judged against them. The first that
    # stands in the device's name as words holds.
    "H200 NVL": 835e12,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "MI300X": 1307e12,
}


def pick_device(name: str = "auto") -> torch.device:
    """The device of that type, `auto` an accelerator where there is one; of several, the one numbered LOCAL_RANK."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if name == "cpu" or (name == "auto" and found is None):
        return torch.device("cpu")
    if found is None or name not in ("auto", found.type):
        here = f"the accelerator here is {found.type}" if found else "this machine has no accelerator that torch sees"
        raise ConfigError(f"device.name {name!r} is not available ({here}): take auto or cpu.")
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if index >= torch.accelerator.device_count():
        raise ConfigError(
            f"rank {index} of this machine has no device, there are {torch.accelerator.device_count()}: "
            "start fewer ranks per machine."
        )
    return torch.device(found.type, index)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on `device` is done; a CPU queues nothing."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def current_stream(device: torch.device) -> Any:
    """The stream that work on `device` is queued on; on a CPU an object with the same calls that orders nothing."""
    if device.type == "cpu":
        return torch.get_device_module("cpu").current_stream()
    return torch.accelerator.current_stream(device)


def memory_peak(device: torch.device) -> int:
    """Most bytes held at once so far: allocated on an accelerator; on a CPU the resident set of this process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def supports_bf16(device: torch.device) -> bool:
    """Whether bf16 is computed in hardware (a device that emulates it is slower in bf16 than in fp32)."""
    if device.type != "cpu":
        return bool(torch.get_device_module(device).is_bf16_supported())
    able = torch.get_device_module("cpu").get_capabilities()
    return any(bool(able.get(name)) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))


def device_name(device: torch.device) -> str:
    """The product's name as its driver or the operating system gives it."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    return cpu_model()


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as stream:
            for line in stream:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: int) -> int:
    """Compute with that many CPU threads, 0 for this rank's share of the cores; answers the number."""
    threads = threads or max(cores() // local_ranks(), 1)
    torch.set_num_threads(threads)
    return threads


def peak_flops(device: torch.device) -> float | None:
    """The datasheet's dense bf16 rate in FLOP/s; None for a CPU (see turbogr.hardware) and an unknown device."""
    if device.type == "cpu":
        return None
    name = device_name(device)
    return next((rate for key, rate in _DATASHEET.items() if re.search(rf"\b{key}\b", name)), None)


def capturing() -> bool:
    """Whether work goes into a graph of a device now, to be run later and more than once."""
    begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return begun and torch.cuda.is_current_stream_capturing()


def tune_allocator() -> str:
    """Let glibc keep what it was given: large blocks are neither mapped anew nor returned. Answers what was done.

    By default every large tensor is mapped, faulted in page by page and unmapped again, which can be half of an eager
    step's time. The price: memory that was once used stays with the process.
    """
    if platform.libc_ver()[0] != "glibc":
        return f"left alone: no glibc on this {platform.system()}"
    for variable in ("jemalloc", "tcmalloc", "mimalloc"):
        if variable in os.environ.get("LD_PRELOAD", ""):
            return f"left alone: {variable} is preloaded"
    mallopt = ctypes.CDLL(None).mallopt
    # malloc.h: M_TRIM_THRESHOLD -1, M_TOP_PAD -2, M_MMAP_MAX -4
    done = [mallopt(-4, 0), mallopt(-1, 2**31 - 1), mallopt(-2, 64 * 2**20)]
    return "tuned: glibc keeps freed blocks (no mmap, no trim)" if all(done) else "left alone: glibc refused"


def return_freed_memory() -> None:
    """What a tuned allocator keeps, back to the system: batches of ever new sizes leave holes that add up to gigabytes
    over a run, and an epoch's end can afford to have pages faulted in again."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
