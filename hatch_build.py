"""Build hook: compiles the CPU operators when the package is installed or a wheel is made (see ops/native/build.py).

A machine without a compiler gets a pure wheel, whose operators run in torch; `turbogr doctor` says why.
"""

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = Path(__file__).parent / "src" / "turbogr" / "ops" / "native" / "build.py"


class CompiledOperators(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        spec = importlib.util.spec_from_file_location("native_build", BUILD)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        facts = module.build()
        if "reason" in facts:
            self.app.display_warning(f"without compiled operators: {facts['reason']}")
            return
        # plain C symbols, no Python ABI: one wheel serves every Python of this platform
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
