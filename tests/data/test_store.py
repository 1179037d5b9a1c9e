"""Reading a store: what it answers, and what it says when it is damaged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from turbogr.data.prepare import prepare_frame
from turbogr.data.store import COLUMNS, Store
from turbogr.errors import DataError, UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    frame = pa.table(
        {"u": ["a", "b", "a"], "i": [30, 10, 20], "t": [1500, 7, 2999], "buy": [1, 0, 0], "name": ["X", None, "Y"]}
    )
    prepare_frame(frame, tmp_path / "s", user="u", item="i", time="t", time_unit="ms", actions=("buy",), title="name")
    return tmp_path / "s"


def change_manifest(folder: Path, **values: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_columns_are_memory_mapped_in_their_stated_types(folder: Path) -> None:
    store = Store.open(folder)
    for name in COLUMNS:
        column = getattr(store, name.removesuffix(".npy"))
        assert isinstance(column, np.memmap) and column.dtype == COLUMNS[name]
    assert store.offsets.tolist() == [0, 2, 3]
    assert (store.num_users, store.num_items, store.num_events) == (2, 3, 3)


def test_seconds_are_whole_and_rounded_down(folder: Path) -> None:
    assert Store.open(folder).seconds(0, 3).tolist() == [1, 2, 0]


def test_raw_ids_and_titles_go_there_and_back(folder: Path) -> None:
    store = Store.open(folder)
    assert store.raw_users(store.user_indices(["b", "a"])) == ["b", "a"]
    assert store.raw_items(store.item_indices([30, 10])) == [30, 10]
    assert store.titles([0, 1, 2]) == [None, "Y", "X"]


def test_an_unknown_id_is_said(folder: Path) -> None:
    with pytest.raises(DataError, match=r"unknown item 99: .*\(1 of 2 unknown\)"):
        Store.open(folder).item_indices([10, 99])
    with pytest.raises(DataError, match="unknown user 'zoe'"):
        Store.open(folder).user_indices(["zoe"])


def test_a_word_where_ids_are_integers_is_said(folder: Path) -> None:
    with pytest.raises(DataError, match="item ids of .* are integers"):
        Store.open(folder).item_indices(["ten"])


def test_a_folder_without_manifest_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a store \(no manifest\.json\): make one with `turbogr data prepare`"):
        Store.open(tmp_path)


@pytest.mark.parametrize("name", sorted([*COLUMNS, "users.parquet", "items.parquet"]))
def test_a_truncated_file_is_named(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(
        DataError, match=f"{name} has {len(data) - 1} bytes instead of {len(data)}: the store is truncated"
    ):
        Store.open(folder)


@pytest.mark.parametrize("name", sorted([*COLUMNS, "users.parquet", "items.parquet"]))
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing: the store is truncated"):
        Store.open(folder)


def test_a_changed_byte_is_found_by_verify(folder: Path) -> None:
    data = bytearray((folder / "item.npy").read_bytes())
    data[-1] ^= 1
    (folder / "item.npy").write_bytes(data)
    with pytest.raises(DataError, match=r"item\.npy does not match its checksum"):
        Store.open(folder).verify()


def test_an_untouched_store_verifies(folder: Path) -> None:
    Store.open(folder).verify()


def test_another_version_is_refused_in_one_sentence(folder: Path) -> None:
    change_manifest(folder, version=2)
    with pytest.raises(DataError, match="has store format version 2, this turbogr reads version 1"):
        Store.open(folder)


def test_another_kind_of_json_is_refused(folder: Path) -> None:
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(DataError, match="does not describe a turbogr store"):
        Store.open(folder)


def test_a_damaged_manifest_is_said(folder: Path) -> None:
    change_manifest(folder, colour="red")
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        Store.open(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        Store.open(folder)


def test_columns_that_contradict_the_manifest_are_refused(folder: Path) -> None:
    change_manifest(folder, events=4)
    with pytest.raises(DataError, match=r"item\.npy holds int32\[3\] where the manifest says int32\[4\]"):
        Store.open(folder)


@pytest.mark.parametrize(
    "values",
    [{"users": "x"}, {"items": 1.5}, {"events": -1}, {"files": []}, {"files": {"item.npy": 3}}, {"actions": 7}]
    + [{"actions": [1]}, {"time_units_per_second": 0}],
)
def test_a_manifest_with_values_of_the_wrong_kind_is_damaged(folder: Path, values: dict[str, Any]) -> None:
    change_manifest(folder, **values)
    with pytest.raises(DataError, match=r"manifest\.json is damaged .*: prepare the store again"):
        Store.open(folder)


@pytest.mark.parametrize("what", ["users", "items"])
def test_a_damaged_table_of_ids_is_named(folder: Path, what: str) -> None:
    path = folder / f"{what}.parquet"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DataError, match=rf"{what}\.parquet cannot be read \(.*\): prepare the store again"):
        getattr(Store.open(folder), what)


def test_a_table_of_ids_of_another_store_is_named(folder: Path) -> None:
    pq.write_table(pa.table({"raw_id": [1]}), folder / "items.parquet")
    change_manifest(folder, files={})
    with pytest.raises(DataError, match=r"items\.parquet does not hold 3 rows with a column raw_id"):
        _ = Store.open(folder).items
