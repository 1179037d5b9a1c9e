"""What `prepare` refuses besides single bad rows of a log, each in one sentence that names the place and the remedy."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.raw_logs import csv_file, events_of, kuairand_folder, kuairand_line
from turbogr.data.engine import Engine
from turbogr.data.filters import Filters
from turbogr.data.prepare import PrepareOptions, prepare, prepare_frame
from turbogr.data.sources.kuairand import KuaiRand
from turbogr.data.sources.movielens import MovieLens
from turbogr.data.sources.table import Mapping, Table, TimeUnit
from turbogr.data.store import Store
from turbogr.errors import DataError, UserError

COLUMNS = Mapping(user="u", item="i", time="t")
SKIP = PrepareOptions(skip_bad_rows=True)
ROWS = [(number % 9, number, number) for number in range(60)]


def refused(path: Path, match: str, options: PrepareOptions | None = None, columns: Mapping = COLUMNS) -> None:
    with pytest.raises(DataError, match=match):
        prepare(Table(path, columns), path.parent / "store", options)


class TestIds:
    @pytest.mark.parametrize("user", ["2.5", "1e3", "007", "+7", str(10**19)])
    def test_an_id_that_is_no_plain_integer_is_a_bad_row(self, tmp_path: Path, user: str) -> None:
        lines = [kuairand_line(1, 1, 1), kuairand_line(1, 2, 2), kuairand_line(user, 3, 3)]
        with pytest.raises(DataError, match=r"4_8\.csv, line 4: user_id '.*' is not a plain integer of 64 bits; mend"):
            prepare(KuaiRand(kuairand_folder(tmp_path / "raw", lines)), tmp_path / "s")

    def test_an_item_with_a_fraction_is_a_bad_row_of_movielens(self, tmp_path: Path) -> None:
        csv_file(tmp_path / "ratings.csv", "userId,movieId,rating,timestamp", [(1, 1, 5, 1), (1, 2.5, 5, 2)])
        with pytest.raises(DataError, match=r"line 3: movieId '2\.5' is not a plain integer"):
            prepare(MovieLens(tmp_path), tmp_path / "s")

    def test_the_largest_and_the_least_integers_are_ids(self, tmp_path: Path) -> None:
        ids = [-(2**63), 2**63 - 1]
        folder = kuairand_folder(tmp_path / "raw", [kuairand_line(1, one, 1) for one in ids])
        prepare(KuaiRand(folder), tmp_path / "s")
        assert [item for _, item, _ in events_of(Store.open(tmp_path / "s"))] == ids

    @pytest.mark.parametrize("user", ["x", "2.5"])
    def test_one_bad_id_in_the_sample_does_not_turn_all_into_strings(self, tmp_path: Path, user: str) -> None:
        path = csv_file(tmp_path / "log.csv", "u,i,t", [*ROWS, (user, 1, 1), *ROWS])
        refused(path, f"line 62: u '{user}' is not a")
        prepare(Table(path, COLUMNS), tmp_path / "store", SKIP)
        assert Store.open(tmp_path / "store").users["raw_id"].type == pa.int64()
        assert (tmp_path / "store" / "rejects.csv").read_text().splitlines()[1].endswith(f'"{user},1,1"')

    def test_words_among_integers_are_string_ids(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path / "log.csv", "u,i,t", [*ROWS[:10], ("x", 1, 1)])
        prepare(Table(path, COLUMNS), tmp_path / "store")
        assert Store.open(tmp_path / "store").users["raw_id"].type == pa.string()


class TestOptions:
    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (lambda: PrepareOptions(threads=-1), "threads is -1: give a number of threads, or 0"),
            (lambda: PrepareOptions(memory_limit="much"), "'much' is no amount of memory"),
            (
                lambda: PrepareOptions(ties="random"),  # type: ignore[arg-type]
                "ties is 'random': take file or shuffled",
            ),
            (lambda: Filters(min_rating=math.nan), "min_rating is nan: give a number"),
            (lambda: Filters(user_core=-3), r"a k-core of -3 \(user_core\) is impossible: give"),
            (lambda: Filters(item_core=-3), r"a k-core of -3 \(item_core\) is impossible: give"),
        ],
    )
    def test_impossible_values_are_refused_up_front(self, make: Callable[[], object], match: str) -> None:
        with pytest.raises(UserError, match=match) as refusal:
            make()
        assert "\n" not in str(refusal.value)

    def test_filters_that_leave_nothing_are_said_in_words(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path / "log.csv", "u,i,t", ROWS)
        options = PrepareOptions(filters=Filters(user_core=500, item_core=2))
        refused(path, "weaker ones than at least 500 events per user; at least 2 events per item", options)

    def test_every_filter_has_its_words(self) -> None:
        filters = Filters(drop=("hate",), positive=("like", "click"), min_rating=4, users_with=("follow",))
        assert filters.words() == (
            "events with hate dropped; only events with like or click; only ratings of at least 4; "
            "only users with follow"
        )


class TestFiles:
    def test_a_column_named_twice_is_refused(self, tmp_path: Path) -> None:
        refused(
            csv_file(tmp_path / "log.csv", "u,i,t,t", [(1, 2, 3, 4)]), r"log\.csv has the column 't' more than once"
        )
        refused(
            csv_file(tmp_path / "log.csv", "u,I,i,t", [(1, 2, 3, 4)]), r"log\.csv has the column 'I' more than once"
        )

    def test_a_gzip_file_that_was_cut_is_named_with_the_remedy(self, tmp_path: Path) -> None:
        lines = gzip.compress(b"u,i,t\n" + b"".join(b"%d,%d,%d\n" % (n % 9, n * n, n) for n in range(20_000)))
        (tmp_path / "log.csv.gz").write_bytes(lines[: len(lines) // 2])
        refused(tmp_path / "log.csv.gz", r"^\S*/log\.csv\.gz is damaged: fetch or write it again", options=SKIP)

    def test_a_file_of_bytes_is_no_csv_file(self, tmp_path: Path) -> None:
        (tmp_path / "log.csv").write_bytes(bytes(range(1, 256)))
        refused(tmp_path / "log.csv", r"log\.csv is no text file: give CSV")

    def test_an_unknown_ending_is_refused_with_those_known(self, tmp_path: Path) -> None:
        (tmp_path / "x.json").write_text("{}")
        refused(tmp_path / "x.json", r"x\.json has no ending that says its format: .*\.csv\.gz.*\.parquet.*\.feather")

    @pytest.mark.parametrize("damage", ["all", "pages", "footer"])
    def test_a_damaged_parquet_file_is_named(self, tmp_path: Path, damage: str) -> None:
        path = tmp_path / "log.parquet"
        pq.write_table(pa.table({"u": range(9999), "i": range(9999), "t": range(9999)}), path)
        data = bytearray(path.read_bytes())
        part = {"all": slice(0, None), "pages": slice(2000, 4000), "footer": slice(-40, -8)}[damage]
        data[part] = b"\xff" * len(data[part])
        path.write_bytes(data)
        refused(path, r"^\S*/log\.parquet (is damaged|cannot be read as Parquet): [^\n]*again\.$")

    @pytest.mark.parametrize(
        ("rows", "match"),
        [
            ("1,2\n2,3,4\n", "cannot be read as CSV, with as many fields in every line: mend it"),
            ("1,2\n" * 30_000 + "2,3,4\n", "line 30002: 3 fields instead of 2; mend that line"),
            ("1,2\nx,4\n", "user_id x is not an integer; mend it"),
            ("1,2\n2.5,4\n", r"user_id 2\.5 is not an integer; mend it"),
            ("1,2\n,4\n", r"user_id \(empty\) is not an integer; mend it"),
        ],
    )
    def test_damaged_user_features_are_named(self, tmp_path: Path, rows: str, match: str) -> None:
        folder = kuairand_folder(tmp_path / "raw", [kuairand_line(1, 1, 1), kuairand_line(1, 2, 2)])
        (folder / "user_features_27k.csv").write_text("user_id,age\n" + rows)
        with pytest.raises(DataError, match=rf"^\S*/user_features_27k\.csv.*{match}"):
            prepare(KuaiRand(folder), tmp_path / "s")

    def test_the_ratings_of_movielens_alone_are_refused_with_the_remedy(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path / "ratings.csv", "userId,movieId,rating,timestamp", [(1, 1, 5, 1)])
        with pytest.raises(DataError, match=r"ratings\.csv is neither .*: give the folder or the zip"):
            prepare(MovieLens(path), tmp_path / "s")

    def test_a_latin_1_file_is_asked_to_become_utf_8(self, tmp_path: Path) -> None:
        (tmp_path / "log.csv").write_bytes("u,i,t\nJosé,1,2\nRené,2,3\n".encode("latin-1"))
        refused(tmp_path / "log.csv", r"log\.csv, line 2: the line is no UTF-8 text, convert the file to UTF-8")


class TestNothingLeft:
    def test_an_empty_log_says_what_was_rejected(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path / "log.csv", "u,i,t", [(1, 2, "x"), (1, 3, "y")])
        refused(path, r"an empty log.*\(2 rows were rejected, the first: \S*log\.csv, line 2: t 'x' is not a", SKIP)

    def test_a_log_without_two_events_of_a_user_says_what_was_rejected(self, tmp_path: Path) -> None:
        path = csv_file(tmp_path / "log.csv", "u,i,t", [(1, 2, 3), (1, 3, "y")])
        refused(path, r"no user has two events.*\(1 rows were rejected, the first: \S*log\.csv, line 3: t 'y'", SKIP)


class TestTimes:
    @pytest.mark.parametrize(
        ("unit", "time", "remedy"),
        [
            ("s", 1_650_000_000_000, "did you mean --time-unit ms"),
            ("s", 1_650_000_000_000.5, "did you mean --time-unit ms"),
            ("s", 1_650_000_000_000_000, "did you mean --time-unit us"),
            ("ms", 1_650_000_000_000_000, "did you mean --time-unit us"),
            ("us", 1_650_000_000_000_000_000, "convert it to s, ms or us"),
        ],
    )
    def test_a_time_after_the_year_2200_tells_the_wrong_unit(
        self, tmp_path: Path, unit: TimeUnit, time: float, remedy: str
    ) -> None:
        path = csv_file(tmp_path / "log.csv", "u,i,t", [(1, 1, time), (1, 2, time)])
        refused(path, f"after the year 2200 .*{remedy}", columns=Mapping(user="u", item="i", time="t", time_unit=unit))

    def test_the_last_second_before_2200_is_a_time(self, tmp_path: Path) -> None:
        frame = pa.table({"u": [1, 1], "i": [1, 2], "t": [1, 7_258_118_399]})
        prepare_frame(frame, tmp_path / "s", user="u", item="i", time="t")
        with pytest.raises(DataError, match="after the year 2200"):
            later = frame.set_column(2, "t", [[1, 7_258_118_400]])
            prepare_frame(later, tmp_path / "s2", user="u", item="i", time="t")


def test_many_bad_rows_are_never_held_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turbogr.data.engine.BATCH_ROWS", 2048)  # DuckDB's own least
    rows = [(1, 2, "x") if number % 3 else (1, "", number) for number in range(9000)]
    path = csv_file(tmp_path / "log.csv", "u,i,t", [(1, 1, 1), (1, 2, 2), *rows])
    fetched = []
    real = Engine.all

    def all_rows(engine: Engine, sql: str) -> list[tuple[object, ...]]:
        fetched.append(len(found := real(engine, sql)))
        return found

    monkeypatch.setattr(Engine, "all", all_rows)
    manifest = prepare(Table(path, COLUMNS), tmp_path / "store", SKIP)
    lines = (tmp_path / "store" / "rejects.csv").read_text().splitlines()
    assert manifest.rejected_rows == len(rows) and len(lines) == len(rows) + 1
    assert [int(line.split(",")[1]) for line in lines[1:]] == list(range(4, 4 + len(rows)))
    assert max(fetched) < 100


@pytest.mark.parametrize(("line", "first"), [("1,2", "2 fields"), ("\xff,\xff,1,2", "4 fields|the line is no UTF-8")])
def test_more_refused_lines_than_are_noted_are_never_dropped_uncounted(
    line: str, first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DuckDB counts faults, of which a line may have several, and drops those after its limit without a word."""
    monkeypatch.setattr("turbogr.data.sources.reading.REFUSED_LINES", 100)
    path, lines = tmp_path / "log.csv", ["u,i,t", "1,1,1", "1,2,2"]
    path.write_bytes("\n".join([*lines, *[line] * 30, ""]).encode("latin-1"))
    prepare(Table(path, COLUMNS), tmp_path / "store", SKIP)
    assert Store.open(tmp_path / "store").manifest.rejected_rows == 30
    path.write_bytes("\n".join([*lines, *[line] * 300, ""]).encode("latin-1"))
    for options in (SKIP, None):
        with pytest.raises(DataError, match=rf"log\.csv, line 4: ({first}).* lines or more, too many to set aside"):
            prepare(Table(path, COLUMNS), tmp_path / "second", options)
    assert not (tmp_path / "second").exists()
