"""Progress on anything that takes longer than two seconds: a live bar in a terminal, plain lines in a pipe."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PATIENCE_S = 2.0
LINE_EVERY_S = 10.0


def console() -> Console:
    """Progress and notes go to stderr, so that stdout carries only results."""
    return Console(stderr=True, soft_wrap=True)


class Bar:
    """One task's progress. `update(done, note)` may be called as often as wanted."""

    def __init__(self, what: str, total: int | None, live: bool, silent: bool = False) -> None:
        self.what = what
        self._silent = silent
        self.total = total
        self._begin = self._last = time.monotonic()
        self._progress: Progress | None = None
        self._live = live
        self._said = False

    def update(self, done: int, note: str = "") -> None:
        now = time.monotonic()
        if self._silent:
            return
        if self._live:
            if self._progress is None and now - self._begin > PATIENCE_S:
                self._progress = _live_bar()
                self._progress.start()
                self._task = self._progress.add_task(self.what, total=self.total, note="")
            if self._progress is not None:
                self._progress.update(self._task, completed=done, note=note)
        elif now - self._last > LINE_EVERY_S:
            self._last = now
            self._said = True
            print(f"{self.what}: {self._share(done)} {note}".rstrip(), file=sys.stderr, flush=True)

    def write(self, line: str) -> None:
        """A line that stays, above a live bar."""
        if self._silent:
            return
        if self._progress is not None:
            self._progress.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
        elif self._said:
            print(f"{self.what}: done in {time.monotonic() - self._begin:.0f} s", file=sys.stderr, flush=True)

    def _share(self, done: int) -> str:
        if not self.total:
            return f"{done:,}"
        elapsed = time.monotonic() - self._begin
        left = elapsed * (self.total - done) / max(done, 1)
        return f"{done:,}/{self.total:,}, about {left:.0f} s left,"


@contextmanager
def bar(what: str, total: int | None = None, *, silent: bool = False) -> Iterator[Bar]:
    """`with bar("evaluate", total=100) as b: ... b.update(10)`; a silent one shows nothing."""
    current = Bar(what, total, live=sys.stderr.isatty(), silent=silent)
    try:
        yield current
    finally:
        current.close()


def _live_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=console(),
        transient=True,
    )
