"""The examples run as shipped, and the names of the Python API come without torch."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pyarrow as pa
import pytest
from nbclient import NotebookClient

import turbogr
from examples import fit_a_frame
from turbogr.config import Config, from_dict
from turbogr.errors import UserError

EXAMPLES = Path(fit_a_frame.__file__).parent


def test_the_script_beats_popularity_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = fit_a_frame.main()
    assert metrics["model"]["hr@10"] > 5 * metrics["popularity"]["hr@10"]
    out = capsys.readouterr().out
    assert out.count("  1. Series") == 2
    assert "Series 2, film 6" in out


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(EXAMPLES)}}).execute()
    assert "Series 2, film 6" in notebook.cells[-1].outputs[0]["data"]["text/plain"]


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


def test_importing_turbogr_loads_no_torch() -> None:
    code = "import sys, turbogr; dir(turbogr); print('torch' in sys.modules, 'duckdb' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False False\n"


def test_every_name_of_the_api_is_there_and_none_is_a_package() -> None:
    packages = {path.name.removesuffix(".py") for path in Path(turbogr.__file__).parent.iterdir()}
    for name in turbogr.__all__:
        assert callable(getattr(turbogr, name)), name
        assert name not in packages
    with pytest.raises(AttributeError, match="no attribute 'fitt'"):
        turbogr.fitt  # noqa: B018


def tiny_frame() -> pa.Table:
    return pa.table({"user_id": [1, 1, 1, 2, 2, 2], "item_id": list("abcbca"), "ts": [1, 2, 3, 1, 2, 3]})


SMALL = {
    "model.dim": 4,
    "train.epochs": 1,
    "negatives.count": 2,
    "device": {"name": "cpu", "threads": 1},
    "log.tensorboard": False,
}


@pytest.mark.parametrize("kind", ["arrow", "pandas", "polars"])
def test_a_frame_of_each_library_gives_the_same_model(kind: str, tmp_path: Path) -> None:
    table = tiny_frame()
    if kind != "arrow":
        library = pytest.importorskip(kind)
        table = table.to_pandas() if kind == "pandas" else library.from_arrow(table)
    model = turbogr.fit(table, config=SMALL)
    answer = model.recommend_history(["a"], k=2)
    assert answer.equals(turbogr.fit(tiny_frame(), config=SMALL).recommend_history(["a"], k=2))


def test_store_and_run_are_kept_where_they_are_wanted(tmp_path: Path) -> None:
    model = turbogr.fit(tiny_frame(), config=SMALL, store=tmp_path / "store", out=tmp_path / "run")
    wanted = model.recommend([1, 2], allow_seen=True)
    assert turbogr.load(tmp_path / "run").recommend([1, 2], allow_seen=True).equals(wanted)
    again = turbogr.fit(tmp_path / "store", config=SMALL)
    assert again.recommend([1, 2], allow_seen=True).equals(wanted)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"config": {"train.epoch": 5}}, "unknown key 'epoch'.*did you mean 'epochs'"),
        ({"config": {"train.epochs": 0}}, "train.epochs must be at least 1"),
        ({"config": {"train.epochs": 1, "train": {"epochs": 2}}}, "config says train twice"),
        ({"config": {"train": {"epochs": 2}, "train.epochs": 1}}, "config says train.epochs twice"),
        ({"config": {**SMALL, "train.select_by": "ndcg"}}, "train.select_by 'ndcg' is not a metric"),
        ({"config": {**SMALL, "model.name": "hstuu"}}, "hstuu"),
        ({"config": {**SMALL, "negatives.count": 3}}, "negatives.count 3 is not below the catalogue's 3 items"),
        ({"user": "who"}, "who"),
        ({"out": EXAMPLES}, "exists already and is no run: choose another out"),
        ({"out": EXAMPLES, "overwrite": True}, "exists already and is no run: choose another out"),
    ],
)
def test_what_cannot_be_fitted_is_said_and_leaves_nothing(options: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        turbogr.fit(tiny_frame(), **{"config": SMALL, "store": tmp_path / "store", **options})
    assert list(tmp_path.iterdir()) == []


def thirty_items() -> pa.Table:
    events = [(user, (7 * user + step) % 30, step) for user in range(20) for step in range(6)]
    return pa.table(dict(zip(("user_id", "item_id", "ts"), map(list, zip(*events, strict=True)), strict=True)))


def test_a_small_catalogue_is_trained_on_with_fewer_negatives_unless_a_count_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unsaid = {name: value for name, value in SMALL.items() if name != "negatives.count"}
    for config in (unsaid, from_dict(Config, {"device": SMALL["device"], "train": {"epochs": 1}}, "test")):
        assert turbogr.fit(thirty_items(), config=config).config.negatives.count == 29
        assert "negatives.count is 29 instead of 128" in capsys.readouterr().err
    with pytest.raises(UserError, match="negatives.count 128 is not below the catalogue's 30 items"):
        turbogr.fit(thirty_items(), config={**SMALL, "negatives.count": 128})


def test_store_and_run_that_stand_there_are_replaced_when_asked(tmp_path: Path) -> None:
    places = {"store": tmp_path / "store", "out": tmp_path / "run"}
    turbogr.fit(tiny_frame(), config=SMALL, **places)
    with pytest.raises(UserError, match="run exists already: choose another out, or pass overwrite=True"):
        turbogr.fit(thirty_items(), config=SMALL, **places)
    with pytest.raises(UserError, match="store exists already: choose another store, or pass overwrite=True"):
        turbogr.fit(thirty_items(), config=SMALL, store=tmp_path / "store")
    with pytest.raises(UserError, match="lies in the run"):
        turbogr.fit(
            thirty_items(), config=SMALL, overwrite=True, store=tmp_path / "run" / "store", out=tmp_path / "run"
        )
    model = turbogr.fit(thirty_items(), config=SMALL, overwrite=True, **places)
    assert len(model.parts.items) == 30 and turbogr.load(tmp_path / "run").parts.weight.equal(model.parts.weight)


def test_bad_rows_are_set_aside_when_asked(tmp_path: Path) -> None:
    bad = pa.concat_tables([tiny_frame(), pa.table({"user_id": [1], "item_id": ["a"], "ts": pa.nulls(1, pa.int64())})])
    with pytest.raises(UserError):
        turbogr.fit(bad, config=SMALL)
    model = turbogr.fit(bad, config=SMALL, skip_bad_rows=True, store=tmp_path / "store")
    assert model.store.manifest.rejected_rows == 1 and (tmp_path / "store" / "rejects.csv").exists()
    with pytest.raises(UserError, match="is a prepared store already"):
        turbogr.fit(tmp_path / "store", config=SMALL, skip_bad_rows=True)
