"""A terminal's output on stdin as an SVG picture: tmux capture-pane -pe | python -m tools.terminal_picture x.svg"""

import io
import sys

from rich.console import Console
from rich.text import Text

WIDTH = 118


def main(target: str) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text.from_ansi(sys.stdin.read().strip("\n")), soft_wrap=True)
    console.save_svg(target, title="make demo")


if __name__ == "__main__":
    main(sys.argv[1])
