"""One side of `benchmarks.peers` in its own process: how many steps to train comes on stdin, what they took on stdout.

Commands, one a line, each answered by one line of JSON:
    facts     what the side says of itself before its first step
    NUMBER    train that many steps, data loading included: their seconds, the processor's seconds, real tokens (those
              with a loss), the last loss and the process's peak so far

Both environments import this file: the standard library only.
"""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any


class Link:
    def __init__(self, facts: dict[str, Any]) -> None:
        # what a library prints must not stand among the answers
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._facts = {**facts, "resident_gib": memory_gib("VmRSS")}
        self._left, self._tokens, self._begin, self._begin_cpu = 0, 0, 0.0, 0.0

    def step(self, tokens: int, loss: float) -> None:
        """One step is done; waits for a command after the last one that was asked for."""
        self._tokens += tokens
        self._left -= 1
        if self._left == 0:
            took = {
                "seconds": time.perf_counter() - self._begin,
                "cpu_seconds": time.process_time() - self._begin_cpu,
                "tokens": self._tokens,
                "loss": loss,
                "peak_gib": memory_gib("VmHWM"),
            }
            self._answer(took)
            self.wait()

    def wait(self) -> None:
        """Answer facts until steps are asked for; ends the process when nobody asks any more."""
        while (command := sys.stdin.readline().strip()) == "facts":
            self._answer(self._facts)
        if not command:
            raise SystemExit(0)
        self._left, self._tokens = int(command), 0
        self._begin, self._begin_cpu = time.perf_counter(), time.process_time()

    def _answer(self, values: dict[str, Any]) -> None:
        print(json.dumps(values), file=self._answers, flush=True)


def memory_gib(what: str) -> float:
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 2**20
