"""The sources on real data, where TURBOGR_DATA names a folder that has it."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from turbogr.data.filters import named_filters
from turbogr.data.prepare import PrepareOptions, prepare
from turbogr.data.sources.kuairand import KuaiRand
from turbogr.data.sources.movielens import MovieLens
from turbogr.data.store import Store

DATA = Path(os.environ.get("TURBOGR_DATA", "no data"))


@pytest.fixture
def kuairand() -> Path:
    return present(DATA / "kuairand-pure-subset")


@pytest.fixture
def movielens() -> Path:
    return present(DATA / "movielens-1m")


def present(folder: Path) -> Path:
    if not folder.exists():
        pytest.skip(f"{folder.name} is not in TURBOGR_DATA")
    return folder


def test_the_kuairand_subset_has_the_counts_of_its_source_file(kuairand: Path, tmp_path: Path) -> None:
    manifest = prepare(KuaiRand(kuairand), tmp_path / "s")
    assert (manifest.events, manifest.users, manifest.items) == (228_329, 25_156, 6_361)
    assert manifest.rejected_rows == 0


def test_the_kuairand_subset_has_the_published_action_combinations(kuairand: Path, tmp_path: Path) -> None:
    prepare(KuaiRand(kuairand), tmp_path / "s")
    actions = Store.open(tmp_path / "s").actions
    assert actions is not None
    masks, counts = np.unique(actions, return_counts=True)
    with (kuairand / "action_mask_histogram.csv").open() as stream:
        published = {int(row["action_mask"]): int(row["count"]) for row in csv.DictReader(stream)}
    assert dict(zip(masks.tolist(), counts.tolist(), strict=True)) == published


def test_the_papers_filter_leaves_a_5_core_without_dislikes(kuairand: Path, tmp_path: Path) -> None:
    options = PrepareOptions(filters=named_filters("kuairand-paper"))
    prepare(KuaiRand(kuairand), tmp_path / "s", options)
    store = Store.open(tmp_path / "s")
    assert store.actions is not None and not (store.actions & 32).any()
    assert np.diff(store.offsets).min() >= 5 and np.bincount(store.item).min() >= 5


def test_movielens_1m_has_its_published_counts(movielens: Path, tmp_path: Path) -> None:
    manifest = prepare(MovieLens(movielens), tmp_path / "s")
    store = Store.open(tmp_path / "s")
    assert (manifest.events, manifest.users, manifest.items) == (1_000_209, 6_040, 3_883)
    assert len(np.unique(store.item)) == 3_706
    assert manifest.tied_gaps > manifest.events / 2
    assert store.titles(store.item_indices([1])) == ["Toy Story (1995)"]
    assert {"gender", "age", "occupation", "zip_code"} <= set(store.users.column_names)
