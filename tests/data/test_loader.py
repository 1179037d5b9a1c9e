"""Reading the users of a batch."""

from pathlib import Path

import numpy as np
import torch

from tests.support.tiny_store import tiny_store
from turbogr.config import SplitConfig
from turbogr.data.batching import Selection, training_pairs
from turbogr.data.loader import Batch, read_batch
from turbogr.data.split import make_split
from turbogr.data.store import Store

ITEMS = [[1, 2], [10, 11, 12, 13, 14, 15], [20, 21, 22]]
TIMES = [[0, 1000], [5000, 5999, 7000, 7000, 9500, 12345], [100, 2100, 3100]]
WHOLE = SplitConfig(protocol="global-time", time=10_000)


def store_in(folder: Path) -> Store:
    return tiny_store(folder / "s", ITEMS, TIMES, time_units_per_second=1000)


def read(store: Store, users: list[int], max_history: int = 50, split: SplitConfig = WHOLE) -> Batch:
    made = make_split(store, split)
    rows = Selection.of(np.array(users), training_pairs(store, made, max_history)[users], first_number=7)
    return read_batch(store, made, rows, max_history)


def test_tokens_are_pairs_of_an_event_and_the_next(tmp_path: Path) -> None:
    """Catches: pairs across two users, the order of the users lost, a target that is the event itself."""
    batch = read(store_in(tmp_path), [2, 1])
    assert batch.items.tolist() == [20, 21, 10, 11, 12, 13]
    assert batch.targets.tolist() == [21, 22, 11, 12, 13, 14]
    assert batch.offsets.tolist() == [0, 2, 6] and batch.lengths == [2, 4] and batch.tokens == 6
    assert batch.users.tolist() == [2, 1]


def test_times_are_whole_seconds_of_the_event_and_of_the_next(tmp_path: Path) -> None:
    """Catches: milliseconds handed to the model, a difference of seconds rounded after the subtraction."""
    batch = read(store_in(tmp_path), [2, 1])
    assert batch.times.tolist() == [0, 2, 5, 5, 7, 7]
    assert batch.next_times.tolist() == [2, 3, 5, 7, 7, 9]
    assert batch.times.dtype == batch.next_times.dtype == batch.items.dtype == torch.int64


def test_the_latest_events_are_kept(tmp_path: Path) -> None:
    """Catches: the oldest events kept, or a cut that is off by one."""
    batch = read(store_in(tmp_path), [1, 2], max_history=3)
    assert batch.items.tolist() == [11, 12, 13, 20, 21] and batch.lengths == [3, 2]


def test_nothing_at_or_after_the_end_of_training_is_read(tmp_path: Path) -> None:
    """Catches: a leak of the test into the training, as an event, a target or a time."""
    store = store_in(tmp_path)
    for split in (SplitConfig(), SplitConfig(protocol="leave-one-out-validation"), WHOLE):
        made = make_split(store, split)
        pairs = training_pairs(store, made, 50)
        users = np.flatnonzero(pairs)
        batch = read_batch(store, made, Selection.of(users, pairs[users]), 50)
        assert batch.lengths == pairs[users].tolist()
        begin = 0
        for user, length in zip(users, batch.lengths, strict=True):
            last = int(made.train_end[user]) - 1
            row = slice(begin, begin + length)
            assert batch.targets[row].tolist() == store.item[last - length + 1 : last + 1].tolist()
            assert batch.items[row].tolist() == store.item[last - length : last].tolist()
            assert int(batch.next_times[row][-1]) == int(store.time[last]) // 1000
            begin += length


def test_users_are_numbered_on_through_the_step(tmp_path: Path) -> None:
    """Catches: micro-batches that all begin at user 0 and so share their draws."""
    assert read(store_in(tmp_path), [1, 2]).numbers.tolist() == [7, 8]


def test_a_batch_moves_as_a_whole(tmp_path: Path) -> None:
    """Catches: a column that stays behind on the host."""
    batch = read(store_in(tmp_path), [1]).to(torch.device("meta"))
    columns = (batch.numbers, batch.offsets, batch.items, batch.targets, batch.times, batch.next_times)
    assert all(column.is_meta for column in columns) and batch.lengths == [4]


def test_the_windows_of_a_user_are_its_pairs_cut_and_nothing_else(tmp_path: Path) -> None:
    """Catches: a window that begins at the user's start, repeats a pair or drops the one at its edge."""
    store = store_in(tmp_path)
    split = make_split(store, WHOLE)
    rows = Selection(np.array([1, 1]), np.array([0, 2]), np.array([2, 2]), np.array([4, 5]))
    cut, whole = read_batch(store, split, rows, 50), read(store, [1])
    for name in ("items", "targets", "times", "next_times"):
        assert torch.equal(getattr(cut, name), getattr(whole, name)[:4])
    assert cut.offsets.tolist() == [0, 2, 4] and cut.numbers.tolist() == [4, 5]
