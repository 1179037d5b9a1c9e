"""Compiles every shipped Triton kernel for GPUs that need not be there, and reads what the compiler made of it.

    python tools/kernel_report.py [--check] [--only OPERATOR]    (in .venv-triton: make kernel-report)

Writes docs/kernels.md; with --check it writes nothing and also fails when that page is not what it would write. Ends
with 1 where a kernel spills registers, needs more shared memory than a program may have, or lacks a tensor instruction
it must have. The configurations are those that every operator's triton.py lists in `configurations()`.
"""

import argparse
import collections
import importlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import turbogr.ops
from turbogr.ops.triton_support import TARGETS, Configuration

PAGE = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
SHARED_LIMITS = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
"""Bytes of shared memory that one program may have."""
NVIDIA_TENSOR = re.compile(r"HMMA|HGMMA|UTC\w*MMA")
AMD_TENSOR = re.compile(r"\bv_mfma_\w+")


@dataclass(frozen=True)
class Measured:
    """What one configuration became on one target."""

    operator: str
    name: str
    target: str
    registers: int
    spilled: int  # bytes of stack, or instructions that move registers to memory and back
    shared: int
    tensor: str  # the tensor instruction and how many of it, "" for none
    fault: str  # "" where all is well

    @property
    def cell(self) -> str:
        memory = f", {self.shared / 1024:.0f} KiB" if self.shared else ""
        return f"{self.registers} r{memory}{', ' + self.tensor if self.tensor else ''}{' **!**' if self.fault else ''}"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--check", action="store_true", help="write nothing; fail where docs/kernels.md is stale")
    arguments.add_argument("--only", help="one operator, printed instead of written")
    chosen = arguments.parse_args()
    names = [chosen.only] if chosen.only else operators()
    jobs = [
        (name, number, target)
        for name in names
        for number, one in enumerate(configurations(name))
        for target in one.targets
    ]
    # longest first would be best; tensor kernels of the newest targets take longest
    jobs.sort(key=lambda job: (not configurations(job[0])[job[1]].tensor, job[2] != "sm_100"))
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = {(one.operator, one.name, one.target): one for one in pool.map(measure, jobs)}
    page = make_page(names, found)
    if chosen.only:
        print(page[page.index("## ") :])
    elif chosen.check and PAGE.read_text() != page:
        print(f"{PAGE.name} is not what the kernels compile to: run `make kernel-report`.", file=sys.stderr)
        return 1
    elif not chosen.check:
        PAGE.write_text(page)
    faults = [one for one in found.values() if one.fault]
    for one in faults:
        print(f"{one.operator}, {one.name}, {one.target}: {one.fault}", file=sys.stderr)
    print(f"{len(found)} compiled, {len(faults)} with faults")
    return 1 if faults else 0


def operators() -> list[str]:
    """Every operator that has Triton kernels."""
    return sorted(found.parent.name for found in Path(turbogr.ops.__path__[0]).glob("*/triton.py"))


@cache
def configurations(operator: str) -> list[Configuration]:
    listed = importlib.import_module(f"turbogr.ops.{operator}.triton").configurations()
    named = [(one.name, target) for one in listed for target in one.targets]
    assert len(set(named)) == len(named), f"two configurations of {operator} for one target have one name"
    return list(listed)


def measure(job: tuple[str, int, str]) -> Measured:
    operator, number, target = job
    one = configurations(operator)[number]
    try:
        compiled = compile_for(one, target)
    except Exception as error:
        # Triton's message shows the kernel first, the reason last
        reason = (str(error).strip().splitlines() or [""])[-1]
        fault = f"does not compile: {type(error).__name__}: {reason}"
        return Measured(operator, one.name, target, 0, 0, 0, "", fault)
    read = read_amd if target.startswith("gfx") else read_nvidia
    registers, spilled, tensor = read(compiled)
    shared = compiled.metadata.shared
    faults = []
    if spilled:
        faults.append(f"spills ({spilled})")
    if shared > SHARED_LIMITS[target]:
        faults.append(f"needs {shared} bytes of shared memory, {SHARED_LIMITS[target]} are there")
    if one.tensor and not tensor:
        faults.append("has no tensor instruction")
    return Measured(operator, one.name, target, registers, spilled, shared, tensor, "; ".join(faults))


def compile_for(one: Configuration, target: str):  # type: ignore[no-untyped-def]
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = one.kernel.arg_names
    unknown = set(names) ^ (set(one.signature) | set(one.constants))
    assert not unknown, f"{one.name}: arguments {sorted(unknown)} are not in both the kernel and its configuration"
    signature = {name: one.signature.get(name, "constexpr") for name in names}
    aligned = [index for index, name in enumerate(names) if signature[name].startswith("*") or name in one.aligned]
    source = ASTSource(
        one.kernel,
        signature,
        {(names.index(name),): value for name, value in one.constants.items()},
        {(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    amd = target.startswith("gfx")
    gpu = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    return triton.compile(source, target=gpu, options={"num_warps": one.num_warps, "num_stages": one.num_stages})


def read_nvidia(compiled) -> tuple[int, int, str]:  # type: ignore[no-untyped-def]
    """(registers, bytes of stack and moves to and from it, tensor instructions) of a cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        read = [tool, "-res-usage", "-sass", file.name]
        text = subprocess.run(read, capture_output=True, text=True, check=True).stdout
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)", text)
    assert opcodes, "no machine code was read"
    moves = sum(code in ("LDL", "STL") for code in opcodes)
    return usage["REG"], usage["STACK"] + moves, most_frequent(code for code in opcodes if NVIDIA_TENSOR.match(code))


def read_amd(compiled) -> tuple[int, int, str]:  # type: ignore[no-untyped-def]
    """(vector registers, spilled registers and bytes of scratch, tensor instructions) of AMD's assembly."""
    text = compiled.asm["amdgcn"]
    facts = {name: int(value) for name, value in re.findall(r"^\s*\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
    spilled = facts["vgpr_spill_count"] + facts["private_segment_fixed_size"]
    return facts["vgpr_count"], spilled, most_frequent(AMD_TENSOR.findall(text))


def most_frequent(opcodes) -> str:  # type: ignore[no-untyped-def]
    counted = collections.Counter(opcodes)
    if not counted:
        return ""
    name, _ = counted.most_common(1)[0]
    return f"{counted.total()} {name.removeprefix('v_mfma_f32_') if name.startswith('v_') else name}"


def make_page(names: list[str], found: dict[tuple[str, str, str], Measured]) -> str:
    parts = [TEXT]
    for name in names:
        rows = [f"| configuration | {' | '.join(TARGETS)} |", "|---" * (1 + len(TARGETS)) + "|"]
        for one in configurations(name):
            cells = [found[name, one.name, target].cell if target in one.targets else "" for target in TARGETS]
            rows.append(f"| {one.name}, {one.num_warps} warps | {' | '.join(cells)} |")
        parts.append(f"## {name}\n\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


TEXT = """# GPU kernels, as compiled

Made by `make kernel-report`: every configuration of the Triton kernels that the operators ship, compiled ahead of time
by triton 3.6.0 for sm_80 (A100), sm_90 (H100, H200), sm_100 (B200) and gfx942 (MI300), on a machine without any of
them. A cell reads: registers of a thread, shared memory of a program, how many tensor instructions its code holds and
the most frequent of them.

`make test` compiles them again and fails where a kernel spills a register, needs more shared memory than there is
(166,912 bytes on sm_80, 232,448 on sm_90 and sm_100, 65,536 on gfx942), lacks the tensor instruction that it must have,
or where this page is not what the compiler says.

It proves that the kernels compile, fit, keep to their registers and reach the tensor cores. It does not prove that they
are right (the tests run them in Triton's interpreter, which sees neither races nor reads out of bounds), nor how fast
they are: waiting for memory, conflicts and atomics do not show in machine code. Kernels that multiply in single
precision use no tensor core on purpose. sm_80 has HMMA, sm_90 HGMMA for large tiles, sm_100 UTCHMMA, gfx942 MFMA, named
by its shape."""


if __name__ == "__main__":
    sys.exit(main())
