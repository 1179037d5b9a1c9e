"""What this machine has, which backend each operator takes and why, and what it can do at best: gathered, printed."""

import importlib.metadata
import platform
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from turbogr import hardware
from turbogr.device import device_name, peak_flops, pick_device, supports_bf16, tune_allocator
from turbogr.ops import gemm
from turbogr.ops.registry import table
from turbogr.progress import bar

CPU = torch.device("cpu")
_OPTIONAL = {
    "triton": "GPU operators",
    "faiss-cpu": "nearest-neighbour index of exported models",
    "tensorboard": "curves of a run",
    "wandb": "Weights & Biases, log.wandb",
    "pandas": "frames for turbogr.fit",
    "polars": "frames for turbogr.fit",
}


def machine(measure: bool) -> dict[str, Any]:
    """Everything that `turbogr doctor` knows, as JSON holds it."""
    allocator = tune_allocator()
    device = pick_device()
    figures = measured(device) if measure else None
    return {
        "software": _software(),
        "cpu": {**hardware.cpu_facts(), "allocator": allocator, "compiler": hardware.compiler()},
        "accelerators": _accelerators(device),
        "libraries": _libraries(),
        "operators": [
            {"operator": operator, "device": where.type, "backend": backend, "reason": reason}
            for where in dict.fromkeys([CPU, device])
            for operator, backend, reason in table(where)
        ],
        "gemm": gemm_facts(figures),
        "measured": figures,
    }


def measured(device: torch.device) -> dict[str, dict[str, float]]:
    """Device type -> figure -> value: every library's square GEMM in GFLOP/s, and the copy's GB/s."""
    places = list(dict.fromkeys([CPU, device]))
    figures: dict[str, dict[str, float]] = {}
    with bar("measure", total=3 * len(places)) as progress:
        for done, place in enumerate(places):
            found = figures[place.type] = {}
            for step, dtype in enumerate((torch.float32, torch.bfloat16)):
                ways = hardware.gemm_ways(dtype, place, torch.get_num_threads())
                kind = str(dtype).removeprefix("torch.")
                found |= {f"gemm_{kind}_{way}_gflops": round(rate, 1) for way, rate in ways.items()}
                progress.update(3 * done + step + 1)
            found["copy_gb_per_s"] = round(hardware.copy_gb_per_s(place), 1)
            progress.update(3 * done + 3)
    return figures


def gemm_facts(figures: dict[str, dict[str, float]] | None) -> dict[str, str]:
    """The library of fp32 matrix products that the rule takes, and whether it measured faster here."""
    library, reason = gemm.rule()
    said = {"library": library, "reason": reason, "last_bits_depend_on_threads": gemm.bits_by_threads()}
    ways = {"mkl": "torch.mm", "onednn": "oneDNN"}
    rates = {name: (figures or {}).get("cpu", {}).get(f"gemm_float32_{way}_gflops") for name, way in ways.items()}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    if known:
        fastest = max(known, key=lambda name: known[name])
        # within a tenth neither is the wrong one
        agrees = known[library] > 0.9 * known[fastest]
        said["measured"] = "agrees" if agrees else f"{fastest} is faster here: set --device.gemm {fastest}"
    return said


def _software() -> dict[str, str]:
    build = torch.__config__.show()
    libraries = {"MKL": "Math Kernel Library Version ", "oneDNN": "MKL-DNN v"}
    versions = [f"{name} {build.split(mark)[1].split()[0]}" for name, mark in libraries.items() if mark in build]
    blas = build.split("BLAS_INFO=")[1].split(",")[0] if "BLAS_INFO=" in build else "unknown"
    return {
        "turbogr": importlib.metadata.version("turbogr"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": torch.__version__,
        "blas": f"{blas} ({', '.join(versions)})" if versions else blas,
    }


def _accelerators(device: torch.device) -> list[dict[str, Any]]:
    if device.type == "cpu":
        return []
    facts = []
    for index in range(torch.accelerator.device_count()):
        one = torch.device(device.type, index)
        peak = peak_flops(one)
        facts.append(
            {
                "name": device_name(one),
                "memory_gib": round(torch.accelerator.get_memory_info(one)[1] / 2**30, 1),
                "bf16": supports_bf16(one),
                "datasheet_bf16_tflops": None if peak is None else peak / 1e12,
            }
        )
    return facts


def _libraries() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _OPTIONAL:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def show(facts: dict[str, Any]) -> None:
    out = Console(file=sys.stdout, highlight=False)
    _pairs(out, "software", facts["software"])
    _pairs(out, "CPU", facts["cpu"])
    if not facts["accelerators"]:
        _pairs(out, "accelerators", {"none": "torch sees no accelerator; everything runs on the CPU"})
    for number, one in enumerate(facts["accelerators"]):
        _pairs(out, f"accelerator {number}", one)
    _pairs(out, "libraries", {name: f"{v or 'absent'}  ({_OPTIONAL[name]})" for name, v in facts["libraries"].items()})
    _pairs(out, "matrix products", facts["gemm"])
    operators = _titled(out, "operators")
    for row in facts["operators"]:
        operators.add_row(row["operator"], f"{row['backend']} on {row['device']}", row["reason"])
    out.print(operators)
    for place, figures in (facts["measured"] or {}).items():
        _pairs(out, f"measured on {place} (medians)", dict(_with_unit(*one) for one in figures.items()))


def _with_unit(name: str, value: float) -> tuple[str, str]:
    for ending, unit in (("_gflops", "GFLOP/s"), ("_gb_per_s", "GB/s")):
        if name.endswith(ending):
            return name.removesuffix(ending), f"{value:,.1f} {unit}"
    raise AssertionError(f"{name} has no unit")


def _pairs(out: Console, title: str, pairs: dict[str, Any]) -> None:
    shown = _titled(out, title)
    for name, value in pairs.items():
        shown.add_row(name.replace("_", " "), "-" if value is None else str(value))
    out.print(shown)


def _titled(out: Console, title: str) -> Table:
    out.print(f"\n[bold]{title}[/bold]")
    return Table.grid("", "", "", padding=(0, 2), pad_edge=True)
