"""Compiled libraries: built, not built with the reason said, kept where they cannot be built again."""

import shutil
from pathlib import Path

import pytest
import torch

from turbogr.cli import main
from turbogr.ops import native
from turbogr.ops.hstu_attention import hstu_attention
from turbogr.ops.native import build
from turbogr.ops.registry import table

CPU = torch.device("cpu")
NOWHERE = "/nowhere/c++"
REASON = f"no C++ compiler was found ({NOWHERE}): install g++ or clang++"
SOURCE = 'extern "C" __attribute__((visibility("default"))) void answer(int* at) { *at = 42; }\n'
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))) or build.machine() not in build.INSTRUCTION_SETS,
    reason="no C++ compiler here",
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package whose only source is small.cpp, and nothing built."""
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "small.cpp").write_text(SOURCE)
    for module in (build, native):
        monkeypatch.setattr(module, "SOURCES", tmp_path / "src")
    monkeypatch.setattr(build, "LIBRARIES", tmp_path / "lib")
    monkeypatch.setattr(build, "FACTS", tmp_path / "lib" / "built.json")
    monkeypatch.delenv("CXX", raising=False)
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def test_without_a_compiler_operators_run_in_torch_and_the_reason_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an installation that fails, or falls back in silence, where no compiler is."""
    monkeypatch.setenv("CXX", NOWHERE)
    assert build.build()["reason"] == REASON
    assert native.rejects("small")(CPU) == f"not compiled: {REASON}, then run `turbogr doctor --build`"
    backends = {operator: (backend, reason) for operator, backend, reason in table(CPU)}
    assert backends["hstu_attention"][0] == "tiles"
    assert f"cpu: not compiled: {REASON}" in backends["hstu_attention"][1]
    q = torch.ones(3, 1, 2)
    assert torch.isfinite(hstu_attention(q, q, q, torch.tensor([0, 3]), max_len=4)).all()


@needs_compiler
def test_doctor_build_compiles_what_installing_could_not(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("CXX", NOWHERE)
    build.build()
    assert native.rejects("small")(CPU) is not None
    monkeypatch.delenv("CXX")
    assert main(["doctor", "--build", "--quick"]) == 0
    assert native.rejects("small")(CPU) is None
    answer = torch.zeros(1, dtype=torch.int32)
    native.function("small", "answer", native.ctypes.c_void_p)(native.address(answer))
    assert answer.item() == 42


@needs_compiler
def test_a_build_that_cannot_be_leaves_the_libraries_of_the_same_sources(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: `doctor --build` without a compiler that takes a wheel's operators away."""
    assert "reason" not in build.build()
    monkeypatch.setenv("CXX", NOWHERE)
    assert build.build()["reason"] == REASON
    assert native.rejects("small")(CPU) is None


@needs_compiler
@pytest.mark.parametrize("change", ["source", "library"])
def test_a_build_that_cannot_be_keeps_no_libraries_of_other_sources(
    folder: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: stale code that is called up to date, and a library that is missing."""
    build.build()
    if change == "source":
        (folder / "src" / "small.cpp").write_text(SOURCE + "// edited\n")
    else:
        next((folder / "lib").glob("*.so")).unlink()
    monkeypatch.setenv("CXX", NOWHERE)
    build.build()
    assert REASON in str(native.rejects("small")(CPU))


@needs_compiler
def test_a_source_that_does_not_compile_is_named(folder: Path) -> None:
    (folder / "src" / "small.cpp").write_text("not C++\n")
    reason = build.build()["reason"]
    assert "could not compile small.cpp for" in reason
    assert not list((folder / "lib").glob("*.so"))
    assert not list((folder / "lib").glob("*.partial-*.so"))


@pytest.fixture
def compiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that are compiled from here on, one entry for each instruction set."""
    (folder / "src" / "wide.cpp").write_text('#include "wide.h"\n' + SOURCE)
    (folder / "src" / "wide.h").write_text("#pragma once\n")
    names: list[str] = []
    true = build.compile_source
    monkeypatch.setattr(build, "compile_source", lambda *job: names.append(job[1].stem) or true(*job))
    return names


@needs_compiler
@pytest.mark.parametrize("change", ["source", "header", "library", "flags", "failure"])
def test_the_script_compiles_what_is_out_of_date_and_nothing_else(
    folder: Path, compiled: list[str], change: str, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Catches: `make` that compiles again what installing has compiled, and one that keeps what is out of date."""
    assert build.main([]) == 0
    assert set(compiled) == {"small", "wide"}
    compiled.clear()
    capsys.readouterr()
    assert build.main([]) == 0
    assert compiled == []
    assert capsys.readouterr().out == "compiled operators: all 2 sources are up to date\n"

    source = folder / "src" / "wide.cpp"
    match change:
        case "source":
            source.write_text(source.read_text() + "// edited\n")
        case "header":
            (folder / "src" / "wide.h").write_text("#pragma once\n// edited\n")
        case "library":
            build.libraries("wide")[0].unlink()
        case "flags":
            monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-O1"])
        case "failure":
            good = source.read_text()
            source.write_text("not C++\n")
            assert build.main([]) == 1
            source.write_text(good + "// mended\n")
            compiled.clear()
            capsys.readouterr()
    assert build.main([]) == 0
    wanted = ["small", "wide"] if change == "flags" else ["wide"]
    assert sorted(set(compiled)) == wanted
    assert f"compiled operators: {', '.join(wanted)} ({len(wanted)} of 2 sources)" in capsys.readouterr().out
    assert build.serves(build.read_facts())
    for name in ("small", "wide"):
        assert native.rejects(name)(CPU) is None


def test_without_a_compiler_the_script_says_so_and_is_no_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: `make demo` that ends on a machine without a compiler, where the operators run in torch."""
    monkeypatch.setenv("CXX", NOWHERE)
    assert build.main([]) == 0
    assert f"without compiled operators: {REASON}" in capsys.readouterr().out


@needs_compiler
def test_a_whole_build_compiles_what_is_up_to_date_too(compiled: list[str]) -> None:
    """Catches: `doctor --build` after a change of compilers that keeps what the old one made."""
    build.build()
    compiled.clear()
    build.build()
    assert set(compiled) == {"small", "wide"}


@needs_compiler
def test_a_source_without_code_for_the_best_set_is_loaded_for_the_next_plainer_one(
    folder: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: the same code compiled twice, or a library looked for that nobody built."""
    monkeypatch.delenv(native.FORCED_SET, raising=False)
    if len(native.runnable()) < 2:
        pytest.skip("this processor runs one instruction set only")
    native.instruction_set.cache_clear()
    plainer, best = native.runnable()[-2:]
    monkeypatch.setattr(build, "ONLY_FOR", {best: ("wide",)})
    assert "reason" not in build.build()
    sets = set(build.INSTRUCTION_SETS[build.machine()])
    files = {f"small-{name}.so" for name in sets - {best}} | {f"wide-{name}.so" for name in sets}
    assert {path.name for path in build.libraries()} == {path.name for path in folder.glob("lib/*.so")} == files
    assert [Path(native.library(name)._name).name for name in ("small", "wide")] == [
        f"small-{plainer}.so",
        f"wide-{best}.so",
    ]


def test_the_sources_that_speak_of_amx_are_those_that_are_compiled_for_it() -> None:
    """Catches: code for AMX that is written and never built."""
    speaking = {path.name for path in build.SOURCES.iterdir() if "__AMX_" in path.read_text()}
    assert speaking == {f"{name}.cpp" for name in build.ONLY_FOR["amx"]}
