"""Rows that cannot be used: named with file and line, or set aside and counted."""

import csv
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.raw_logs import csv_file, events_of, kuairand_folder, kuairand_line
from turbogr.data.prepare import PrepareOptions, prepare, prepare_frame
from turbogr.data.sources.kuairand import KuaiRand
from turbogr.data.sources.movielens import MovieLens
from turbogr.data.sources.table import Mapping, Table
from turbogr.data.store import Store
from turbogr.errors import DataError

COLUMNS = Mapping(user="u", item="i", time="t")
GOOD = [kuairand_line(1, 1, 1), kuairand_line(1, 2, 2)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (kuairand_line("bob", 1, 1), "user_id 'bob' is not a plain integer of 64 bits"),
        (kuairand_line(1, "v1", 1), "video_id 'v1' is not a plain integer of 64 bits"),
        (kuairand_line(1, 1, -5), r"time_ms is negative \(-5\)"),
        (kuairand_line(1, 1, ""), "time_ms is missing"),
        (kuairand_line("", 1, 1), "user_id is missing"),
        (kuairand_line(1, "", 1), "video_id is missing"),
        (kuairand_line(1, 1, 10**19), "time_ms '10{19}' is not a plain integer of 64 bits"),
        (kuairand_line(1, 1, 1.5), r"time_ms '1\.5' is not a plain integer of 64 bits"),
        (kuairand_line(1, 1, 1).replace(",0", ",0.5", 3).replace(",0.5", ",0", 2), r"is_click '0\.5' is not 0 or 1"),
        (kuairand_line(1, 1, 1).replace(",0", ",", 3), "is_click is missing"),
        ("1,2,3", "3 fields instead of 19"),
        (kuairand_line(1, 1, 1) + ",1", "20 fields instead of 19"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_remedy(tmp_path: Path, line: str, reason: str) -> None:
    folder = kuairand_folder(tmp_path / "raw", GOOD, [*GOOD, line, *GOOD])
    with pytest.raises(DataError, match=rf"log_standard_4_9_to_4_9\.csv, line 4: {reason}; .*--skip-bad-rows"):
        prepare(KuaiRand(folder), tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_the_first_of_several_bad_rows_is_named_and_the_others_counted(tmp_path: Path) -> None:
    folder = kuairand_folder(tmp_path / "raw", GOOD, [*GOOD, "1,2", "x"], ["y"])
    with pytest.raises(DataError, match=r"4_9\.csv, line 4: 2 fields .*\(3 such rows in all\)"):
        prepare(KuaiRand(folder), tmp_path / "s")


def test_bad_rows_are_set_aside_and_counted_when_asked(tmp_path: Path) -> None:
    folder = kuairand_folder(tmp_path / "raw", ["7,1", *GOOD], [kuairand_line(1, 9, -1), kuairand_line(1, 3, 3)])
    manifest = prepare(KuaiRand(folder), tmp_path / "s", PrepareOptions(skip_bad_rows=True))
    assert manifest.rejected_rows == 2
    assert events_of(Store.open(tmp_path / "s")) == [(1, 1, 1), (1, 2, 2), (1, 3, 3)]
    with (tmp_path / "s" / "rejects.csv").open() as stream:
        rejects = list(csv.reader(stream))
    assert rejects == [
        ["file", "line", "reason", "text"],
        ["log_standard_4_8_to_4_8.csv", "2", "2 fields instead of 19", "7,1"],
        ["log_standard_4_9_to_4_9.csv", "2", "time_ms is negative (-1)", kuairand_line(1, 9, -1)],
    ]


def test_a_clean_log_has_no_rejects_file(tmp_path: Path) -> None:
    prepare(KuaiRand(kuairand_folder(tmp_path / "raw", GOOD)), tmp_path / "s", PrepareOptions(skip_bad_rows=True))
    assert not (tmp_path / "s" / "rejects.csv").exists()


def test_a_log_of_bad_rows_only_is_an_empty_log(tmp_path: Path) -> None:
    folder = kuairand_folder(tmp_path / "raw", ["x", "y"])
    with pytest.raises(DataError, match="an empty log, not one usable row"):
        prepare(KuaiRand(folder), tmp_path / "s", PrepareOptions(skip_bad_rows=True))


kinds = st.sampled_from(["good", "short", "no user", "bad time", "negative"])
LINES = {"good": "a,b,7", "short": "a,b", "no user": ",b,7", "bad time": "a,b,x", "negative": "a,b,-7"}


@settings(max_examples=15, deadline=None)
@given(files=st.lists(st.lists(kinds, max_size=12), min_size=1, max_size=3))
def test_every_bad_line_of_string_ids_is_found_where_it_stands(
    files: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lines")
    (folder / "raw").mkdir()
    for number, found in enumerate(files):
        lines = ["u,i,t", "a,b,1", "a,b,2", *(LINES[kind] for kind in found)]
        (folder / "raw" / f"{number}.csv").write_text("\n".join(lines) + "\n")
    manifest = prepare(Table(folder / "raw", COLUMNS), folder / "s", PrepareOptions(skip_bad_rows=True))
    expected = [
        (f"{number}.csv", str(line), LINES[kind])
        for number, found in enumerate(files)
        for line, kind in enumerate(found, 4)
        if kind != "good"
    ]
    assert manifest.rejected_rows == len(expected)
    if expected:
        with (folder / "s" / "rejects.csv").open() as stream:
            assert [(row["file"], row["line"], row["text"]) for row in csv.DictReader(stream)] == expected


def test_a_log_that_ends_in_many_megabytes_of_refused_lines_has_them_all_counted(tmp_path: Path) -> None:
    """DuckDB's parallel reader ends a file where a thread's whole part of it holds no row, and notes no line behind."""
    log = ["u,i,t", *(f"{number % 9},{number},{number}" for number in range(1000)), *["9," + "x" * 2000] * 15_000]
    (tmp_path / "log.csv").write_text("\n".join(log) + "\n")
    options = PrepareOptions(skip_bad_rows=True, threads=2)
    manifest = prepare(Table(tmp_path / "log.csv", COLUMNS), tmp_path / "s", options)
    assert (manifest.events, manifest.rejected_rows) == (1000, 15_000)
    with (tmp_path / "s" / "rejects.csv").open() as stream:
        assert [int(row["line"]) for row in csv.DictReader(stream)] == list(range(1002, 16_002))


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_bad_rows_of_other_formats_are_named_by_file_and_row(tmp_path: Path, ending: str) -> None:
    (tmp_path / "raw").mkdir()
    for number, user in enumerate(("a", None)):
        table = pa.table({"u": ["a", user], "i": [1, 2], "t": [1, 2]})
        path = tmp_path / "raw" / f"{number}.{ending}"
        pq.write_table(table, path) if ending == "parquet" else pyarrow.feather.write_feather(table, path)
    with pytest.raises(DataError, match=rf"1\.{ending}, row 2: u is missing"):
        prepare(Table(tmp_path / "raw", COLUMNS), tmp_path / "s")


def test_a_bad_row_of_a_frame_is_named_by_its_place_from_zero(tmp_path: Path) -> None:
    frame = pa.table({"u": [1, 1, 1], "i": [1, 2, 3], "t": [1, 2, -3]})
    with pytest.raises(DataError, match=r"the frame, row 2: t is negative \(-3\)"):
        prepare_frame(frame, tmp_path / "s", user="u", item="i", time="t")


@pytest.mark.parametrize("time", ["1.5", "1e3", "2020-01-01"])
def test_a_time_as_text_is_never_rounded(tmp_path: Path, time: str) -> None:
    """A cast to int64 made 2 of 1.5."""
    frame = pa.table({"u": [1, 1, 1], "i": [1, 2, 3], "t": ["1", "2", time]})
    with pytest.raises(DataError, match=rf"the frame, row 2: t '{time}' is not a plain integer"):
        prepare_frame(frame, tmp_path / "s", user="u", item="i", time="t")


def test_a_bad_row_of_a_dat_file_counts_lines_from_one(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "ratings.dat").write_text("1::1::5::1\n1::x::5::2\n")
    with pytest.raises(DataError, match=r"ratings\.dat, line 2: item 'x' is not a plain integer"):
        prepare(MovieLens(tmp_path / "raw"), tmp_path / "s")


def test_a_missing_rating_is_a_bad_row_too(tmp_path: Path) -> None:
    csv_file(tmp_path / "ratings.csv", "userId,movieId,rating,timestamp", [(1, 1, 5, 1), (1, 2, "", 2)])
    with pytest.raises(DataError, match=r"line 3: rating is missing"):
        prepare(MovieLens(tmp_path), tmp_path / "s")
