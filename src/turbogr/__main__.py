"""`python -m turbogr`, and what torchrun starts on every rank."""

import sys

from turbogr.cli import main

if __name__ == "__main__":
    sys.exit(main())
