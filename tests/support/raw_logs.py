"""Small raw logs for the tests of `prepare`, and what a store must hold, worked out in plain Python."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.prepare import header
from turbogr.data.sources.kuairand import ACTIONS
from turbogr.data.store import Store

KUAIRAND_COLUMNS = header()


def kuairand_line(user: object, video: object, time: object, *actions: str) -> str:
    fields = dict.fromkeys(KUAIRAND_COLUMNS, "0") | {"user_id": user, "video_id": video, "time_ms": time}
    fields |= {ACTIONS[action]: "1" for action in actions}
    return ",".join(str(fields[column]) for column in KUAIRAND_COLUMNS)


def kuairand_folder(folder: Path, *files: Sequence[str]) -> Path:
    """A folder with one standard log per sequence of lines, in date order."""
    folder.mkdir(parents=True, exist_ok=True)
    for day, lines in enumerate(files, 8):
        text = "\n".join([",".join(KUAIRAND_COLUMNS), *lines]) + "\n"
        (folder / f"log_standard_4_{day}_to_4_{day}.csv").write_text(text)
    return folder


def csv_file(path: Path, header: str, rows: Iterable[Sequence[object]]) -> Path:
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


def events_of(store: Store) -> list[tuple[Any, Any, int]]:
    """(raw user, raw item, time) of every event, in store order."""
    users, items = store.users["raw_id"].to_pylist(), store.items["raw_id"].to_pylist()
    lengths = (store.offsets[1:] - store.offsets[:-1]).tolist()
    owners = [user for user, length in zip(users, lengths, strict=True) for _ in range(length)]
    return [
        (user, items[item], time)
        for user, item, time in zip(owners, store.item.tolist(), store.time.tolist(), strict=True)
    ]


def bytes_of(folder: Path) -> dict[str, str]:
    """Checksum of every file of a folder."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}
