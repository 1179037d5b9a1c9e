"""The packaged shape table: how long real histories are, how popular items are, how far events lie apart.

Aggregates only, built by tools/make_shape_table.py; each entry names its source and licence.
"""

import json
from functools import cache
from importlib import resources
from typing import Any

import numpy as np

from turbogr.errors import ConfigError, did_you_mean

TABLE = "kuairand_27k_shape.json"


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((resources.files(__package__) / TABLE).read_text())
    return table


def load_shape(name: str = "kuairand-27k") -> dict[str, Any]:
    """Everything the table says of one data set: source, licence, totals, quantiles and, for KuaiRand, much more."""
    if name not in _table():
        raise ConfigError(f"no shape of {name!r} is packaged{did_you_mean(name, _table())}: {', '.join(_table())} are.")
    shape: dict[str, Any] = _table()[name]
    return shape


def quantiles(name: str, what: str) -> np.ndarray:
    """1001 quantiles (0, .001 .. 1) over users: `exposures` or `clicks` of kuairand-27k, `ratings` of ml-1m."""
    known = load_shape(name)["quantiles"]
    if what not in known:
        raise ConfigError(f"{name} has no quantiles of {what!r}{did_you_mean(what, known)}: it has {', '.join(known)}.")
    return np.asarray(known[what], dtype=np.float64)


def popularity_shares(name: str, items: int, power: float = 1.0) -> np.ndarray:
    """Share of all exposures that each of `items` items has, most popular first: the real rank-share curve ** power."""
    curve = load_shape(name)["popularity"]
    at = np.arange(items + 1) / items
    shares = np.diff(np.interp(at, curve["items"], curve["exposures"]))
    # interpolation leaves rounding noise on the plateaus of the curve
    shares = np.minimum.accumulate(np.maximum(shares, 1e-15)) ** power
    return np.asarray(shares / shares.sum())
