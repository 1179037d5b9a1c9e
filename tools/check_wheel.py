"""Proves what `make wheel` made: it installs and works where no compiler is.

    python tools/check_wheel.py dist

In a fresh environment, with nothing on the PATH but that environment:

1. the wheel installs, every compiled operator is taken, and torch's OpenMP runtime is the only one in the process
2. the operator tests pass against the installed package
3. `turbogr doctor --build` says that there is no compiler and leaves the wheel's libraries in place
4. the source distribution installs there too: operators run in torch, `turbogr doctor` says why, a model trains
5. `turbogr doctor --build` compiles them after all once it has a compiler (where this machine has one)

The last line says what was seen.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
TEST_NEEDS = ("pytest", "pytest-timeout", "hypothesis")
NO_COMPILER = "no C++ compiler was found"
LOAD_EVERYTHING = """
import json, re, torch
from pathlib import Path
from turbogr.ops import native
for name in native.read_facts()["sources"]:
    native.library(name)
maps = Path("/proc/self/maps").read_text()
print(json.dumps([native.__file__, sorted(set(re.findall(r"/\\S*libgomp\\S*", maps)))]))
"""
TRAIN_AND_ASK = """
import pyarrow, turbogr
users = [number // 20 for number in range(800)]
items = [number * 7 % 31 for number in range(800)]
log = pyarrow.table({"user": users, "item": items, "time": list(range(800))})
model = turbogr.fit(log, user="user", item="item", time="time", config={"train.epochs": 1, "model.dim": 16})
print(len(model.recommend([3], k=5)))
"""


class Environment:
    """A fresh virtual environment whose programs find nothing but each other."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.work = folder
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        hidden = ("CXX", "CC", "PYTHONPATH", "TURBOGR_BACKEND", "TURBOGR_INSTRUCTION_SET")
        self.variables = {name: value for name, value in os.environ.items() if name not in hidden}
        self.variables |= {"PATH": str(self.bin), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_QUIET": "1"}

    def run(self, *command: str | Path, status: int = 0, **variables: str) -> str:
        """What a program of the environment says; any other status ends the check."""
        program, *arguments = map(str, command)
        done = subprocess.run(
            [self.bin / program, *arguments],
            cwd=self.work,
            env=self.variables | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != status:
            sys.exit(f"{program} {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout + (done.stderr if status else "")

    def install(self, *what: str | Path) -> None:
        self.run("pip", "install", "-c", CONSTRAINTS, *what, PIP_CONSTRAINT=str(CONSTRAINTS))

    def operators(self) -> dict[str, tuple[str, str]]:
        """Operator -> (backend on a CPU, reason)."""
        facts = json.loads(self.run("turbogr", "doctor", "--quick", "--json"))
        rows = [row for row in facts["operators"] if row["device"] == "cpu"]
        return {row["operator"]: (row["backend"], row["reason"]) for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where `make wheel` put the wheel and the source distribution")
    parser.add_argument("--torch", default="torch==2.13.0", help="what to install as torch")
    arguments = parser.parse_args()
    wheel, source = only(arguments.folder, "turbogr-*.whl"), only(arguments.folder, "turbogr-*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        environment = Environment(Path(scratch))
        environment.install(arguments.torch)
        environment.install(wheel, *TEST_NEEDS)
        compiled = check_compiled(environment)
        tests = run_operator_tests(environment, source)
        check_build_without_compiler(environment)
        environment.install("--force-reinstall", "--no-deps", source)
        check_without_compiled(environment, compiled)
        rebuilt = check_build_with_compiler(environment, compiled)
    print(
        f"{wheel.name}, {wheel.stat().st_size / 1e6:.2f} MB: {len(compiled)} compiled operators, tests/ops {tests}, "
        f"without a compiler, on torch's own libgomp; from source without a compiler: torch path; {rebuilt}"
    )


def only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.resolve().glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder} holds {len(found)} files {pattern}, one is wanted: run `make wheel`")
    return found[0]


def check_compiled(environment: Environment) -> list[str]:
    """The operators that run compiled code; their libraries share torch's OpenMP runtime."""
    where, runtimes = json.loads(environment.run("python", "-c", LOAD_EVERYTHING))
    if not where.startswith(str(environment.work)):
        sys.exit(f"the installed package is not what runs: {where}")
    if len(runtimes) != 1 or "torch/lib/" not in runtimes[0]:
        sys.exit(f"torch's OpenMP runtime is not the only one: {', '.join(runtimes)}")
    rows = environment.operators()
    missing = [f"{name}: {reason}" for name, (_, reason) in rows.items() if "not compiled" in reason]
    if missing:
        sys.exit(f"the wheel's operators are not taken: {'; '.join(missing)}")
    return [name for name, (backend, _) in rows.items() if backend == "cpu"]


def run_operator_tests(environment: Environment, source: Path) -> str:
    """The source distribution's tests/ops, in a folder without `src`; pytest's summary."""
    with tarfile.open(source) as archive:
        top = archive.getnames()[0].split("/")[0]
        for member in archive.getmembers():
            member.name = member.name.removeprefix(f"{top}/")
            if member.name == "pyproject.toml" or member.name.startswith("tests/"):
                archive.extract(member, environment.work, filter="data")
    said = environment.run("python", "-m", "pytest", "tests/ops")
    found = re.search(r"\d+ passed.*", said)
    if found is None:
        sys.exit(f"no operator test ran:\n{said}")
    return found[0].rstrip("= ")


def check_build_without_compiler(environment: Environment) -> None:
    """What `doctor --build` cannot renew, it must not take away."""
    before = environment.operators()
    said = environment.run("turbogr", "doctor", "--build", status=2)
    if NO_COMPILER not in said or environment.operators() != before:
        sys.exit(f"doctor --build without a compiler took the wheel's operators away, or said nothing of it: {said}")


def check_without_compiled(environment: Environment, compiled: Sequence[str]) -> None:
    rows = environment.operators()
    silent = [name for name in compiled if rows[name][0] == "cpu" or NO_COMPILER not in rows[name][1]]
    if silent:
        sys.exit(f"installed from source without a compiler, doctor does not say why: {', '.join(silent)}")
    if environment.run("python", "-c", TRAIN_AND_ASK).split()[-1] != "5":
        sys.exit("a model trained on the torch path does not recommend")


def check_build_with_compiler(environment: Environment, compiled: Sequence[str]) -> str:
    compiler = next((path for path in map(shutil.which, ("c++", "g++", "clang++")) if path), None)
    if compiler is None:
        return "doctor --build not tried, no compiler here"
    # a compiler needs its assembler and its linker
    path = f"{environment.bin}{os.pathsep}{os.environ['PATH']}"
    environment.run("turbogr", "doctor", "--build", "--quick", CXX=compiler, PATH=path)
    rows = environment.operators()
    if [name for name, (backend, _) in rows.items() if backend == "cpu"] != list(compiled):
        sys.exit("doctor --build compiled, and the operators are still not taken")
    return "doctor --build compiles them there"


if __name__ == "__main__":
    main()
