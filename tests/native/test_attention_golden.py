"""HSTU attention compiled for aarch64 (NEON), under an emulator, against files that the float64 reference writes here.

Needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian and Ubuntu: g++-aarch64-linux-gnu, qemu-user).
"""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.jagged_cases import Case, make_case, values_and_gradients
from turbogr.ops.hstu_attention import hstu_attention
from turbogr.ops.hstu_attention.cpu import NO_WINDOW
from turbogr.ops.hstu_attention.reference import bucket_edges
from turbogr.ops.native import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
WIDTH, BUCKETS = 0.301, 128
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
UNEVEN = [17, 0, 1, 64, 131, 33]

pytestmark = pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)), reason=f"needs {COMPILER} and {EMULATOR}"
)

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


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("aarch64") / "attention_golden"
    source = Path(__file__).with_name("attention_golden.cpp")
    flags = [flag for flag in build.FLAGS if flag not in ("-shared", "-fPIC")]
    flags += [*build.INSTRUCTION_SETS["aarch64"]["neon"], "-static", f"-I{build.SOURCES}"]
    subprocess.run([COMPILER, *flags, str(source), "-o", str(target)], check=True)
    return target


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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_neon_code_agrees_with_the_reference(name: str, dtype: torch.dtype, program: Path, tmp_path: Path) -> None:
    """Catches: a vector of four floats that a kernel takes for eight, and sums that depend on the number of threads."""
    lengths, facts, mask = CASES[name]
    case = rounded(make_case(lengths, **({"max_len": max(lengths)} | facts)), dtype)
    write_golden(tmp_path / "golden", case, dtype, max(lengths), mask)
    said = subprocess.run(
        [EMULATOR, str(program), str(tmp_path / "golden")], capture_output=True, text=True, check=True
    ).stdout
    errors = {key: float(error) for key, error in (line.split() for line in said.splitlines())}
    print(name, dtype, errors)
    assert set(errors) == {"y", "dq", "dk", "dv", "dposition", "dtime", "threads"}
    assert errors.pop("threads") == 0
    assert max(errors.values()) <= TOLERANCE[dtype], errors
