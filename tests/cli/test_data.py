"""`turbogr data`: arguments reach the library, results go to stdout, mistakes are one sentence."""

import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.command_line import said
from tests.support.tiny_store import tiny_store
from turbogr.cli import main
from turbogr.data.sources import synthetic
from turbogr.data.store import Store

LOG = """\
who,what,when,clicked,stars,name
a,1,100,1,5,One
a,2,200,0,2,Two
a,3,200,1,4,Three
b,1,300,1,5,One
b,3,50,0,5,Three
"""
COLUMNS = ["--user", "who", "--item", "what", "--time", "when"]


@pytest.fixture
def log(tmp_path: Path) -> str:
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return str(path)


def test_a_table_becomes_a_store_and_the_counts_go_to_stdout(log: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "store"
    every = [*COLUMNS, "--time-unit", "ms", "--actions", "clicked", "--title", "name", "--rating", "stars"]
    assert main(["data", "prepare", "table", log, "--out", str(out), *every]) == 0
    assert capsys.readouterr().out == f"{out}: 2 users, 3 items, 5 events\n"
    store = Store.open(out)
    assert store.manifest.time_units_per_second == 1000
    assert store.manifest.actions == ("clicked",)
    assert store.titles([0]) == ["One"]


def test_filters_reach_the_library(log: str, tmp_path: Path) -> None:
    every = [*COLUMNS, "--actions", "clicked", "--rating", "stars"]
    out = str(tmp_path / "a")
    assert main(["data", "prepare", "table", log, "--out", out, *every, "--positive", "clicked"]) == 0
    assert Store.open(out).num_events == 3
    assert main(["data", "prepare", "table", log, "--out", out, *every, "--min-rating", "4", "--overwrite"]) == 0
    assert Store.open(out).num_events == 4
    assert main(["data", "prepare", "table", log, "--out", out, *every, "--k-core", "2", "--overwrite"]) == 0
    assert Store.open(out).num_events == 4
    assert (
        main(
            ["data", "prepare", "table", log, "--out", out, *every, "--ties", "shuffled", "--seed", "3", "--overwrite"]
        )
        == 0
    )
    assert Store.open(out).manifest.ties == "shuffled-3"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["table", "LOG", "--out", "o"], "the source table needs --user, --item, --time"),
        (["table", "LOG", *COLUMNS], "`turbogr data prepare` needs --out STORE: see `turbogr data prepare --help`"),
        (["table"], "needs PATH, --out STORE"),
        (["table", "LOG", "extra", "--out", "o"], "unexpected argument 'extra': see `turbogr data prepare --help`"),
        (["movielenz", "LOG", "--out", "o"], "unknown source 'movielenz' (did you mean 'movielens'?)"),
        (
            ["movielens", "LOG", "--out", "o", "--time", "when"],
            "--time belongs to the source table: leave it out for movielens",
        ),
        (["movielens", "LOG", "--out", "o", "--order", "user-item"], "--order belongs to the source amazon"),
        (["table", "LOG", "--out", "o", *COLUMNS, "--filter", "kuairand"], "did you mean 'kuairand-paper'"),
        (["table", "LOG", "--out", "o", *COLUMNS[:-1], "whem"], "no column 'whem' (did you mean 'when'?)"),
        (["table", "nowhere.csv", "--out", "o", *COLUMNS], "nowhere.csv does not exist"),
        (["table", "LOG", "--out", "o", *COLUMNS, "--kcore", "5"], "unknown option --kcore (did you mean '--k-core'?)"),
    ],
)
def test_a_wrong_call_of_prepare_is_one_sentence(
    args: list[str], sentence: str, log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in said(capsys, "data", "prepare", *[log if arg == "LOG" else arg for arg in args])
    assert [path.name for path in tmp_path.iterdir()] == ["log.csv"], "nothing half-written"


def test_an_existing_store_is_kept_without_overwrite(log: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "store").mkdir()
    assert "--overwrite" in said(capsys, "data", "prepare", "table", log, "--out", str(tmp_path / "store"), *COLUMNS)


def test_synth_hands_every_flag_to_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    signature = inspect.signature(synthetic.synthesize)
    calls: list[dict[str, object]] = []

    def record(*args: object, **kwargs: object) -> synthetic.SynthReport:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))
        oracle = {"clicks": {"hr@10": 0.25}}
        return synthetic.SynthReport(path=tmp_path, users=40, items=200, rows=1234, clicks=56, repeats=7, oracle=oracle)

    monkeypatch.setattr(synthetic, "synthesize", record)
    flags = [
        "--users",
        "40",
        "--items",
        "200",
        "--length-scale",
        "0.1",
        "--popularity",
        "0.5",
        "--seed",
        "3",
        "--overwrite",
    ]
    assert main(["data", "synth", "--out", str(tmp_path), "--like", "kuairand-27k", *flags]) == 0
    assert "1,234 rows of 40 users over 200 items, 56 clicks\noracle, clicks: hr@10 0.2500\n" in capsys.readouterr().out
    assert calls == [
        {
            "out": tmp_path,
            "users": 40,
            "items": 200,
            "like": "kuairand-27k",
            "length_scale": 0.1,
            "popularity": 0.5,
            "seed": 3,
            "overwrite": True,
        }
    ]


def stats(capsys: pytest.CaptureFixture[str], path: Path, *flags: str) -> str:
    assert main(["data", "stats", str(path), *flags]) == 0
    return str(capsys.readouterr().out)


def test_stats_as_json_are_the_figures_of_the_store(tmp_path: Path, capsys) -> None:
    store = tiny_store(tmp_path / "s", [[0, 1, 0], [0], [0, 2]], [[0, 0, 86400], [5], [7, 7]], num_items=10)
    found = json.loads(stats(capsys, store.path, "--json"))
    assert (found["users"], found["items"], found["events"]) == (3, 10, 6)
    assert found["items_without_events"] == 7
    assert found["length_quantiles"]["p50"] == 2
    assert found["length_quantiles"]["p100"] == 3
    assert found["head_share"]["top 10%"] == pytest.approx(4 / 6)
    assert (found["tied_gaps"], found["tied_share"]) == (2, pytest.approx(2 / 3))
    assert (found["first_event"], found["last_event"]) == ("1970-01-01 00:00:00", "1970-01-02 00:00:00")


def test_action_rates_count_events(log: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "store"
    main(["data", "prepare", "table", log, "--out", str(out), *COLUMNS, "--actions", "clicked"])
    capsys.readouterr()
    assert json.loads(stats(capsys, out, "--json"))["action_rates"] == {"clicked": 3 / 5}


def test_chunks_do_not_change_the_figures(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50, n).tolist() for n in (1, 2, 70, 33)]
    store = tiny_store(tmp_path / "s", rows, [sorted(rng.integers(0, 99, len(row)).tolist()) for row in rows])
    whole = stats(capsys, store.path)
    monkeypatch.setattr("turbogr.data.stats.CHUNK", 7)
    assert stats(capsys, store.path) == whole
    assert "events" in whole


def test_verify_finds_a_changed_byte(log: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "store"
    assert main(["data", "prepare", "table", log, "--out", str(out), *COLUMNS]) == 0
    stats(capsys, out, "--verify")
    with (out / "item.npy").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x01")
    assert "item.npy does not match its checksum" in said(capsys, "data", "stats", str(out), "--verify")


def test_a_folder_that_is_no_store_is_said(tmp_path: Path, capsys) -> None:
    assert "is not a store (no manifest.json): make one with" in said(capsys, "data", "stats", str(tmp_path))


def test_a_truncated_store_is_said(log: str, tmp_path: Path, capsys) -> None:
    out = tmp_path / "store"
    main(["data", "prepare", "table", log, "--out", str(out), *COLUMNS])
    capsys.readouterr()
    shutil.copy(out / "users.parquet", out / "time.npy")
    assert "the store is truncated" in said(capsys, "data", "stats", str(out))
