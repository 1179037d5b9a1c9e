"""Raw logs that `prepare` can read. A source says where rows come from; `prepare` does the rest.

A package plugs in its own with the entry point group `turbogr.sources`: name -> a class or function that is called with
the path and the source's options and answers a `Source`.
"""

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from turbogr.data.sources.reading import Log, Source
from turbogr.errors import UserError, did_you_mean

__all__ = ["SOURCES", "Log", "Source", "open_source"]

SOURCES = {
    "movielens": "turbogr.data.sources.movielens:MovieLens",
    "kuairand": "turbogr.data.sources.kuairand:KuaiRand",
    "amazon": "turbogr.data.sources.amazon:Amazon",
    "table": "turbogr.data.sources.table:Table",
}


def open_source(name: str, path: Path, **options: Any) -> Source:
    """The named source on a file or folder."""
    made: Source = _maker(name)(Path(path), **options)
    return made


def _maker(name: str) -> Callable[..., Source]:
    plugins = {entry.name: entry for entry in entry_points(group="turbogr.sources")}
    if name in SOURCES:
        module, attribute = SOURCES[name].split(":")
        maker: Callable[..., Source] = getattr(importlib.import_module(module), attribute)
        return maker
    if name in plugins:
        maker = plugins[name].load()
        return maker
    known = [*SOURCES, *plugins]
    raise UserError(f"unknown source {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}.")
