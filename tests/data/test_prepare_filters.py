"""What the filters leave: named presets, single conditions, the iterative k-core against its definition."""

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.raw_logs import csv_file, events_of, kuairand_folder, kuairand_line
from turbogr.data.filters import Filters, named_filters
from turbogr.data.kcore import PairFiles
from turbogr.data.prepare import PrepareOptions, prepare, prepare_frame
from turbogr.data.sources.kuairand import KuaiRand
from turbogr.data.sources.movielens import MovieLens
from turbogr.data.store import Manifest, Store
from turbogr.errors import DataError, UserError

pairs = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=60)


def core_by_definition(pairs: list[tuple[int, int]], user_core: int, item_core: int) -> list[tuple[int, int]]:
    while True:
        users, items = Counter(u for u, _ in pairs), Counter(i for _, i in pairs)
        kept = [(u, i) for u, i in pairs if users[u] >= user_core and items[i] >= item_core]
        if kept == pairs:
            return kept
        pairs = kept


@settings(max_examples=100, deadline=None)
@given(pairs=pairs, user_core=st.integers(0, 4), item_core=st.integers(0, 4), chunk=st.integers(1, 7))
def test_the_core_is_what_its_definition_leaves(
    pairs: list[tuple[int, int]], user_core: int, item_core: int, chunk: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    files = PairFiles(tmp_path_factory.mktemp("pairs"))
    user, item = np.array(pairs, np.int32).T
    files.append(user, item)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("turbogr.data.kcore.CHUNK", chunk)
        alive_user, alive_item = files.core(6, 6, user_core, item_core)
    left = core_by_definition(pairs, user_core, item_core)
    assert set(np.flatnonzero(alive_user)) == {u for u, _ in left}
    assert set(np.flatnonzero(alive_item)) == {i for _, i in left}


@settings(max_examples=15, deadline=None)
@given(pairs=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), min_size=20, max_size=80))
def test_prepare_keeps_exactly_the_core_and_numbers_it_anew(
    pairs: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    target = tmp_path_factory.mktemp("core") / "store"
    left = core_by_definition(pairs, 3, 2)
    frame = pa.table({"u": [u for u, _ in pairs], "i": [i for _, i in pairs], "t": range(len(pairs))})
    options = PrepareOptions(filters=Filters(user_core=3, item_core=2))
    if not left:
        with pytest.raises(DataError, match="the filters leave none"):
            prepare_frame(frame, target, user="u", item="i", time="t", options=options)
        return
    manifest = prepare_frame(frame, target, user="u", item="i", time="t", options=options)
    store = Store.open(target)
    assert sorted((u, i) for u, i, _ in events_of(store)) == sorted(left)
    assert store.items["raw_id"].to_pylist() == sorted({i for _, i in left})
    assert manifest.filters["removed_events"] == len(pairs) - len(left)


class TestConditions:
    lines = [
        kuairand_line(1, 1, 1, "click"),
        kuairand_line(1, 2, 2, "hate", "click"),
        kuairand_line(1, 3, 3),
        kuairand_line(2, 1, 1),
        kuairand_line(2, 2, 2),
        kuairand_line(3, 1, 1, "hate", "like"),
        kuairand_line(3, 2, 2),
        kuairand_line(4, 1, 1, "long_view"),
        kuairand_line(4, 1, 2, "click"),
    ]

    def kept(self, folder: Path, filters: Filters) -> list[tuple[int, int]]:
        source = KuaiRand(kuairand_folder(folder / "raw", self.lines))
        prepare(source, folder / "s", PrepareOptions(filters=filters))
        return [(u, t) for u, _, t in events_of(Store.open(folder / "s"))]

    def test_positive_keeps_only_events_with_the_action(self, tmp_path: Path) -> None:
        lines = self.lines + [kuairand_line(4, 9, 9, "click")]
        source = KuaiRand(kuairand_folder(tmp_path / "raw", lines))
        prepare(source, tmp_path / "s", PrepareOptions(filters=Filters(positive=("click",))))
        assert [(u, t) for u, _, t in events_of(Store.open(tmp_path / "s"))] == [(1, 1), (1, 2), (4, 2), (4, 9)]

    def test_drop_removes_events_with_the_action(self, tmp_path: Path) -> None:
        assert self.kept(tmp_path, Filters(drop=("hate",))) == [(1, 1), (1, 3), (2, 1), (2, 2), (3, 2), (4, 1), (4, 2)]

    def test_users_with_looks_at_events_that_were_not_dropped(self, tmp_path: Path) -> None:
        found = self.kept(tmp_path, Filters(drop=("hate",), users_with=("click", "like", "long_view")))
        assert found == [(1, 1), (1, 3), (4, 1), (4, 2)]

    def test_the_papers_filter_ends_in_a_5_core(self, tmp_path: Path) -> None:
        lines = [kuairand_line(u, v, v, "click") for u in range(6) for v in range(5)]
        lines += [kuairand_line(7, v, v) for v in range(5)]  # without a positive action
        lines += [kuairand_line(8, v, v, "click") for v in range(4)]  # too short
        lines += [kuairand_line(0, 5, 9, "click", "hate")]
        source = KuaiRand(kuairand_folder(tmp_path / "raw", lines))
        prepare(source, tmp_path / "s", PrepareOptions(filters=named_filters("kuairand-paper")))
        assert [(u, i) for u, i, _ in events_of(Store.open(tmp_path / "s"))] == [
            (u, v) for u in range(6) for v in range(5)
        ]

    def test_an_unknown_action_names_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"no action 'clik' \(did you mean 'click'\?\)"):
            self.kept(tmp_path, Filters(positive=("clik",)))

    def test_a_rating_filter_without_ratings_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="min_rating needs a source with ratings"):
            self.kept(tmp_path, Filters(min_rating=4))


def test_an_unknown_filter_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'kuairand-paper'"):
        named_filters("kuairand_paper")


class TestCatalogue:
    def prepared(self, folder: Path, filters: Filters) -> Manifest:
        (folder / "raw").mkdir()
        csv_file(
            folder / "raw" / "ratings.csv",
            "userId,movieId,rating,timestamp",
            [(1, 1, 5, 1), (1, 2, 3.5, 2), (1, 3, 4, 3)],
        )
        csv_file(
            folder / "raw" / "movies.csv", "movieId,title,genres", [(n, f"Film {n}", "Drama") for n in (1, 2, 3, 4)]
        )
        return prepare(MovieLens(folder / "raw"), folder / "s", PrepareOptions(filters=filters))

    def test_keeps_films_that_a_rating_filter_leaves_without_events(self, tmp_path: Path) -> None:
        manifest = self.prepared(tmp_path, Filters(min_rating=4))
        assert (manifest.events, manifest.items) == (2, 4)

    def test_shrinks_to_the_core_of_items(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="the filters leave none"):
            self.prepared(tmp_path, Filters(item_core=2))

    def test_is_kept_by_a_core_of_users_alone(self, tmp_path: Path) -> None:
        assert self.prepared(tmp_path, Filters(user_core=3)).items == 4
