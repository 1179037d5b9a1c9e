"""Every source on small files of its format: what is read, and what is said when the files are wrong."""

import datetime
import gzip
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from tests.support.raw_logs import KUAIRAND_COLUMNS, csv_file, events_of, kuairand_folder, kuairand_line
from turbogr.data.prepare import PrepareOptions, prepare, prepare_frame
from turbogr.data.sources import Source, open_source
from turbogr.data.sources.amazon import Amazon
from turbogr.data.sources.kuairand import KuaiRand
from turbogr.data.sources.movielens import MovieLens
from turbogr.data.sources.table import Mapping, Table
from turbogr.data.store import Store
from turbogr.errors import DataError, UserError

COLUMNS = Mapping(user="u", item="i", time="t")
RATINGS = [(7, 30, 5, 2), (7, 10, 3, 1), (8, 10, 4, 5)]
EVENTS = [(7, 10, 1), (7, 30, 2), (8, 10, 5)]


def read(source: Source, folder: Path) -> Store:
    prepare(source, folder / "store")
    return Store.open(folder / "store")


def movielens_1m(folder: Path) -> Path:
    folder.mkdir()
    (folder / "ratings.dat").write_text("".join("::".join(map(str, row)) + "\n" for row in RATINGS))
    films = '10::Misérables, Les "(1995)"::Drama|Musical\n20::Unrated (2000)::Comedy\n30::Heat (1995)::Action\n'
    (folder / "movies.dat").write_bytes(films.encode("latin-1"))
    (folder / "users.dat").write_text("7::F::1::10::48067\n8::M::25::3::00123\n9::M::25::3::1\n")
    return folder


class TestMovieLens:
    def test_reads_dat_files_with_all_films_and_the_raters_features(self, tmp_path: Path) -> None:
        store = read(MovieLens(movielens_1m(tmp_path / "ml-1m")), tmp_path)
        assert events_of(store) == EVENTS
        assert store.items.to_pylist()[:2] == [
            {"raw_id": 10, "title": 'Misérables, Les "(1995)"', "genres": "Drama|Musical"},
            {"raw_id": 20, "title": "Unrated (2000)", "genres": "Comedy"},
        ]
        assert [row["zip_code"] for row in store.users.to_pylist()] == ["48067", "00123"]

    def test_reads_csv_files(self, tmp_path: Path) -> None:
        csv_file(tmp_path / "ratings.csv", "userId,movieId,rating,timestamp", RATINGS)
        csv_file(
            tmp_path / "movies.csv", "movieId,title,genres", [(10, '"Film, The"', "A"), (20, "B", "C"), (30, "D", "E")]
        )
        store = read(MovieLens(tmp_path), tmp_path)
        assert events_of(store) == EVENTS
        assert store.titles([0, 1]) == ["Film, The", "B"]

    def test_reads_a_zip_archive_and_a_folder_that_holds_one(self, tmp_path: Path) -> None:
        folder = movielens_1m(tmp_path / "ml-1m")
        archive = tmp_path / "data" / "ml-1m.zip"
        archive.parent.mkdir()
        with zipfile.ZipFile(archive, "w") as made:
            for path in folder.iterdir():
                made.write(path, f"ml-1m/{path.name}")
        for place in (archive, archive.parent):
            target = tmp_path / f"s-{place.name}"
            prepare(MovieLens(place), target)
            assert events_of(Store.open(target)) == EVENTS

    def test_a_truncated_archive_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "ml.zip").write_bytes(b"PK\x03\x04 and no more")
        with pytest.raises(DataError, match=r"ml\.zip is neither a folder nor a whole zip archive"):
            read(MovieLens(tmp_path / "ml.zip"), tmp_path)

    def test_a_folder_without_ratings_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"holds neither ratings\.dat nor ratings\.csv"):
            read(MovieLens(tmp_path), tmp_path)

    def test_a_rated_film_that_the_films_file_lacks_stays(self, tmp_path: Path) -> None:
        csv_file(tmp_path / "ratings.csv", "userId,movieId,rating,timestamp", RATINGS)
        csv_file(tmp_path / "movies.csv", "movieId,title,genres", [(10, "A", "B")])
        store = read(MovieLens(tmp_path), tmp_path)
        assert store.items["raw_id"].to_pylist() == [10, 30] and store.titles([1]) == [None]

    def test_two_rows_of_features_for_one_film_are_refused(self, tmp_path: Path) -> None:
        csv_file(tmp_path / "ratings.csv", "userId,movieId,rating,timestamp", RATINGS)
        csv_file(tmp_path / "movies.csv", "movieId,title,genres", [(10, "A", "B"), (10, "C", "D")])
        with pytest.raises(DataError, match="the item features have more than one row for 10"):
            read(MovieLens(tmp_path), tmp_path)


class TestKuaiRand:
    def test_reads_all_standard_logs_by_date_and_no_other(self, tmp_path: Path) -> None:
        folder = kuairand_folder(tmp_path / "raw", *([kuairand_line(1, video, 5)] for video in (3, 1, 2)))
        (folder / "log_random_4_22_to_5_08.csv").write_text("not,read\n")
        assert [i for _, i, _ in events_of(read(KuaiRand(folder), tmp_path))] == [3, 1, 2]

    def test_the_date_order_is_numeric(self, tmp_path: Path) -> None:
        lines = [",".join(KUAIRAND_COLUMNS), ""]
        for day, video in ((10, 2), (9, 1)):
            (tmp_path / f"log_standard_4_{day}.csv").write_text("\n".join(lines) + kuairand_line(1, video, 5) + "\n")
        assert [i for _, i, _ in events_of(read(KuaiRand(tmp_path), tmp_path))] == [1, 2]

    def test_reads_compressed_logs_and_times_in_milliseconds(self, tmp_path: Path) -> None:
        text = "\n".join([",".join(KUAIRAND_COLUMNS), kuairand_line(1, 1, 1999), kuairand_line(1, 2, 2000)]) + "\n"
        (tmp_path / "log_standard_1.csv.gz").write_bytes(gzip.compress(text.encode()))
        assert read(KuaiRand(tmp_path), tmp_path).seconds(0, 2).tolist() == [1, 2]

    def test_keeps_features_of_users_and_videos_in_the_log(self, tmp_path: Path) -> None:
        folder = kuairand_folder(tmp_path / "raw", [kuairand_line(1, 5, 1), kuairand_line(1, 6, 2)])
        csv_file(folder / "user_features_27k.csv", "user_id,user_active_degree", [(0, "low"), (1, "full_active")])
        csv_file(folder / "video_features_basic_27k_part1.csv", "video_id,author_id", [(4, 40), (5, 50)])
        csv_file(folder / "video_features_basic_27k_part2.csv", "video_id,author_id", [(6, 60)])
        store = read(KuaiRand(folder), tmp_path)
        assert store.users.to_pylist() == [{"raw_id": 1, "user_active_degree": "full_active"}]
        assert store.items.to_pylist() == [{"raw_id": 5, "author_id": 50}, {"raw_id": 6, "author_id": 60}]

    def test_a_missing_column_names_the_nearest(self, tmp_path: Path) -> None:
        header = ",".join(KUAIRAND_COLUMNS).replace("time_ms,is_click", "timems,is_click")
        csv_file(tmp_path / "log_standard_1.csv", header, [])
        with pytest.raises(DataError, match=r"no column 'time_ms' \(did you mean 'timems'\?\)"):
            read(KuaiRand(tmp_path), tmp_path)

    def test_files_with_different_headers_are_refused(self, tmp_path: Path) -> None:
        folder = kuairand_folder(tmp_path, [kuairand_line(1, 1, 1)], [kuairand_line(1, 1, 1)])
        second = folder / "log_standard_4_9_to_4_9.csv"
        second.write_text(second.read_text().replace("user_id,video_id", "video_id,user_id"))
        with pytest.raises(DataError, match=r"the header of .*4_9_to_4_9\.csv differs"):
            read(KuaiRand(folder), tmp_path)

    def test_a_folder_without_logs_is_said(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"holds no log_standard_\*\.csv"):
            read(KuaiRand(tmp_path), tmp_path)


class TestAmazon:
    user, asins = "A1YJEY40YUW4SE", ("0001048791", "B00004Y2UT")
    expected = [(user, "B00004Y2UT", 10), (user, "0001048791", 20)]

    @pytest.mark.parametrize("order", ["user-item", "item-user"])
    def test_tells_users_from_items_without_a_header(self, tmp_path: Path, order: str) -> None:
        rows = [(self.user, self.asins[0], 5.0, 20), (self.user, self.asins[1], 1.0, 10)]
        if order == "item-user":
            rows = [(i, u, r, t) for u, i, r, t in rows]  # type: ignore[misc]
        path = tmp_path / "ratings_Books.csv"
        path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
        assert events_of(read(Amazon(path), tmp_path)) == self.expected

    def test_asks_for_the_order_when_it_cannot_tell(self, tmp_path: Path) -> None:
        path = tmp_path / "ratings.csv"
        path.write_text("u1,i1,5.0,20\nu1,i2,5.0,10\n")
        with pytest.raises(DataError, match="pass --order user-item or --order item-user"):
            read(Amazon(path), tmp_path)
        assert events_of(read(Amazon(path, "user-item"), tmp_path)) == [("u1", "i2", 10), ("u1", "i1", 20)]

    def test_reads_the_layout_with_a_header_in_milliseconds(self, tmp_path: Path) -> None:
        rows = [(self.user, self.asins[0], 5.0, 20), (self.user, self.asins[1], 1.0, 10)]
        path = csv_file(tmp_path / "Books.csv", "user_id,parent_asin,rating,timestamp", rows)
        store = read(Amazon(path), tmp_path)
        assert events_of(store) == self.expected
        assert store.manifest.time_units_per_second == 1000


class TestTable:
    frame = pa.table({"u": ["b", "a", "b"], "i": [3, 2, 1], "t": [5, 6, 4]})
    expected = [("a", 2, 6), ("b", 1, 4), ("b", 3, 5)]

    @pytest.mark.parametrize("ending", ["csv", "tsv", "csv.gz", "parquet", "arrow", "feather"])
    def test_reads_the_same_from_every_format(self, tmp_path: Path, ending: str) -> None:
        path = tmp_path / f"log.{ending}"
        if ending == "parquet":
            pq.write_table(self.frame, path)
        elif ending in ("arrow", "feather"):
            pyarrow.feather.write_feather(self.frame, path)
        else:
            text = self.frame.to_pandas().to_csv(index=False, sep="\t" if ending == "tsv" else ",")
            path.write_bytes(gzip.compress(text.encode()) if ending.endswith("gz") else text.encode())
        store = read(Table(path, COLUMNS), tmp_path)
        assert events_of(store) == self.expected
        assert (store.users["raw_id"].type, store.items["raw_id"].type) == (pa.string(), pa.int64())

    @pytest.mark.parametrize("ending", ["parquet", "arrow"])
    def test_keeps_the_order_of_rows_within_and_across_files(self, tmp_path: Path, ending: str) -> None:
        (tmp_path / "raw").mkdir()
        rows = 200_000
        for number in range(2):
            table = pa.table({"u": [0] * rows, "i": range(rows * number, rows * (number + 1)), "t": [0] * rows})
            path = tmp_path / "raw" / f"{number}.{ending}"
            if ending == "parquet":
                pq.write_table(table, path, row_group_size=10_000)
            else:
                pyarrow.feather.write_feather(table, path, chunksize=10_000)
        store = read(Table(tmp_path / "raw", COLUMNS), tmp_path)
        assert store.item.tolist() == list(range(2 * rows))

    @pytest.mark.parametrize(
        ("unit", "values", "expected", "per_second"),
        [
            ("s", [1, 2], [1, 2], 1),
            ("ms", [1, 2], [1, 2], 1000),
            ("us", [1, 2], [1, 2], 1_000_000),
            ("s", [1.5, 2.0], [1_500_000, 2_000_000], 1_000_000),
            ("ms", [1.5, 2.0], [1500, 2000], 1_000_000),
        ],
    )
    def test_times_are_kept_in_their_unit(
        self, tmp_path: Path, unit: Any, values: list[float], expected: list[int], per_second: int
    ) -> None:
        frame = pa.table({"u": [1, 1], "i": [1, 2], "t": values})
        manifest = prepare_frame(frame, tmp_path / "s", user="u", item="i", time="t", time_unit=unit)
        assert Store.open(tmp_path / "s").time.tolist() == expected
        assert manifest.time_units_per_second == per_second

    @pytest.mark.parametrize(
        "kind", [pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("us", tz="Asia/Tokyo"), pa.date32()]
    )
    def test_timestamps_become_microseconds_since_1970(self, tmp_path: Path, kind: pa.DataType) -> None:
        days = [datetime.datetime(1970, 1, 2), datetime.datetime(1970, 1, 3)]
        frame = pa.table({"u": [1, 1], "i": [1, 2], "t": pa.array(days, pa.timestamp("s")).cast(kind)})
        prepare_frame(frame, tmp_path / "s", user="u", item="i", time="t")
        assert Store.open(tmp_path / "s").seconds(0, 2).tolist() == [86400, 2 * 86400]

    def test_timestamps_in_csv_are_understood(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path / "log.csv", "u,i,t", [(1, 1, "1970-01-01 00:00:01.5"), (1, 2, "1970-01-02 00:00:00")])
        assert read(Table(path, COLUMNS), tmp_path).time.tolist() == [1_500_000, 86_400_000_000]

    def test_keeps_actions_and_the_first_title_of_an_item(self, tmp_path: Path) -> None:
        rows = [(1, 1, 1, "true", 0, "One"), (1, 2, 2, "false", 3, ""), (1, 1, 3, "false", 0, "Uno")]
        path = csv_file(tmp_path / "log.csv", "u,i,t,buy,stars,name", rows)
        columns = Mapping(user="u", item="i", time="t", actions=("buy", "stars"), title="name")
        store = read(Table(path, columns), tmp_path)
        assert store.actions is not None and store.actions.tolist() == [1, 2, 0]
        assert store.titles([0, 1]) == ["One", None]

    def test_ids_with_quotes_commas_and_line_breaks_survive(self, tmp_path: Path) -> None:
        ids = ['a,"b"', "c\nd", "é"]
        frame = pd.DataFrame({"u": ["x"] * 3, "i": ids, "t": [1, 2, 3]})
        frame.to_csv(tmp_path / "log.csv", index=False)
        assert [i for _, i, _ in events_of(read(Table(tmp_path / "log.csv", COLUMNS), tmp_path))] == ids

    def test_windows_line_ends_and_a_byte_order_mark_are_understood(self, tmp_path: Path) -> None:
        (tmp_path / "log.csv").write_bytes(b"\xef\xbb\xbfu,i,t\r\n1,2,3\r\n1,4,5\r\n")
        assert events_of(read(Table(tmp_path / "log.csv", COLUMNS), tmp_path)) == [(1, 2, 3), (1, 4, 5)]

    @pytest.mark.parametrize("header", [",u,i,t", "u,i,t,"])
    def test_columns_without_a_name_do_no_harm(self, tmp_path: Path, header: str) -> None:
        """pandas writes its index so."""
        rows = [("", *event) if header[0] == "," else (*event, "") for event in EVENTS]
        store = read(Table(csv_file(tmp_path / "log.csv", header, rows), COLUMNS), tmp_path)
        assert events_of(store) == EVENTS

    @pytest.mark.parametrize("ending", ["csv", "parquet", "arrow"])
    def test_a_log_may_have_columns_of_the_names_used_inside(self, tmp_path: Path, ending: str) -> None:
        """Catches: the log's own column `fault` or `filename` taken for what is noted of a row."""
        inside = ("fault", "found", "raw", "file", "filename", "row", "user", "item", "time", "actions", "title")
        table = pa.table(
            {"u": [7, 7, 8, None], "i": [10, 30, 10, 1], "t": [1, 2, 5, 6], **{n: [1, 2, 3, 4] for n in inside}}
        )
        path = tmp_path / f"log.{ending}"
        {"csv": pyarrow.csv.write_csv, "parquet": pq.write_table, "arrow": pyarrow.feather.write_feather}[ending](
            table, path
        )
        prepare(Table(path, COLUMNS), tmp_path / "store", PrepareOptions(skip_bad_rows=True))
        assert events_of(Store.open(tmp_path / "store")) == EVENTS
        rejects = (tmp_path / "store" / "rejects.csv").read_text()
        assert rejects.count("\n") == 2 and f"log.{ending},{5 if ending == 'csv' else 4},u is missing" in rejects

    def test_a_missing_file_names_the_nearest(self, tmp_path: Path) -> None:
        csv_file(tmp_path / "events.csv", "u,i,t", [])
        with pytest.raises(DataError, match=r"event\.csv does not exist \(did you mean 'events\.csv'\?\)"):
            read(Table(tmp_path / "event.csv", COLUMNS), tmp_path)

    def test_a_missing_column_names_the_nearest(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path / "log.csv", "user,item,time", [(1, 1, 1)])
        with pytest.raises(DataError, match=r"no column 'usr' \(did you mean 'user'\?\); it has user, item, time"):
            read(Table(path, Mapping(user="usr", item="item", time="time")), tmp_path)

    def test_an_empty_file_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "log.csv").write_text("")
        with pytest.raises(DataError, match=r"log\.csv is empty"):
            read(Table(tmp_path / "log.csv", COLUMNS), tmp_path)

    def test_ids_with_fractions_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="column 'u' holds numbers with a fraction"):
            prepare_frame(
                pa.table({"u": [1.5, 2], "i": [1, 2], "t": [1, 2]}), tmp_path / "s", user="u", item="i", time="t"
            )
        path = csv_file(tmp_path / "log.csv", "u,i,t", [(1.5, 1, 1), (2, 1, 1)])
        with pytest.raises(DataError, match="column 'u' holds numbers with a fraction"):
            read(Table(path, COLUMNS), tmp_path)

    def test_ids_with_leading_zeros_stay_apart(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path / "log.csv", "u,i,t", [(1, "007", 1), (1, "7", 2)])
        assert read(Table(path, COLUMNS), tmp_path).items["raw_id"].to_pylist() == ["007", "7"]

    def test_a_word_among_integer_ids_behind_the_sample_is_a_bad_row(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path / "log.csv", "u,i,t", [*((1, n, n) for n in range(10_000)), ("bob", 1, 1)])
        with pytest.raises(DataError, match="line 10002: u 'bob' is not a plain integer"):
            read(Table(path, COLUMNS), tmp_path)

    @pytest.mark.parametrize("ending", ["parquet", "arrow", "csv.gz"])
    def test_a_truncated_file_is_said(self, tmp_path: Path, ending: str) -> None:
        (tmp_path / f"log.{ending}").write_bytes(b"\x1f\x8b\x08PAR1 and no more")
        with pytest.raises(DataError, match=r"log\."):
            read(Table(tmp_path / f"log.{ending}", COLUMNS), tmp_path)

    def test_mixed_formats_are_refused(self, tmp_path: Path) -> None:
        csv_file(tmp_path / "raw.csv", "u,i,t", [(1, 1, 1)])
        pq.write_table(self.frame, tmp_path / "raw.parquet")
        with pytest.raises(DataError, match="mixes file formats"):
            read(Table(tmp_path, COLUMNS), tmp_path)


class TestFrame:
    values = {"u": [2, 1, 2], "i": ["x", "y", "z"], "t": [2, 3, 1]}

    @pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
    def test_pandas_polars_and_arrow_give_the_same(self, tmp_path: Path, make: Any) -> None:
        prepare_frame(make(self.values), tmp_path / "s", user="u", item="i", time="t")
        assert events_of(Store.open(tmp_path / "s")) == [(1, "y", 3), (2, "z", 1), (2, "x", 2)]

    def test_a_filtered_pandas_frame_is_read_whole(self, tmp_path: Path) -> None:
        frame = pd.DataFrame(self.values)
        prepare_frame(frame[frame.u == 2], tmp_path / "s", user="u", item="i", time="t")
        assert events_of(Store.open(tmp_path / "s")) == [(2, "z", 1), (2, "x", 2)]

    def test_a_lazy_frame_is_asked_to_be_collected(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="a LazyFrame: collect it"):
            prepare_frame([1, 2], tmp_path / "s", user="u", item="i", time="t")

    def test_a_missing_column_names_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"the frame has no column 'user'"):
            prepare_frame(pa.table(self.values), tmp_path / "s", user="user", item="i", time="t")


class TestRegistry:
    def test_opens_by_name(self, tmp_path: Path) -> None:
        assert open_source("kuairand", tmp_path) == KuaiRand(tmp_path)
        assert open_source("table", tmp_path, columns=COLUMNS) == Table(tmp_path, COLUMNS)

    def test_an_unknown_name_names_the_nearest(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"unknown source 'kuairnd' \(did you mean 'kuairand'\?\)"):
            open_source("kuairnd", tmp_path)

    def test_a_package_plugs_in_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "theirs.py").write_text("from turbogr.data.sources.kuairand import KuaiRand as Theirs\n")
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[turbogr.sources]\ntheirs = theirs:Theirs\n")
        monkeypatch.syspath_prepend(tmp_path)
        assert open_source("theirs", tmp_path) == KuaiRand(tmp_path)
