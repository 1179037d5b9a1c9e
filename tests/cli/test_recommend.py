"""`turbogr recommend` and `turbogr export`: whom, where to, and the sentence for every wrong question."""

import json
import shutil
from pathlib import Path

import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from tests.support.command_line import said
from tests.support.trained import small_run
from turbogr.cli import main
from turbogr.ops import gemm
from turbogr.recommend.model import Model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_run(tmp_path_factory.mktemp("trained") / "run"))


@pytest.fixture(scope="module")
def model(run: str) -> Model:
    return Model.load(run)


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["recommend", *args]) == 0
    return capsys.readouterr().out


def test_users_are_printed_with_rank_raw_id_title_and_score(run: str, model: Model, capsys) -> None:
    out = printed(capsys, run, "--user", "u3", "u1", "-k", "2")
    assert [line for line in out.splitlines() if line.startswith("user")] == ["user u3", "user u1"]
    for row in model.recommend(["u3", "u1"], k=2).to_pylist():
        assert any(
            line.split() == [str(row["rank"]), str(row["item"]), *row["title"].split(), f"{row['score']:.4f}"]
            for line in out.splitlines()
        )


def test_a_user_who_has_nothing_left_is_said(run: str, tmp_path: Path, capsys) -> None:
    (tmp_path / "everything").write_text("\n".join(map(str, range(100, 160))))
    assert main(["recommend", run, "--user", "u1", "--exclude", str(tmp_path / "everything")]) == 0
    assert capsys.readouterr() == ("", "user u1: no item is left to recommend.\n")


def test_json_holds_one_object_per_user(run: str, model: Model, capsys) -> None:
    found = json.loads(printed(capsys, run, "--user", "u3", "u1", "-k", "2", "--json"))
    assert [one["user"] for one in found] == ["u3", "u1"]
    rows = [{"user": one["user"], **item} for one in found for item in one["items"]]
    assert rows == model.recommend(["u3", "u1"], k=2).to_pylist()


def test_a_history_is_answered_with_and_without_times(run: str, model: Model, capsys) -> None:
    plain = json.loads(printed(capsys, run, "--history", "101, 102", "--json"))
    assert plain == [{"items": model.recommend_history([101, 102]).to_pylist()}]
    timed = json.loads(printed(capsys, run, "--history", "101@1500000000,102@1500009000", "--json"))
    assert timed == [{"items": model.recommend_history([101, 102], [1_500_000_000, 1_500_009_000]).to_pylist()}]
    assert "after this history" in printed(capsys, run, "--history", "101,102")


def test_options_reach_the_model(run: str, model: Model, tmp_path: Path, capsys) -> None:
    best = model.recommend("u0", k=2)["item"].to_pylist()
    (tmp_path / "out").write_text("\n".join(map(str, best)) + "\n\n")
    found = printed(
        capsys, run, "--user", "u0", "--json", "--exclude", str(tmp_path / "out"), "--now", "1700000000", "--allow-seen"
    )
    wanted = model.recommend("u0", exclude=best, now=1_700_000_000, allow_seen=True)
    assert json.loads(found)[0]["items"] == wanted.drop_columns("user").to_pylist()


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_everybody_goes_to_a_file(run: str, model: Model, tmp_path: Path, capsys, ending: str) -> None:
    out = tmp_path / f"top.{ending}"
    said = printed(capsys, run, "--all-users", "--out", str(out), "-k", "3", "--batch-users", "9")
    assert said == f"{out}: {3 * model.store.num_users} rows\n"
    table = pq.read_table(out) if ending == "parquet" else pyarrow.csv.read_csv(out)
    wanted = model.recommend(model.store.users["raw_id"].to_pylist(), k=3)
    assert table["user"].to_pylist() == wanted["user"].to_pylist()
    assert table["item"].to_pylist() == wanted["item"].to_pylist()
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_a_file_that_fails_on_the_way_leaves_nothing(run: str, tmp_path: Path, capsys, monkeypatch) -> None:
    answers = Model.recommend_all

    def cut(self: Model, *args, **options):
        yield next(iter(answers(self, *args, **options)))
        raise KeyboardInterrupt

    monkeypatch.setattr(Model, "recommend_all", cut)
    assert main(["recommend", run, "--all-users", "--out", str(tmp_path / "top.parquet")]) == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "exactly one of --user, --history and --all-users"),
        (["--user", "u1", "--history", "101"], "exactly one of --user, --history and --all-users"),
        (["--all-users"], "--all-users needs --out FILE"),
        (["--all-users", "--out", "top.txt"], "top.txt must end in .parquet or .csv"),
        (["--user", "u1", "--out", "top.csv", "--json"], "--json prints and --out writes: choose one"),
        (["--user", "u1", "--batch-users", "3"], "--batch-users belongs to --all-users"),
        (["--user", "u1", "somebody"], "unknown user 'somebody'"),
        (["--history", "101,7"], "unknown item '7'"),
        (["--history", "101@5,102"], "--history gives 1 times for 2 items"),
        (["--history", "101@5,102@4"], "time 4 follows 5"),
        (["--user", "u1", "-k", "0"], "k must be at least 1"),
        (["--user", "u1", "--exclude", "absent.txt"], "--exclude absent.txt cannot be read"),
        (["--user", "u1", "--checkpoint", "7"], "holds no checkpoint of step 7"),
        (["--user", "u1", "--nowe", "7"], "unknown option --nowe (did you mean '--now'?)"),
    ],
)
def test_a_wrong_question_is_one_sentence(run: str, capsys, args: list[str], sentence: str) -> None:
    assert sentence in said(capsys, "recommend", run, *args)


def test_an_export_answers_from_the_command_line(run: str, model: Model, tmp_path: Path, capsys) -> None:
    out = tmp_path / "model"
    assert main(["export", run, "--out", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: 60 items, epoch 1, step ")
    found = json.loads(printed(capsys, str(out), "--history", "101,102", "--json"))
    assert [item["item"] for item in found[0]["items"]] == model.recommend_history([101, 102])["item"].to_pylist()
    assert "exists already" in said(capsys, "export", run, "--out", str(out))
    assert "without a store" in said(capsys, "recommend", str(out), "--user", "u1")
    assert main(["export", run, "--out", str(out), "--overwrite", "--checkpoint", "last"]) == 0


def test_what_is_no_run_cannot_be_exported(tmp_path: Path, capsys) -> None:
    assert "holds no model" in said(capsys, "export", str(tmp_path), "--out", str(tmp_path / "out"))


@pytest.mark.parametrize("command", [["recommend", "--user", "u1"], ["evaluate", "--no-baselines"]])
def test_products_are_computed_by_the_library_that_the_run_began_with(
    run: str, tmp_path: Path, capsys, monkeypatch, command: list[str]
) -> None:
    """Would catch a model asked with the library of this machine's rule, whose sums differ in the last bit."""
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    config = json.loads((folder / "config.json").read_text())
    config["device"]["gemm"] = other = "mkl" if gemm.rule()[0] == "onednn" else "onednn"
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(gemm, "_taken", taken := [])
    assert main([command[0], str(folder), *command[1:]]) == 0
    assert taken == [other if gemm._linear is not None else gemm.rule()[0]]
