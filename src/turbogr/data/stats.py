"""What a store holds, in figures: lengths, popularity, time, actions. Read in chunks, so that memory stays flat.

U users, N items, E events; a gap lies between neighbouring events of one user.
"""

from dataclasses import dataclass

import numpy as np

from turbogr.data.store import Store
from turbogr.progress import bar

CHUNK = 1 << 22
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
HEADS = (0.001, 0.01, 0.1)


@dataclass(frozen=True, kw_only=True)
class StoreStats:
    users: int
    items: int
    events: int
    items_without_events: int
    single_event_users: int
    mean_length: float
    length_quantiles: dict[str, int]
    """`p50` -> events per user."""
    head_share: dict[str, float]
    """`top 1%` -> share of all events that falls on that many of the most frequent items (of all N)."""
    tied_gaps: int
    tied_share: float
    """Of all gaps."""
    first_event: str
    """UTC."""
    last_event: str
    action_rates: dict[str, float]
    """Action -> share of the events that have it."""


def stats(store: Store) -> StoreStats:
    """Read every event once."""
    events, manifest = store.num_events, store.manifest
    counts = np.zeros(store.num_items, np.int64)
    bits = np.zeros(len(manifest.actions), np.int64)
    first, last = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    with bar("read", events) as progress:
        for start in range(0, events, CHUNK):
            stop = min(start + CHUNK, events)
            counts += np.bincount(store.item[start:stop], minlength=store.num_items)
            if store.actions is not None:
                chunk = np.asarray(store.actions[start:stop])
                bits += [np.count_nonzero(chunk & (1 << bit)) for bit in range(len(bits))]
            time = store.time[start:stop]
            first, last = min(first, int(time.min())), max(last, int(time.max()))
            progress.update(stop)
    lengths = np.diff(store.offsets)
    return StoreStats(
        users=store.num_users,
        items=store.num_items,
        events=events,
        items_without_events=int(np.count_nonzero(counts == 0)),
        single_event_users=manifest.single_event_users,
        mean_length=events / store.num_users,
        length_quantiles=_quantiles(lengths),
        head_share=_heads(counts),
        tied_gaps=manifest.tied_gaps,
        tied_share=manifest.tied_gaps / max(events - store.num_users, 1),
        first_event=_moment(first, manifest.time_units_per_second),
        last_event=_moment(last, manifest.time_units_per_second),
        action_rates={name: int(count) / events for name, count in zip(manifest.actions, bits, strict=True)},
    )


def _quantiles(lengths: np.ndarray) -> dict[str, int]:
    values = np.quantile(lengths, QUANTILES, method="inverted_cdf")
    return {f"p{100 * q:g}": int(value) for q, value in zip(QUANTILES, values, strict=True)}


def _heads(counts: np.ndarray) -> dict[str, float]:
    ranked = np.cumsum(np.sort(counts)[::-1])
    sizes = [max(1, round(share * len(counts))) for share in HEADS]
    return {f"top {100 * h:g}%": float(ranked[n - 1] / ranked[-1]) for h, n in zip(HEADS, sizes, strict=True)}


def _moment(time: int, units_per_second: int) -> str:
    # numpy's calendar reaches further than datetime's, and a log may hold any number
    return str(np.datetime64(time // units_per_second, "s")).replace("T", " ")
