"""What torchrun says of a process, read from the environment alone, so that nothing need be loaded to know it."""

import os


def world_size() -> int:
    """Processes of the run; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process among them."""
    return int(os.environ.get("RANK", "0"))


def local_ranks() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
