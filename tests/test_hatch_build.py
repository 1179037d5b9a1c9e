"""The build hook: what a wheel ships and which platforms its tag promises."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hatch_build
from hatch_build import CompiledOperators, needed_versions, platform_tag


def content(*symbols: str) -> bytes:
    """A library whose table of names holds these versions."""
    return b"\x7fELF\0" + b"\0".join(symbol.encode() for symbol in symbols) + b"\0"


@pytest.mark.parametrize(
    ("symbols", "tag"),
    [
        (["GLIBC_2.2.5", "GLIBC_2.14"], "manylinux_2_28_x86_64"),
        (["GLIBC_2.27", "GLIBCXX_3.4.24", "CXXABI_1.3.11", "GCC_3.0", "GOMP_4.5"], "manylinux_2_28_x86_64"),
        (["GLIBC_2.9", "GLIBC_2.34"], "manylinux_2_34_x86_64"),
        (["GLIBC_2.14", "GLIBCXX_3.4.29"], "linux_x86_64"),
        (["GLIBC_2.14", "CXXABI_1.3.13"], "linux_x86_64"),
        (["CXXABI_1.3"], "linux_x86_64"),
    ],
)
def test_a_tag_promises_no_older_system_than_the_symbols_need(
    symbols: list[str], tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a wheel that pip installs where it cannot be loaded (versions compared as text put 2.9 above 2.34)."""
    monkeypatch.setattr(hatch_build.sysconfig, "get_platform", lambda: "linux-x86_64")
    assert platform_tag(content(symbol) for symbol in symbols) == tag


def test_versions_of_all_libraries_count() -> None:
    glibc, cxx = needed_versions([content("GLIBC_2.27", "GLIBCXX_3.4"), content("GLIBC_2.3", "GLIBCXX_3.4.9")])
    assert (glibc, cxx) == ((2, 27), {"GLIBCXX": (3, 4, 9)})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the build script with one small source, as in a source distribution: nothing built."""
    native = tmp_path / "src" / "turbogr" / "ops" / "native"
    (native / "src").mkdir(parents=True)
    shutil.copy(hatch_build.BUILD, native)
    (native / "src" / "small.cpp").write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(hatch_build, "ROOT", tmp_path)
    monkeypatch.setattr(hatch_build, "BUILD", native / "build.py")
    return native


def wheel_facts() -> tuple[dict[str, Any], list[str]]:
    """(what the hook tells the builder, its warnings)."""
    warnings: list[str] = []
    facts: dict[str, Any] = {"artifacts": []}
    hook = SimpleNamespace(app=SimpleNamespace(display_warning=warnings.append))
    CompiledOperators.initialize(hook, "standard", facts)  # type: ignore[arg-type]
    return facts, warnings


def test_without_a_compiler_the_wheel_is_pure_and_ships_no_library(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: leftovers of another build in a wheel for every platform."""
    (package / "lib").mkdir()
    (package / "lib" / "old-avx2.so").write_bytes(b"")
    monkeypatch.setenv("CXX", "/nowhere/c++")
    facts, warnings = wheel_facts()
    assert facts == {"artifacts": ["src/turbogr/ops/native/lib/built.json"]}
    assert warnings == ["without compiled operators: no C++ compiler was found (/nowhere/c++): install g++ or clang++"]


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler here")
def test_the_wheel_ships_the_libraries_that_were_built_and_no_others(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    (package / "lib").mkdir()
    (package / "lib" / "old-avx2.so").write_bytes(b"")
    facts, warnings = wheel_facts()
    build = hatch_build.load_build()
    assert not warnings
    assert facts["pure_python"] is False
    assert facts["tag"].startswith("py3-none-linux_") or facts["tag"].startswith("py3-none-manylinux_")
    names = {Path(path).name for path in facts["artifacts"]}
    assert names == {"built.json"} | {f"small-{name}.so" for name in build.sets_of("small")}
    assert names <= {path.name for path in (package / "lib").iterdir()}
