"""The frame of the command line: verbs, exit codes, and one sentence for whatever a user can mend."""

import errno
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from turbogr import cli
from turbogr.cli import VERBS, Verb, main
from turbogr.errors import DataError

Outcome = subprocess.CompletedProcess[str]


def turbogr(*args: str, **environment: str) -> Outcome:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "turbogr", *args],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=120,
    )


def refused(outcome: Outcome) -> str:
    """The one sentence of a refused call."""
    assert outcome.returncode == 2, outcome
    assert outcome.stdout == ""
    assert re.fullmatch(r"turbogr: .+\n", outcome.stderr), outcome.stderr
    return outcome.stderr


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> object:
    """`failing(error)` makes the verb `fail` raise that error."""

    def install(error: BaseException) -> list[str]:
        def run(args: list[str]) -> None:
            raise error

        module = types.ModuleType("failing_verb")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "failing_verb", module)
        monkeypatch.setitem(VERBS, "fail", Verb("failing_verb", "run", "", "train.batch_tokens"))
        return ["fail"]

    return install


def test_alone_it_prints_every_verb_and_the_quick_start() -> None:
    outcome = turbogr()
    assert outcome.returncode == 0
    for verb in VERBS:
        assert f"turbogr {verb} " in outcome.stdout
    assert outcome.stdout.count("\n  turbogr ") == len(VERBS) + 2, "the quick start is two commands"


def test_help_is_fast() -> None:
    begin = time.perf_counter()
    assert turbogr("--help").returncode == 0
    assert time.perf_counter() - begin < 2


@pytest.mark.parametrize("verb", ["config show", "train --help", "data prepare --help", "doctor --help"])
def test_torch_is_imported_only_when_there_is_work(verb: str) -> None:
    code = (
        "import contextlib, sys; from turbogr.cli import main\n"
        f"with contextlib.suppress(SystemExit): main({verb.split()})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_teaches_by_examples(verb: str) -> None:
    outcome = turbogr(*verb.split(), "--help", COLUMNS="100")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stderr == ""
    options, examples = outcome.stdout.rsplit("Examples:\n", 1)
    assert f"usage: turbogr {verb}" in options
    assert examples.count(f"turbogr {verb} ") + examples.count(f"turbogr {verb}\n") >= 2


def listed_flags(verb: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Every flag of the verb's help, without the examples, which are also of other verbs."""
    with pytest.raises(SystemExit):
        main([*verb.split(), "--help"])
    options = capsys.readouterr().out.rsplit("Examples:\n", 1)[0]
    return sorted(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", options)))


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_of_the_help_is_known_to_the_parser(verb: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    flags = listed_flags(verb, capsys)
    assert len(flags) >= 2
    # flags are looked at in their order: the first unknown one is named
    assert main([*verb.split(), *flags, "--no-such-flag"]) == 2
    assert "unknown option --no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize("verb", VERBS)
def test_what_to_lower_when_memory_runs_out_is_a_flag_of_the_verb(verb: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    knobs = set(re.findall(r"--[\w.-]*\w", VERBS[verb].memory_knob))
    assert knobs <= set(listed_flags(verb, capsys)) and bool(knobs) == bool(VERBS[verb].memory_knob)


def test_a_group_lists_its_verbs() -> None:
    outcome = turbogr("data")
    assert outcome.returncode == 0
    assert "turbogr data prepare" in outcome.stdout
    assert "turbogr train" not in outcome.stdout


@pytest.mark.parametrize(
    ("typed", "near"),
    [(["trian"], "train"), (["data", "prepair"], "data prepare"), (["dat"], "data"), (["show"], None)],
)
def test_an_unknown_verb_names_the_nearest(typed: list[str], near: str | None) -> None:
    said = refused(turbogr(*typed))
    assert f"no verb {' '.join(typed)!r}" in said
    assert near is None or f"did you mean {near!r}" in said


def test_the_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"turbogr \d+\.\d+\.\d+\S*\n", turbogr("--version").stdout)


def test_a_user_error_is_one_sentence_and_exit_code_2(failing, capsys) -> None:
    assert main(failing(DataError("row 3 of x.csv has no time: mend it."))) == 2
    assert capsys.readouterr().err == "turbogr: row 3 of x.csv has no time: mend it.\n"


def test_its_traceback_is_shown_on_request(failing, capsys, monkeypatch) -> None:
    monkeypatch.setenv("TURBOGR_TRACEBACK", "1")
    assert main(failing(DataError("mend it."))) == 2
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert said.endswith("turbogr: mend it.\n")


def test_a_bug_shows_its_traceback_and_is_exit_code_1(failing, capsys) -> None:
    assert main(failing(KeyError("ours"))) == 1
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "KeyError: 'ours'" in said


def test_ctrl_c_is_one_sentence_and_exit_code_130(failing, capsys) -> None:
    assert main(failing(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "turbogr: interrupted; nothing half-written is left.\n"
    assert main(failing(KeyboardInterrupt("continue with --resume"))) == 130
    assert capsys.readouterr().err == "turbogr: interrupted; continue with --resume.\n"


@pytest.mark.parametrize("kind", ["python", "torch", "allocator"])
def test_out_of_memory_names_the_knob(kind: str, failing, capsys) -> None:
    import torch

    error = {
        "python": MemoryError(),
        "torch": torch.OutOfMemoryError("CUDA out of memory"),
        "allocator": RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
    }[kind]
    assert main(failing(error)) == 2
    assert capsys.readouterr().err == "turbogr: out of memory: lower train.batch_tokens.\n"


def test_the_memory_error_of_torch_on_a_cpu_is_recognised(capsys, failing) -> None:
    """The sentence is matched by the allocator's words, which another torch may change."""
    import torch

    with pytest.raises(RuntimeError) as error:
        torch.empty(2**60)
    assert main(failing(error.value)) == 2
    assert "out of memory" in capsys.readouterr().err


def test_a_full_disk_is_one_sentence(failing, capsys) -> None:
    assert main(failing(OSError(errno.ENOSPC, "No space left on device", "/runs/x"))) == 2
    assert (
        capsys.readouterr().err == "turbogr: no space left on the disk of /runs/x: free some or choose another disk.\n"
    )


def test_another_operating_system_error_is_a_bug(failing, capsys) -> None:
    assert main(failing(OSError(errno.EIO, "Input/output error"))) == 1
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["config", "show"], ["config", "show", "--help"]])
def test_a_reader_that_leaves_is_no_error(verb: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        outcome = subprocess.run(
            [sys.executable, "-m", "turbogr", *verb], stdout=closed, stderr=subprocess.PIPE, text=True, check=False
        )
    assert outcome.stderr == ""
    assert outcome.returncode == 141


def test_every_environment_variable_is_in_the_table() -> None:
    repository = Path(__file__).parents[2]
    documented = (repository / "docs/environment.md").read_text()
    used = set()
    for folder in ("src", "benchmarks", "tools", "tests"):
        for path in (repository / folder).rglob("*.py"):
            used |= set(re.findall(r"\bTURBOGR_[A-Z_]+\b", path.read_text()))
    assert {"TURBOGR_BACKEND", "TURBOGR_TRACEBACK"} <= used
    assert [name for name in sorted(used) if f"`{name}`" not in documented] == []


def test_the_verbs_are_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    assert [verb for verb in cli.VERBS if f"`turbogr {verb}" not in text] == []
