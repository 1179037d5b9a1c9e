"""Who is still there: every rank counts up once a second where all can see it, so that a silent one can be named.

Counts, not times, are compared: the clocks of machines differ.
"""

import os
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

EVERY_S = 0.5
SILENT_S = 2.5
"""A rank whose count stands still for so long is taken for gone."""


class Pulse:
    """This rank's count, kept going by a thread of its own until `stop`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        # a connection of its own: one that waits for another rank would hold up the count
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=SILENT_S))
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="turbogr-pulse", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def silent(self) -> list[int]:
        """Ranks that have ended or stand still; rank 0 where it cannot even be asked."""
        try:
            before = self._counts()
            time.sleep(SILENT_S)
            after = self._counts()
        except RuntimeError:  # torch's DistStoreError is one
            return [0]
        return [rank for rank in range(self.world) if rank != self.rank and before[rank] == after[rank]]

    def _counts(self) -> list[int]:
        # adding nothing reads a count without waiting for it to exist
        return [self._store.add(f"turbogr/pulse/{rank}", 0) for rank in range(self.world)]

    def _beat(self) -> None:
        while not self._stopped.is_set():
            try:
                self._store.add(f"turbogr/pulse/{self.rank}", 1)
            except RuntimeError:
                return  # where the counts were kept has ended; the next collective says so
            self._stopped.wait(EVERY_S)
