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
        ({"user": "who"}, "who"),
        ({"out": EXAMPLES}, "exists already: choose another out"),
    ],
)
def test_what_cannot_be_fitted_is_said_before_any_work(options: dict, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        turbogr.fit(tiny_frame(), **{"config": SMALL, "store": tmp_path / "store", **options})
    assert list(tmp_path.iterdir()) == []
