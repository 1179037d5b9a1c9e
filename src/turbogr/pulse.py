"""Who is still there: every rank counts up once a second where all can see it, so that a silent one can be named.

Counts, not times, are compared: the clocks of machines differ.
"""

import os
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from turbogr.launch import attempt, rank

EVERY_S = 0.5
SILENT_S = 2.5
"""A rank whose count stands still for so long is taken for gone."""


def meeting_place(timeout_s: float, *, own: bool = True) -> Store:
    """The store where ranks find one another. torchrun keeps one for all its attempts: each has keys of its own.

    Without torchrun's, rank 0 keeps it, where `own` says that this is the connection to do so.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    keeps = own and rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(host, port, is_master=keeps, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    return PrefixStore(f"turbogr/{attempt()}", store)


class Pulse:
    """This rank's count, kept going by a thread of its own until `stop`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        # a connection of its own: one that waits for another rank would hold up the count
        self._store = meeting_place(SILENT_S, own=False)
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
        return [one for one in range(self.world) if one != self.rank and before[one] == after[one]]

    def _counts(self) -> list[int]:
        # adding nothing reads a count without waiting for it to exist
        return [self._store.add(f"pulse/{one}", 0) for one in range(self.world)]

    def _beat(self) -> None:
        while not self._stopped.is_set():
            try:
                self._store.add(f"pulse/{self.rank}", 1)
            except RuntimeError:
                return  # where the counts were kept has ended; the next collective says so
            self._stopped.wait(EVERY_S)
