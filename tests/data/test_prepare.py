"""`prepare`: order, ties, counts, determinism and the shape of what it writes."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.prepare import write_log
from tests.support.raw_logs import bytes_of, csv_file, events_of, kuairand_folder, kuairand_line
from turbogr.data.columns import write_parquet
from turbogr.data.engine import memory_bytes
from turbogr.data.filters import Filters
from turbogr.data.prepare import PrepareOptions, prepare, prepare_frame
from turbogr.data.sources.kuairand import KuaiRand
from turbogr.data.sources.table import Mapping, Table
from turbogr.data.store import Store
from turbogr.errors import DataError, UserError

COLUMNS = Mapping(user="u", item="i", time="t")
rows_of_few_values = st.lists(
    st.tuples(st.integers(-3, 3), st.integers(-2, 5), st.integers(0, 2)), min_size=8, max_size=60
)


def frame_of(rows: list[tuple[int, int, int]]) -> pa.Table:
    user, item, time = zip(*rows, strict=True)
    return pa.table({"u": user, "i": item, "t": time})


@settings(max_examples=15, deadline=None)
@given(rows=rows_of_few_values)
def test_events_stand_by_user_then_time_then_place_in_the_log(
    rows: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("order") / "store"
    prepare_frame(frame_of(rows), target, user="u", item="i", time="t")
    expected = [rows[place] for place in sorted(range(len(rows)), key=lambda p: (rows[p][0], rows[p][2], p))]
    assert events_of(Store.open(target)) == expected


@settings(max_examples=10, deadline=None)
@given(rows=rows_of_few_values)
def test_the_manifest_counts_users_items_ties_and_single_events(
    rows: list[tuple[int, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    manifest = prepare_frame(frame_of(rows), tmp_path_factory.mktemp("count") / "store", user="u", item="i", time="t")
    histories = [[t for u, _, t in rows if u == user] for user in {u for u, _, _ in rows}]
    assert manifest.users == len(histories)
    assert manifest.items == len({i for _, i, _ in rows})
    assert manifest.events == len(rows)
    assert manifest.single_event_users == sum(len(history) == 1 for history in histories)
    ties = sum(a == b for history in histories for a, b in itertools.pairwise(sorted(history)))
    assert manifest.tied_gaps == ties


def test_ids_are_numbered_in_ascending_order_of_integers_and_of_strings(tmp_path: Path) -> None:
    prepare_frame(
        pa.table({"u": [10, 9, 9], "i": ["b", "B", "a"], "t": [1, 1, 1]}), tmp_path / "s", user="u", item="i", time="t"
    )
    store = Store.open(tmp_path / "s")
    assert store.users["raw_id"].to_pylist() == [9, 10] and store.users["raw_id"].type == pa.int64()
    assert store.items["raw_id"].to_pylist() == ["B", "a", "b"] and store.items["raw_id"].type == pa.string()


@pytest.fixture(scope="module")
def big_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough rows that DuckDB reads and sorts them in several threads; most gaps are ties."""
    folder = tmp_path_factory.mktemp("big")
    for part in (1, 2):
        write_log(folder / f"log_standard_{part}.csv", 150_000 * part)
    return folder


@pytest.mark.parametrize("ties", ["file", "shuffled"])
def test_two_runs_and_any_number_of_threads_give_the_same_bytes(big_log: Path, tmp_path: Path, ties: str) -> None:
    found = []
    for number, threads in enumerate((1, 2, 2)):
        options = PrepareOptions(threads=threads, ties=ties, filters=Filters(user_core=2, item_core=2))  # type: ignore[arg-type]
        manifest = prepare(KuaiRand(big_log), tmp_path / str(number), options)
        found.append(bytes_of(tmp_path / str(number)))
    assert manifest.tied_gaps > manifest.events / 2
    assert found[0] == found[1] == found[2]


def test_tied_events_keep_the_order_of_files_and_rows(big_log: Path, tmp_path: Path) -> None:
    manifest = prepare(KuaiRand(big_log), tmp_path / "s", PrepareOptions(threads=2))
    lines = [line.split(",") for path in sorted(big_log.iterdir()) for line in path.read_text().splitlines()[1:]]
    user, item, time = (np.array([line[column] for line in lines], np.int64) for column in (0, 1, 4))
    order = np.lexsort((np.arange(len(lines)), time, user))
    store = Store.open(tmp_path / "s")
    assert np.array_equal(store.time, time[order])
    assert np.array_equal(np.unique(item)[store.item], item[order])
    # several batches: counts must not lose what crosses their borders
    assert np.array_equal(np.diff(store.offsets), np.unique(user, return_counts=True)[1])
    assert manifest.tied_gaps == np.count_nonzero((np.diff(time[order]) == 0) & (np.diff(user[order]) == 0))


def test_a_parquet_file_does_not_depend_on_the_size_of_the_batches(tmp_path: Path) -> None:
    table = pa.table({"raw_id": range(200_000), "title": [f"film {n}" for n in range(200_000)]})
    for size in (999, 70_000, 200_000):
        write_parquet(tmp_path / str(size), iter(table.to_batches(max_chunksize=size)), table.schema)
    assert len(set(bytes_of(tmp_path).values())) == 1


def test_a_small_memory_limit_spills_to_disk_and_gives_the_same_store(big_log: Path, tmp_path: Path) -> None:
    for limit in ("1GiB", "60MiB"):
        prepare(KuaiRand(big_log), tmp_path / limit, PrepareOptions(threads=2, memory_limit=limit))
    assert bytes_of(tmp_path / "1GiB") == bytes_of(tmp_path / "60MiB")


def test_a_memory_limit_that_is_too_small_names_the_knob(big_log: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="raise --memory"):
        prepare(KuaiRand(big_log), tmp_path / "s", PrepareOptions(threads=2, memory_limit="2MiB"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "expected"), [("1GiB", 1 << 30), ("1.5 GB", 1_500_000_000), ("64KiB", 1 << 16)])
def test_sizes_of_memory_are_understood(text: str, expected: int) -> None:
    assert memory_bytes(text) == expected


def test_a_memory_limit_that_is_no_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'much' is no amount of memory: write it like 1GiB"):
        prepare(KuaiRand(tmp_path), tmp_path / "s", PrepareOptions(memory_limit="much"))
    assert not list(tmp_path.iterdir())


class TestShuffledTies:
    rows = [(u, i, i // 8) for u in range(4) for i in range(24)]

    def store(self, folder: Path, **options: object) -> list[tuple[int, int, int]]:
        target = folder / "-".join(map(str, options.values()))
        prepare_frame(frame_of(self.rows), target, user="u", item="i", time="t", options=PrepareOptions(**options))  # type: ignore[arg-type]
        return events_of(Store.open(target))

    def test_move_only_among_equal_user_and_time(self, tmp_path: Path) -> None:
        shuffled = self.store(tmp_path, ties="shuffled", seed=1)
        assert shuffled != self.rows
        assert [(u, t) for u, _, t in shuffled] == [(u, t) for u, _, t in self.rows]
        assert sorted(shuffled) == sorted(self.rows)

    def test_follow_the_seed(self, tmp_path: Path) -> None:
        one = self.store(tmp_path, ties="shuffled", seed=1)
        assert one != self.store(tmp_path, ties="shuffled", seed=2)
        assert one == self.store(tmp_path, ties="shuffled", seed=1, threads=1)

    def test_are_not_the_same_permutation_for_every_user(self, tmp_path: Path) -> None:
        shuffled = self.store(tmp_path, ties="shuffled", seed=1)
        assert len({tuple(i for u, i, _ in shuffled if u == user) for user in range(4)}) == 4


def test_actions_become_bits_in_the_order_of_the_manifest(tmp_path: Path) -> None:
    lines = [
        kuairand_line(1, 1, 1, "click", "long_view"),
        kuairand_line(1, 2, 2, "profile_enter"),
        kuairand_line(1, 3, 3),
    ]
    manifest = prepare(KuaiRand(kuairand_folder(tmp_path / "raw", lines)), tmp_path / "s")
    actions = Store.open(tmp_path / "s").actions
    assert manifest.actions == ("click", "like", "follow", "comment", "forward", "hate", "long_view", "profile_enter")
    assert actions is not None and actions.tolist() == [1 | 64, 128, 0]


def test_more_actions_than_bits_are_refused(tmp_path: Path) -> None:
    names = tuple(f"a{n}" for n in range(17))
    frame = pa.table({"u": [1, 1], "i": [1, 1], "t": [1, 1]} | {n: [0, 1] for n in names})
    with pytest.raises(DataError, match="17 actions, and a store holds 16"):
        prepare_frame(frame, tmp_path / "s", user="u", item="i", time="t", actions=names)


def test_an_existing_target_is_kept_unless_overwrite_is_said(tmp_path: Path) -> None:
    path = csv_file(tmp_path / "log.csv", "u,i,t", [(1, 1, 1), (1, 2, 2)])
    prepare(Table(path, COLUMNS), tmp_path / "s")
    before = bytes_of(tmp_path / "s")
    csv_file(path, "u,i,t", [(1, 1, 1), (1, 2, 3)])
    with pytest.raises(UserError, match="--overwrite"):
        prepare(Table(path, COLUMNS), tmp_path / "s")
    assert bytes_of(tmp_path / "s") == before
    prepare(Table(path, COLUMNS), tmp_path / "s", PrepareOptions(overwrite=True))
    assert bytes_of(tmp_path / "s") != before


def test_a_failed_overwrite_leaves_the_old_store(tmp_path: Path) -> None:
    path = csv_file(tmp_path / "log.csv", "u,i,t", [(1, 1, 1), (1, 2, 2)])
    prepare(Table(path, COLUMNS), tmp_path / "s")
    csv_file(path, "u,i,t", [])
    with pytest.raises(DataError, match="empty log"):
        prepare(Table(path, COLUMNS), tmp_path / "s", PrepareOptions(overwrite=True))
    Store.open(tmp_path / "s").verify()


def test_a_log_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"log\.csv: an empty log"):
        prepare(Table(csv_file(tmp_path / "log.csv", "u,i,t", []), COLUMNS), tmp_path / "s")


def test_a_log_in_which_no_user_has_two_events_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no user has two events \(3 users, 3 events\)"):
        prepare_frame(frame_of([(1, 1, 1), (2, 1, 1), (3, 1, 1)]), tmp_path / "s", user="u", item="i", time="t")


def test_the_same_log_from_another_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    lines = [kuairand_line(u, u + k, k) for u in range(3) for k in range(3)] + [kuairand_line("x", 1, 1)]
    for place in ("here", "there"):
        source = KuaiRand(kuairand_folder(tmp_path / place, lines))
        prepare(source, tmp_path / f"store-{place}", PrepareOptions(skip_bad_rows=True))
    assert bytes_of(tmp_path / "store-here") == bytes_of(tmp_path / "store-there")
