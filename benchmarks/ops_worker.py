"""One variant in a process of its own: python -m benchmarks.ops_worker MODULE:FACTORY '{"argument": value, ...}'

FACTORY(**arguments) answers a call without arguments. Each line on stdin is a command, each line on stdout its answer:
    time      seconds of one call, under the tuned allocator (the first time after one call to warm up)
    memory    bytes: the peak of the resident set during the first call, less what was resident before it. Every large
              block is mapped on its own, so freed ones count no longer; the kernel keeps the peak itself (VmHWM), so
              nothing is sampled and native code counts like torch's. FACTORY(tiny=True, ...) runs first, to load code.
"""

import ctypes
import gc
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import timed

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAPPED_ALONE = 1 << 16


def main() -> None:
    module, name = sys.argv[1].split(":")
    arguments = json.loads(sys.argv[2])
    factory = getattr(importlib.import_module(module), name)
    call: Callable[[], Any] | None = None
    for line in sys.stdin:
        if line.strip() == "memory":
            print(json.dumps(_memory(factory, arguments)), flush=True)
            continue
        if call is None:
            from turbogr.device import tune_allocator

            tune_allocator()
            call = factory(**arguments)
            call()
        print(json.dumps(timed(call)), flush=True)


def _memory(factory: Callable[..., Callable[[], Any]], arguments: dict[str, Any]) -> int:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, MAPPED_ALONE)
    libc.mallopt(M_TRIM_THRESHOLD, MAPPED_ALONE)
    factory(**arguments, tiny=True)()
    call = factory(**arguments)
    gc.collect()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    answer = call()
    peak = _resident("VmHWM") - before
    del answer
    return peak


def _resident(what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
