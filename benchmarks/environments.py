"""Environments of their own for what a benchmark compares with, made by a full run beside the project's."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def environment(folder: Path, installs: Sequence[Sequence[str]], make: bool) -> Path:
    """Its Python; `installs` are the arguments of one `pip install` after the other.

    Raises OSError with the reason where there is none.
    """
    python, done = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join(" ".join(arguments) for arguments in installs)
    if not done.exists() or done.read_text() != wanted:
        if not make:
            raise OSError(f"no environment {folder.name} with {installs[-1][-1]}: a full run makes it")
        commands = [[sys.executable, "-m", "venv", "--clear", str(folder)]]
        commands += [[str(python), "-m", "pip", "install", "--quiet", *arguments] for arguments in installs]
        for command in commands:
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            if said.returncode:
                raise OSError(f"the environment cannot be made: {(said.stderr.strip().splitlines() or ['?'])[-1]}")
        done.write_text(wanted)
    return python
