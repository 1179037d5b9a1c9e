"""What every benchmark shares: arguments, the machine's description, interleaved rounds, memory of a process, storing.

Its last line on stdout is one JSON object of named figures; the full result is stored as `OUT/NAME-MACHINE-DATE.json`.
A figure that cannot be measured is None, with its reason under the same key in `reasons`.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("turbogr", "torch", "numpy", "duckdb", "pyarrow", "triton")
GIB = 1 << 30


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small sizes, under a minute on two cores")
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    data = os.environ.get("TURBOGR_DATA")
    made.add_argument(
        "--data", type=Path, default=Path(data) if data else None, help="folder of real data (TURBOGR_DATA)"
    )
    made.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where the full result goes")
    return made


def interleaved(variants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each round runs every variant once, beginning with another one each time; what the variants answer, per round."""
    answers: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            answers[name].append(variants[name]())
    return answers


def summary(values: Sequence[float]) -> dict[str, Any]:
    """Every value, the best and the percentiles 20, 50 and 80."""
    ordered = sorted(values)
    cuts = statistics.quantiles(ordered, n=10, method="inclusive") if len(ordered) > 1 else ordered * 9
    return {"all": list(values), "best": ordered[0], "p20": cuts[1], "p50": statistics.median(ordered), "p80": cuts[7]}


class PeakMemory:
    """Largest anonymous memory of this process while the block runs, in bytes (Linux)."""

    def __init__(self, every_s: float = 0.02) -> None:
        self.peak = 0
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._every_s):
            self.peak = max(self.peak, anonymous_memory())


def anonymous_memory() -> int:
    found = re.search(r"^RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def machine(device: str = "cpu") -> dict[str, Any]:
    """Everything about the machine and the code that a figure depends on."""
    described: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "commit": commit(),
        "device": device,
    }
    if device == "cuda":
        import torch  # only where a GPU is asked for: benchmarks of the data part need no torch

        described["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return described


def cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def commit() -> str:
    """The commit that is measured, with `-dirty` where files differ from it."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=10"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() or "unknown"


def finish(name: str, arguments: argparse.Namespace, figures: Mapping[str, Any], details: Mapping[str, Any]) -> None:
    """Store the full result and print the figures as the last line."""
    described = machine(arguments.device)
    where = re.sub(r"[^a-z0-9]+", "-", str(described.get("gpu", described["cpu"])).lower()).strip("-")
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    quick = "-quick" if arguments.quick else ""
    target = arguments.out / f"{name}{quick}-{where}-{described['cores']}c-{today}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    result = {"benchmark": name, "date": today, "machine": described, "figures": dict(figures), **details}
    target.write_text(json.dumps(result, indent=2) + "\n")
    print(f"stored {target}")
    print(json.dumps(dict(figures)))


def timed(call: Callable[[], Any]) -> float:
    """Seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
