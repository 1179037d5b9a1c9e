"""Compiles the C++ operators: every `src/*.cpp` into one shared library for each instruction set it has code for.

    lib/<source>-<instruction set>.so        plain C symbols, OpenMP, no torch or Python headers
    lib/built.json                           what was built by which compiler from which sources, or why nothing was

The build hook compiles everything at `pip install`, and `turbogr doctor --build` does so again. As a script:

    python src/turbogr/ops/native/build.py                     those sources whose libraries are missing or out of date
    python src/turbogr/ops/native/build.py hstu_attention      these sources

Standard library only: the hook imports this file alone, before anything is installed.
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
# Only these sources have code of their own for these sets; for the others the next plainer one is the same code.
ONLY_FOR = {"amx": ("hstu_attention",)}
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden"]
# What of -ffast-math the kernels want; all of it would set flush-to-zero for the whole process.
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wall", "-Wextra", "-Wno-psabi"]


class CannotBuild(Exception):
    """Why there is no compiled part, in one sentence."""


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cpp"))


def sets_of(source: str) -> dict[str, list[str]]:
    """The instruction sets of this machine that src/SOURCE.cpp is compiled for, plainest first, and their flags."""
    sets = INSTRUCTION_SETS.get(machine(), {})
    return {name: flags for name, flags in sets.items() if source in ONLY_FOR.get(name, (source,))}


def library_path(source: str, name: str) -> Path:
    return LIBRARIES / f"{source}-{name}.so"


def libraries(source: str | None = None) -> list[Path]:
    """What belongs to this machine, of one source or of all of them."""
    names = [path.stem for path in sources()] if source is None else [source]
    return [library_path(one, name) for one in names for name in sets_of(one)]


def digest(source: Path) -> str:
    """Of a source, the headers it takes in and the compiler's flags: a library built from others is not loaded."""
    read, waiting, seen = hashlib.sha256(), [source.name], set()
    read.update(json.dumps([FLAGS, sets_of(source.stem)]).encode())
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
    """CXX, or the first of c++, g++ and clang++; CannotBuild where there is none, or nothing that it could compile."""
    if machine() not in INSTRUCTION_SETS or sys.platform != "linux":
        raise CannotBuild(f"they are written for Linux on x86_64 and aarch64, not {sys.platform} {machine()}")
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise CannotBuild(f"no C++ compiler was found ({', '.join(names)}): install g++ or clang++")
    return found


def compile_source(compiler: str, source: Path, name: str, flags: list[str]) -> None:
    target = library_path(source.stem, name)
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
    wanted = [path for path in sources() if not only or path.stem in only]
    try:
        compiler = find_compiler()
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
        facts["compiler"] = said.splitlines()[0] if said else compiler
        digests = {path.stem: digest(path) for path in wanted}  # before compiling: a later edit must show
        jobs = [(path, name, flags) for path in wanted for name, flags in sets_of(path.stem).items()]
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
    return bool(libraries()) and "reason" not in facts and not outdated(facts)


def outdated(facts: dict[str, Any]) -> list[str]:
    """The sources that built.json does not speak of as they are here, or of whose libraries one is missing."""
    built = facts.get("sources", {}) if facts.get("machine") == machine() else {}
    return [
        path.stem
        for path in sources()
        if built.get(path.stem) != digest(path) or not all(file.exists() for file in libraries(path.stem))
    ]


def read_facts() -> dict[str, Any]:
    """What built.json says; empty where there is none."""
    try:
        facts: dict[str, Any] = json.loads(FACTS.read_text())
    except (OSError, ValueError):
        return {}
    return facts


def refresh() -> dict[str, Any]:
    """Compile what is out of date and say which; answers as `build` does."""
    facts, known = read_facts(), [path.stem for path in sources()]
    if serves(facts):
        print(f"compiled operators: all {len(known)} sources are up to date")
        return facts
    wanted = outdated(facts) or known
    print(f"compiled operators: {', '.join(wanted)} ({len(wanted)} of {len(known)} sources)", flush=True)
    return build(wanted)


def main(only: list[str]) -> int:
    """Compile the sources of `only`, or else what is out of date; no failure where nothing here could compile."""
    reason = (build(only) if only else refresh()).get("reason")
    if reason is None:
        return 0
    print(f"without compiled operators: {reason}")
    try:
        find_compiler()
    except CannotBuild:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
