"""What torchrun says of a process, read from the environment alone, so that nothing need be loaded to know it."""

import os
from pathlib import Path

LAUNCH = "TORCHELASTIC_RUN_ID"


def world_size() -> int:
    """Processes of the run; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process among them."""
    return int(os.environ.get("RANK", "0"))


def began(folder: Path) -> None:
    """Note which launch of torchrun began, or goes on with, the run in `folder`."""
    if LAUNCH in os.environ:
        (folder / ".launch").write_text(os.environ[LAUNCH])


def attempt() -> int:
    """How often torchrun has started the ranks again after a failure (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarted(folder: Path) -> bool:
    """Whether torchrun has started the ranks again, in a run that this launch began."""
    noted = folder / ".launch"
    return attempt() > 0 and noted.exists() and noted.read_text() == os.environ.get(LAUNCH)


def local_ranks() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
