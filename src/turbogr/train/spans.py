"""Where a step's time goes: one span per stage, named like it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Spans:
    """Seconds spent in every stage since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begin

    def take(self) -> dict[str, float]:
        """What was collected, which is then forgotten."""
        seconds, self._seconds = self._seconds, {}
        return seconds
