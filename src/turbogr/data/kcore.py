"""Iterative k-core out of core: the pairs (user, item) lie in two files, memory holds one counter per user and item.

Users with fewer than `user_events` events and items with fewer than `item_events` are dropped, their events with them,
until every remaining user and item has enough. Each pass moves the surviving pairs to the front of the files.
"""

from pathlib import Path

import numpy as np

CHUNK = 1 << 22


class PairFiles:
    """The pairs of a log as two int32 files that are appended to and then compacted in place."""

    def __init__(self, folder: Path) -> None:
        self._paths = (folder / "pairs-user.bin", folder / "pairs-item.bin")
        self._streams = [path.open("wb", buffering=1 << 20) for path in self._paths]
        self.length = 0

    def append(self, user: np.ndarray, item: np.ndarray) -> None:
        for stream, values in zip(self._streams, (user, item), strict=True):
            stream.write(np.ascontiguousarray(values, dtype=np.int32).data)
        self.length += len(user)

    def core(self, users: int, items: int, user_events: int, item_events: int) -> tuple[np.ndarray, np.ndarray]:
        """(bool [users], bool [items]): who survives."""
        for stream in self._streams:
            stream.close()
        alive_user, alive_item = np.ones(users, bool), np.ones(items, bool)
        if not self.length:
            return ~alive_user, ~alive_item
        pair_user, pair_item = (np.memmap(path, np.int32, "r+") for path in self._paths)
        while True:
            before = self.length
            user_count, item_count = np.zeros(users, np.int32), np.zeros(items, np.int32)
            self.length = _pass(pair_user, pair_item, before, alive_user, alive_item, user_count, item_count)
            alive_user, alive_item = user_count >= max(user_events, 1), item_count >= max(item_events, 1)
            lost_user, lost_item = (user_count > 0) & ~alive_user, (item_count > 0) & ~alive_item
            if not lost_user.any() and not lost_item.any():
                return alive_user, alive_item


def _pass(
    pair_user: np.ndarray,
    pair_item: np.ndarray,
    length: int,
    alive_user: np.ndarray,
    alive_item: np.ndarray,
    user_count: np.ndarray,
    item_count: np.ndarray,
) -> int:
    """Move the pairs whose user and item are alive to the front, count them; returns how many there are."""
    kept = 0
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        user, item = pair_user[start:stop], pair_item[start:stop]
        alive = alive_user[user] & alive_item[item]
        user, item = user[alive], item[alive]
        pair_user[kept : kept + len(user)] = user
        pair_item[kept : kept + len(item)] = item
        kept += len(user)
        np.add.at(user_count, user, 1)
        np.add.at(item_count, item, 1)
    return kept
