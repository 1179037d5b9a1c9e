"""Which events train and which are predicted: the named protocols as arrays over a store.

Within a user the store's order is the only clock: a target's history is the user's events before it in store order, and
training stops before the first target. Memory grows with users, never with events.

Legend: U users, E events, n targets. An event is named by its absolute index 0 .. E-1 in the store's columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from turbogr.config import SplitConfig
from turbogr.data.store import Store
from turbogr.errors import ConfigError, DataError

Which = Literal["test", "validation"]
CHUNK_EVENTS = 1 << 22


@dataclass(frozen=True)
class Targets:
    """Events to predict, users ascending; the history of target i is events offsets[user[i]] .. event[i]."""

    user: np.ndarray
    """int64 [n]"""
    event: np.ndarray
    """int64 [n]"""

    def __len__(self) -> int:
        return len(self.user)

    def take(self, rows: np.ndarray) -> "Targets":
        return Targets(self.user[rows], self.event[rows])


@dataclass(frozen=True)
class Split:
    config: SplitConfig
    train_end: np.ndarray
    """int64 [U]: user u trains on events offsets[u] .. train_end[u] (exclusive)."""
    test: Targets
    validation: Targets | None
    skipped: dict[Which, dict[str, int]] = field(default_factory=dict)
    """Why users have no target: reason -> number of users."""

    @property
    def protocol(self) -> str:
        return self.config.protocol

    def targets(self, which: Which) -> Targets:
        found = self.test if which == "test" else self.validation
        if found is None:
            raise ConfigError(
                f"split.protocol {self.protocol} has no validation targets: take leave-one-out-validation, "
                "or give split.validation_time to global-time."
            )
        return found


def make_split(store: Store, config: SplitConfig) -> Split:
    """The training region and the targets of every user under `config.protocol`.

    leave-one-out             test = last event; users with one event give no target and no training.
    leave-one-out-validation  test = last, validation = last but one, neither is trained on. A user with two events has
                              a test target and no validation target, for that one would have no history.
    global-time               test = first event at or after `time` of a user who has an earlier one; validation = first
                              event in [validation_time, time) of a user who has one before validation_time.
    """
    split = _global_time(store, config) if config.protocol == "global-time" else _leave_one_out(store, config)
    for which in ("test", "validation"):
        if getattr(split, which) is not None and len(split.targets(which)) == 0:
            raise DataError(_nothing_to_predict(store, config, which))
    return split


def ties_at_target(store: Store, targets: Targets) -> int:
    """Targets whose previous event has the same time, so that only the store's order tells which came first."""
    return int(np.count_nonzero(store.time[targets.event] == store.time[targets.event - 1]))


def training_chunks(store: Store, split: Split, chunk: int = CHUNK_EVENTS) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yields (start, stop, ends): the store's events in order; `ends` int64 [stop-start], their user's train_end."""
    for start in range(0, store.num_events, chunk):
        stop = min(start + chunk, store.num_events)
        first = int(np.searchsorted(store.offsets, start, side="right")) - 1
        last = int(np.searchsorted(store.offsets, stop, side="left"))
        lengths = np.diff(np.clip(store.offsets[first : last + 1], start, stop))
        yield start, stop, np.repeat(split.train_end[first:last], lengths)


def training_counts(store: Store, split: Split) -> np.ndarray:
    """int64 [N]: how often each item stands in the training region."""
    counts = np.zeros(store.num_items, np.int64)
    for start, stop, ends in training_chunks(store, split):
        trained = np.arange(start, stop) < ends
        items = store.item[start:stop]
        _require_items(store, items)
        counts += np.bincount(items[trained], minlength=store.num_items)
    return counts


def _require_items(store: Store, items: np.ndarray) -> None:
    for item in (items.min(), items.max()):
        if not 0 <= item < store.num_items:
            raise DataError(
                f"{store.path / 'item.npy'} holds item {item} of {store.num_items} items: prepare the store again."
            )


def ensure_not_trained_past(trained: SplitConfig, wanted: SplitConfig, which: Which = "test") -> None:
    """Refuse to evaluate a model trained under `trained` on targets of `wanted` that it may have seen.

    Both leave-one-out protocols share their test items, so either may train and the other test; the validation item of
    leave-one-out-validation was trained on under plain leave-one-out. By time, everything before `trained.time` was
    trained on, or selected on where there is a validation; per-user protocols reach to the end of the log.
    """
    if wanted.protocol != "global-time":
        if trained.protocol == "global-time":
            raise ConfigError(
                f"the model was trained on every event before time {trained.time}, among them the last events that "
                f"split.protocol {wanted.protocol} predicts: evaluate it with split.protocol global-time."
            )
        if which == "validation" and trained.protocol == "leave-one-out":
            raise ConfigError(
                "the model was trained under split.protocol leave-one-out, on the very items that are the validation "
                f"of {wanted.protocol}: evaluate it on the test, or train it under leave-one-out-validation."
            )
        return
    if trained.protocol != "global-time":
        raise ConfigError(
            f"the model was trained under split.protocol {trained.protocol}, past the global split at time "
            f"{wanted.time}: train it under split.protocol global-time, or evaluate it under its own."
        )
    assert trained.time is not None and wanted.time is not None, "config.check wants a time"
    begin = wanted.time if which == "test" else wanted.validation_time
    reach = trained.time if which == "test" or trained.validation_time is None else trained.validation_time
    if begin is not None and reach > begin:
        raise ConfigError(
            f"the model was trained or selected on events up to time {reach}, past the {which} that begins at {begin}: "
            f"evaluate it from {reach} on, or train it on less."
        )


def _leave_one_out(store: Store, config: SplitConfig) -> Split:
    starts, stops = np.asarray(store.offsets[:-1]), np.asarray(store.offsets[1:])
    lengths = stops - starts
    test = _where(lengths >= 2, stops - 1)
    skipped: dict[Which, dict[str, int]] = {"test": {"fewer than two events": int(np.count_nonzero(lengths < 2))}}
    if config.protocol == "leave-one-out":
        return Split(config, np.maximum(starts, stops - 1), test, None, skipped)
    validation = _where(lengths >= 3, stops - 2)
    skipped["validation"] = {**skipped["test"], "two events": int(np.count_nonzero(lengths == 2))}
    train_end = np.where(lengths >= 3, stops - 2, np.maximum(starts, stops - 1))
    return Split(config, train_end, test, validation, skipped)


def _global_time(store: Store, config: SplitConfig) -> Split:
    assert config.time is not None, "config.check wants a time"
    starts, stops = np.asarray(store.offsets[:-1]), np.asarray(store.offsets[1:])
    test_begin = _first_at_or_after(store, config.time)
    skipped: dict[Which, dict[str, int]] = {"test": _reasons(starts, test_begin, stops, "the test time")}
    test = _where((starts < test_begin) & (test_begin < stops), test_begin)
    if config.validation_time is None:
        return Split(config, test_begin, test, None, skipped)
    validation_begin = _first_at_or_after(store, config.validation_time)
    validation = _where((starts < validation_begin) & (validation_begin < test_begin), validation_begin)
    skipped["validation"] = _reasons(starts, validation_begin, test_begin, "the validation time")
    return Split(config, validation_begin, test, validation, skipped)


def _reasons(starts: np.ndarray, begin: np.ndarray, stops: np.ndarray, moment: str) -> dict[str, int]:
    return {
        f"no event before {moment}": int(np.count_nonzero(begin == starts)),
        f"no event in the period from {moment} on": int(np.count_nonzero((begin > starts) & (begin == stops))),
    }


def _where(chosen: np.ndarray, event: np.ndarray) -> Targets:
    user = np.flatnonzero(chosen)
    return Targets(user, event[user].astype(np.int64))


def _first_at_or_after(store: Store, moment: int, chunk: int = CHUNK_EVENTS) -> np.ndarray:
    """int64 [U]: each user's first event with time >= moment, or the user's end; times ascend within a user."""
    offsets = np.asarray(store.offsets)
    earlier = np.zeros(len(offsets), np.int64)  # events before offsets[u], of any user, that are earlier than `moment`
    counted = 0
    for start in range(0, store.num_events, chunk):
        stop = min(start + chunk, store.num_events)
        running = np.concatenate(([0], np.cumsum(store.time[start:stop] < moment)))
        first, last = np.searchsorted(offsets, (start, stop), side="right")
        earlier[first:last] = counted + running[offsets[first:last] - start]
        counted += int(running[-1])
    return offsets[:-1] + np.diff(earlier)


def _nothing_to_predict(store: Store, config: SplitConfig, which: Which) -> str:
    if config.protocol != "global-time":
        needed = "two" if which == "test" else "three"
        return (
            f"no user of {store.path} has {needed} events, so split.protocol {config.protocol} has no {which} target."
        )
    if store.num_events == 0:
        return f"{store.path} has no event, so there is nothing to split by time."
    begins = int(store.time[store.offsets[:-1].clip(max=store.num_events - 1)].min())
    ends = int(store.time[store.offsets[1:] - 1].max())
    return (
        f"no user of {store.path} has an event before and one after the {which} time: its times run from {begins} to "
        f"{ends}, {store.manifest.time_units_per_second} to a second."
    )
