"""Build hook: compiles the CPU operators when the package is installed or a wheel is made (see ops/native/build.py).

A machine without a compiler gets a pure wheel, whose operators run in torch; `turbogr doctor` says why.
"""

import importlib.util
import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
BUILD = ROOT / "src" / "turbogr" / "ops" / "native" / "build.py"
OLDEST = (2, 28)
"""glibc of the oldest systems that torch 2.13's own wheels run on: a lower tag would promise nothing."""
CXX_LIMITS = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""What such systems have of the C++ runtime, from auditwheel's policy manylinux_2_28."""


class CompiledOperators(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build = load_build()
        facts = build.refresh()
        shipped = [build.FACTS]
        if build.serves(build.read_facts()):
            libraries = build.libraries()
            # plain C symbols, no Python ABI: one wheel serves every Python of this platform
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag(path.read_bytes() for path in libraries)}"
            shipped += libraries
        else:
            self.app.display_warning(f"without compiled operators: {facts['reason']}")
        build_data["artifacts"] += [path.relative_to(ROOT).as_posix() for path in shipped]


def load_build() -> ModuleType:
    """The build script, which is not importable by name before the package is installed."""
    spec = importlib.util.spec_from_file_location("native_build", BUILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def platform_tag(libraries: Iterable[bytes]) -> str:
    """manylinux with the glibc that the libraries' symbols need; the plain name of this platform where that says less.

    Their OpenMP runtime is not asked about: libgomp.so.1 is the one that torch's wheels bring and have loaded before,
    and the dynamic linker takes it for ours by its soname.
    """
    plain = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    glibc, cxx = needed_versions(libraries)
    if not glibc or any(version > CXX_LIMITS[name] for name, version in cxx.items()):
        return plain  # another libc, or a C++ runtime younger than torch's systems have
    major, minor = max(OLDEST, glibc[:2])
    return plain.replace("linux", f"manylinux_{major}_{minor}")


def needed_versions(libraries: Iterable[bytes]) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Highest versions of glibc, and of the C++ runtime's parts, that stand among the libraries' names of symbols."""
    found: dict[str, tuple[int, ...]] = {}
    for content in libraries:
        for name, digits in re.findall(rb"(GLIBCXX|GLIBC|CXXABI|GCC)_(\d+(?:\.\d+)+)", content):
            version = tuple(map(int, digits.decode().split(".")))
            found[name.decode()] = max(found.get(name.decode(), ()), version)
    return found.pop("GLIBC", ()), found
