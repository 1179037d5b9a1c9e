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
        monkeypatch.setattr(module, "LIBRARIES", tmp_path / "lib")
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
