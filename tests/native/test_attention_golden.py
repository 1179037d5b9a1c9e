"""HSTU attention for processors that are not this one, emulated, against files that the float64 reference writes here.

neon  compiled for aarch64, under qemu; needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian and Ubuntu:
      g++-aarch64-linux-gnu, qemu-user)
amx   the code for AMX (bf16 only), its tile instructions in plain C++ (amx_emulation.h); needs AVX512-BF16
"""

import functools
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.test_hstu_attention_cpu import CASES as CPU_CASES
from tests.support.jagged_cases import Case, make_case, values_and_gradients
from turbogr.ops import native
from turbogr.ops.hstu_attention import hstu_attention
from turbogr.ops.hstu_attention.cpu import NO_WINDOW
from turbogr.ops.hstu_attention.reference import bucket_edges
from turbogr.ops.native import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
WIDTH, BUCKETS = 0.301, 128
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
UNEVEN = [17, 0, 1, 64, 131, 33]

CASES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    "uneven rows": (UNEVEN, {"dims": (25, 25)}, {}),
    "wider keys, unsorted times": (UNEVEN, {"dims": (33, 7), "in_order": False}, {}),
    "spans beyond 2^31": (UNEVEN, {"heads": 1, "dims": (5, 16), "span": 2**45, "in_order": False}, {}),
    "a row cut into key blocks": ([3, 650], {"heads": 1, "dims": (16, 16)}, {}),
    "no bias": (UNEVEN, {"biases": (False, False)}, {}),
    "one token": ([1], {}, {}),
    "everything": (
        [90, 0, 200],
        {"in_order": False},
        {"num_targets": torch.tensor([9, 0, 70]), "num_context": 5, "window": 70, "context_sees_history": True},
    ),
}

# tiles are worked on in strips of 16 rows, widths of 32 lanes, depths of 32 columns
WIDTHS = [(15, 17), (31, 33), (65, 63), (32, 96), (130, 1), (16, 80)]
EDGES = [15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 79, 80, 81, 95, 96, 97, 111, 112, 113, 127, 128, 129]
AMX_CASES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = CASES | CPU_CASES
AMX_CASES |= {
    "rows around strips and widths": (EDGES, {"dims": (25, 25)}, {}),
    "targets around strips and widths": (EDGES, {}, {"num_targets": torch.tensor([1, 9, 17, 2] * 6)}),
    "a window around strips and widths": (EDGES, {}, {"num_context": 2, "window": 31}),
    **{f"heads of {dims}": (UNEVEN, {"dims": dims}, {}) for dims in WIDTHS},
    "long rows of wide heads": ([3, 700, 650], {"dims": (50, 64)}, {}),
    "everything in long rows": (
        [8, 700, 650],
        {"heads": 3, "dims": (33, 7), "in_order": False},
        {"num_targets": torch.tensor([1, 70, 3]), "num_context": 5, "window": 130, "context_sees_history": True},
    ),
}
RUNS = {f"neon, {name}, {dtype}": ("neon", case, dtype) for name, case in CASES.items() for dtype in TOLERANCE}
RUNS |= {f"amx, {name}": ("amx", case, torch.bfloat16) for name, case in AMX_CASES.items()}


@pytest.fixture(scope="module")
def command_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """attention_golden.cpp compiled for a processor: the command that runs it, but for the golden file."""

    @functools.cache
    def command(processor: str) -> list[str]:
        compiler, emulator, flags = neon() if processor == "neon" else amx()
        flags += [flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC")]
        source = Path(__file__).with_name("attention_golden.cpp")
        target = tmp_path_factory.mktemp(processor) / source.stem
        subprocess.run([compiler, *flags, f"-I{build.SOURCES}", str(source), "-o", str(target)], check=True)
        return [*emulator, str(target)]

    return command


def neon() -> tuple[str, list[str], list[str]]:
    """(compiler, emulator, flags); skips the test where one is missing."""
    if not (shutil.which(COMPILER) and shutil.which(EMULATOR)):
        pytest.skip(f"needs {COMPILER} and {EMULATOR}")
    return COMPILER, [EMULATOR], [*build.INSTRUCTION_SETS["aarch64"]["neon"], "-static"]


def amx() -> tuple[str, list[str], list[str]]:
    if "avx512bf16" not in native.runnable():
        pytest.skip("needs a processor with AVX512-BF16")
    try:
        compiler = build.find_compiler()
    except build.CannotBuild as reason:
        pytest.skip(str(reason))
    emulation = ["-include", str(Path(__file__).with_name("amx_emulation.h"))]
    return compiler, [], [*build.INSTRUCTION_SETS["x86_64"]["avx512bf16"], *emulation]


def rounded(case: Case, dtype: torch.dtype) -> Case:
    """A float64 case whose q, k, v and gradient of the output are numbers of `dtype`, its tables of fp32."""
    single = case.to(torch.float32).to(torch.float64)
    fused = single.fused.detach().to(dtype).double().requires_grad_()
    return replace(single, fused=fused, weights=single.weights.to(dtype).double())


def write_golden(path: Path, case: Case, dtype: torch.dtype, max_len: int, mask: dict[str, Any]) -> None:
    """Inputs and the reference's answers, in the order in which attention_golden.cpp reads them."""
    y, *gradients = values_and_gradients(
        lambda c: hstu_attention(
            *c.parts,
            c.offsets,
            max_len=max_len,
            position_bias=c.position,
            time_bias=c.time,
            times=c.times,
            next_times=c.next_times,
            backend="reference",
            **mask,
        ),
        case,
    )
    dqk, dv = case.dims
    tables = iter(gradients[1:])
    dposition, dtime = (None if table is None else next(tables) for table in (case.position, case.time))
    window = mask.get("window") or NO_WINDOW
    flags = (mask.get("num_context", 0), window, mask.get("context_sees_history", False))
    sizes = [dtype == torch.bfloat16, case.fused.shape[1], dqk, dv, max_len, *flags]
    edges = bucket_edges(WIDTH, BUCKETS) if case.time is not None else []
    with path.open("wb") as file:
        for values, kind in (
            (sizes, np.int64),
            ([WIDTH], np.float64),
            *((x, np.int64) for x in (case.offsets, mask.get("num_targets"), case.times, case.next_times, edges)),
            *((x, np.float32) for x in (case.position, case.time, *case.parts, case.weights)),
            *((x, np.float64) for x in (y, *gradients[0].split([dqk, dqk, dv], dim=2), dposition, dtime)),
        ):
            array = _array(values, kind)
            file.write(np.int64(array.size).tobytes() + array.tobytes())


def _array(values: Any, kind: type) -> np.ndarray:
    if isinstance(values, Tensor):
        values = values.detach().contiguous().numpy()
    return np.ascontiguousarray([] if values is None else values, dtype=kind)


@pytest.mark.parametrize("run", RUNS)
def test_emulated_code_agrees_with_the_reference(
    run: str, command_of: Callable[[str], list[str]], tmp_path: Path
) -> None:
    """Catches: a vector of four floats that a kernel takes for eight, a tile of AMX that is read before it is written
    or beyond what is seen, and sums that depend on the number of threads."""
    processor, (lengths, shape, mask), dtype = RUNS[run]
    command = command_of(processor)
    max_len = max([1, *lengths])
    case = rounded(make_case(lengths, **({"max_len": max_len} | shape)), dtype)
    write_golden(tmp_path / "golden", case, dtype, max_len, mask)
    done = subprocess.run([*command, str(tmp_path / "golden")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    errors = {key: float(error) for key, error in (line.split() for line in done.stdout.splitlines())}
    print(errors)
    assert set(errors) == {"y", "dq", "dk", "dv", "dposition", "dtime", "threads"}
    assert errors.pop("threads") == 0
    assert max(errors.values()) <= TOLERANCE[dtype], errors
