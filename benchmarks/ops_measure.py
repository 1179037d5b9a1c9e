"""What the parts of `benchmarks.ops` share: answers, errors against float64, ceilings, variants in other processes."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import ROOT, interleaved, summary, timed

GEMM_SIZE = 2048
COPY_BYTES = 64 << 20
ONLY_FULL = "only the full run measures memory, each variant in a process of its own"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Settings:
    quick: bool
    data: Path | None = None


@dataclass
class Part:
    """Figures of one part; a figure that is None has its reason."""

    figures: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def missing(self, names: str | list[str], reason: str) -> None:
        for name in [names] if isinstance(names, str) else names:
            self.figures[name], self.reasons[name] = None, reason

    def add(self, other: "Part") -> None:
        self.figures |= other.figures
        self.reasons |= other.reasons
        self.details |= other.details


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted| over a whole tensor; inf where got is not finite, |got - wanted| where wanted is 0."""
    if not torch.isfinite(got).all():
        return float("inf")
    wanted = wanted.detach().double()
    error, size = (got.detach().double() - wanted).norm(), wanted.norm()
    return float(error / size) if size > 0 else float(error)


def worst(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    return max((relative_error(one, other) for one, other in zip(got, wanted, strict=True)), default=0.0)


def seconds_of(variants: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Every variant once to warm up, then all of them in turn, `rounds` times."""
    timers = {name: call if isinstance(call, Worker) else _timer(call) for name, call in variants.items()}
    for timer in timers.values():
        timer()
    return interleaved(timers, rounds)


def _timer(call: Callable[[], Any]) -> Callable[[], float]:
    return lambda: timed(call)


def milliseconds(seconds: Mapping[str, list[float]]) -> dict[str, Any]:
    """For the stored result."""
    return {name: summary([1e3 * value for value in values]) for name, values in seconds.items()}


def median(seconds: Mapping[str, list[float]], *names: str) -> float:
    """The lowest of the variants' medians."""
    return min(statistics.median(seconds[name]) for name in names)


def gemm_variants(dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], Any]]:
    """A square GEMM by each of torch's libraries: `gemm_mkl`, `gemm_onednn`. Ceilings belong into the same rounds."""
    a = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
    b = torch.randn(GEMM_SIZE, GEMM_SIZE).to(dtype)
    variants: dict[str, Callable[[], Any]] = {"gemm_mkl": lambda: torch.mm(a, b)}
    if dtype == torch.bfloat16:
        return {"gemm_onednn": lambda: torch.mm(a, b)}  # torch.mm takes oneDNN for bf16
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        variants["gemm_onednn"] = lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return variants


def gemm_rate(seconds: Mapping[str, list[float]], prefix: str = "gemm_") -> float:
    """FLOP/s of the faster library in its best round: a ceiling is what the machine can do, and what runs before it in
    a round (gigabytes of an eager variant) must not lower it."""
    return 2 * GEMM_SIZE**3 / min(min(values) for name, values in seconds.items() if name.startswith(prefix))


def copy_variant() -> Callable[[], Any]:
    """Moves 2 * COPY_BYTES bytes."""
    source = torch.ones(COPY_BYTES // 4)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


class Process:
    """A program that answers each line on its stdin by one line of JSON on its stdout."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of a variant ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


class Worker(Process):
    """A variant in a process of its own (benchmarks.ops_worker): other environment variables, or a memory of its own.

    Calling it runs the variant once there and answers the seconds.
    """

    def __init__(
        self, factory: str, arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__([sys.executable, "-m", "benchmarks.ops_worker", factory, json.dumps(arguments)], environment)

    def __call__(self) -> float:
        return float(self.ask("time"))


def peak_bytes(factory: str, **arguments: Any) -> int:
    """Most memory above its inputs that a variant holds at once, in a fresh process."""
    worker = Worker(factory, arguments)
    try:
        return int(worker.ask("memory"))
    finally:
        worker.close()
