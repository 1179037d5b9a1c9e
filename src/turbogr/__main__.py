"""`python -m turbogr`, and what torchrun starts on every rank."""

import os
import sys

from turbogr.cli import main
from turbogr.launch import world_size

if __name__ == "__main__":
    code = main()
    if world_size() > 1:
        # All is written and closed. Gloo's threads sometimes abort a process that takes itself apart, and torchrun
        # would call a run failed that has ended well.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
