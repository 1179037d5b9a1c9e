"""Compiles the C++ operators: every `src/*.cpp` into one shared library for each instruction set of this processor.

    lib/<source>-<instruction set>.so        plain C symbols, OpenMP, no torch or Python headers
    lib/built.json                           what was built by which compiler from which sources, or why nothing was

The build hook runs it at `pip install`; `turbogr doctor --build` runs it again. Standard library only: the hook imports
this file alone, before anything is installed.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
SOURCES, LIBRARIES = FOLDER / "src", FOLDER / "lib"
FACTS = LIBRARIES / "built.json"

INSTRUCTION_SETS: dict[str, dict[str, list[str]]] = {
    # plainest first; turbogr.ops.native takes the last one that the processor runs
    "x86_64": {
        "avx2": ["-march=x86-64-v3"],
        "avx512": ["-march=x86-64-v4", "-mprefer-vector-width=512"],
        "avx512bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"],
        "amx": ["-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mprefer-vector-width=512"],
    },
    "aarch64": {"neon": ["-march=armv8-a"]},
}
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden"]
# What of -ffast-math the kernels want; all of it would set flush-to-zero for the whole process.
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]


class CannotBuild(Exception):
    """Why there is no compiled part, in one sentence."""


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def digest(source: Path) -> str:
    """Of a source and the headers it takes in: a library built from others is not loaded."""
    read, waiting, seen = hashlib.sha256(), [source.name], set()
    while waiting:
        name = waiting.pop()
        path = SOURCES / name
        if name in seen or not path.exists():
            continue
        seen.add(name)
        text = path.read_text()
        read.update(f"{name}\0{text}".encode())
        waiting += re.findall(r'^#include "([^"]+)"', text, re.MULTILINE)
    return read.hexdigest()[:16]


def machine() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def find_compiler() -> str:
    """CXX, or the first of c++, g++ and clang++."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise CannotBuild(f"no C++ compiler was found ({', '.join(names)}): install g++ or clang++")
    return found


def compile_source(compiler: str, source: Path, name: str, flags: list[str]) -> None:
    target = LIBRARIES / f"{source.stem}-{name}.so"
    partial = target.with_suffix(f".partial-{os.getpid()}")
    command = [compiler, *FLAGS, *flags, str(source), "-o", str(partial)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        partial.unlink(missing_ok=True)
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise CannotBuild(f"{Path(compiler).name} could not compile {source.name} for {name}: {first}")
    os.replace(partial, target)


def build(only: list[str] | None = None) -> dict[str, Any]:
    """Compile every source (or those of `only`) and answer what built.json says, its `reason` where it cannot be."""
    LIBRARIES.mkdir(exist_ok=True)
    facts = read_facts() if only else {}
    facts = {"machine": machine(), "sources": facts.get("sources", {})}
    sets = INSTRUCTION_SETS.get(machine(), {})
    wanted = [path for path in sources() if not only or path.stem in only]
    try:
        if not sets or sys.platform != "linux":
            raise CannotBuild(f"they are written for Linux on x86_64 and aarch64, not {sys.platform} {machine()}")
        compiler = find_compiler()
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
        facts["compiler"] = said.splitlines()[0] if said else compiler
        digests = {path.stem: digest(path) for path in wanted}  # before compiling: a later edit must show
        jobs = [(path, name, flags) for path in wanted for name, flags in sets.items()]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda job: compile_source(compiler, *job), jobs))
        facts["sources"] |= digests
    except CannotBuild as reason:
        facts["reason"] = str(reason)
        if serves(read_facts()):
            return facts  # a wheel's libraries, or those of an earlier build, stay
    partial = FACTS.with_suffix(f".partial-{os.getpid()}")
    partial.write_text(json.dumps(facts, indent=1))
    os.replace(partial, FACTS)
    return facts


def serves(facts: dict[str, Any]) -> bool:
    """Whether the libraries that built.json speaks of are there, for this machine and from the sources here."""
    names = INSTRUCTION_SETS.get(machine(), {})
    files = [LIBRARIES / f"{path.stem}-{name}.so" for path in sources() for name in names]
    digests = {path.stem: digest(path) for path in sources()}
    same = facts.get("machine") == machine() and facts.get("sources") == digests and "reason" not in facts
    return bool(files) and same and all(file.exists() for file in files)


def read_facts() -> dict[str, Any]:
    """What built.json says; empty where there is none."""
    try:
        facts: dict[str, Any] = json.loads(FACTS.read_text())
    except (OSError, ValueError):
        return {}
    return facts


if __name__ == "__main__":
    outcome = build(sys.argv[1:])
    print(json.dumps(outcome, indent=1))
    sys.exit("reason" in outcome)
