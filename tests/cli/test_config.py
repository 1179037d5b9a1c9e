"""`turbogr config show`, and how every config-taking verb reads its arguments."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turbogr import cli
from turbogr.cli.arguments import config_from
from turbogr.cli.config import field_docs, to_toml
from turbogr.config import Config, ModelConfig, TrainConfig, from_dict, load, to_dict
from turbogr.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Extra:
    """Words.

    Examples:
      turbogr x
    """

    dry_run: bool = False
    """Stop early."""
    seeds: tuple[int, ...] = ()


def read(*args: str) -> tuple[Config, Extra]:
    return config_from("train", Extra, list(args))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "c.toml"
    path.write_text("[train]\nepochs = 3\nseed = 4\n[tables]\nbetas = [0.1, 0.2]\n")
    return str(path)


def test_defaults_then_file_then_flags(file: str) -> None:
    config, _ = read(file, "--train.epochs", "5", "--model.hstu.time-buckets=9")
    assert (config.train.epochs, config.train.seed) == (5, 4)
    assert config.tables.betas == (0.1, 0.2)
    assert config.model.hstu.time_buckets == 9
    assert config.dense == Config().dense


def test_without_a_file_the_defaults_stand() -> None:
    assert read() == (Config(), Extra())


def test_a_run_folder_gives_the_config_it_was_trained_with(tmp_path: Path) -> None:
    trained = dataclasses.replace(Config(), train=TrainConfig(epochs=77))
    (tmp_path / "config.json").write_text(json.dumps(to_dict(trained)))
    assert read(str(tmp_path))[0] == trained
    assert read(str(tmp_path / "config.json"))[0] == trained


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run: it holds no config.json"):
        read(str(tmp_path))


def test_the_verbs_own_flags_stand_beside_the_config(file: str) -> None:
    config, extra = read(file, "--dry-run", "--train.epochs", "2", "--seeds", "0", "1")
    assert extra == Extra(dry_run=True, seeds=(0, 1))
    assert config.train.epochs == 2


def test_hyphens_and_underscores_are_the_same() -> None:
    assert read("--train.batch_users", "7")[0] == read("--train.batch-users", "7")[0]


@pytest.mark.parametrize("word", ["true", "True"])
def test_booleans_are_written_as_in_toml_or_python(word: str) -> None:
    assert read("--negatives.logq", word)[0].negatives.logq


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["--train.epoch", "3"],
            r"unknown option --train.epoch \(did you mean '--train.epochs'\?\): see `turbogr train --help`",
        ),
        (["--epochs=3"], r"unknown option --epochs \(did you mean '--train.epochs'\?\)"),
        (["--dryrun"], r"did you mean '--dry-run'"),
        (["--train.epochs", "x"], "--train.epochs takes a number, not 'x'.$"),
        (["--tables.lr", "fast"], "--tables.lr takes a number, not 'fast'.$"),
        (["--train.epochs"], "[Mm]issing value for argument '--train.epochs'"),
        (["--tables.betas", "0.9", "b"], "--tables.betas cannot take '0.9', 'b'.$"),
        (["--train.rate", "cosin"], "invalid choice 'cosin' for argument '--train.rate'. Expected one of .*'cosine'"),
        (["--train.epochs", "3", "c.toml"], "unexpected argument 'c.toml': CONFIG comes first"),
        (["--train.epochs", "0"], "train.epochs must be at least 1"),
        (["--model.heads", "3"], "not a multiple of model.heads 3"),
        (["none.toml"], "none.toml does not exist"),
    ],
)
def test_a_wrong_argument_is_one_sentence(args: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        read(*args)
    assert "\n" not in str(error.value)
    assert "─" not in str(error.value)


def test_a_long_wrong_value_is_still_one_sentence() -> None:
    """tyro wraps its framed message; a frame must not get into ours."""
    with pytest.raises(UserError) as error:
        read("--train.rate", "a-value-that-is-much-longer-than-one-line-of-the-frame " * 3)
    assert not set("│─╭╰\n") & set(str(error.value))


@pytest.mark.parametrize("environment", [{"COLUMNS": "20"}, {"COLUMNS": "300"}, {"PYTHONIOENCODING": "ascii"}])
@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["config", "show", "--split.time", "x"], "--split.time takes a number, not 'x'."),
        (
            ["data", "prepare", "table"],
            "`turbogr data prepare` needs PATH, --out STORE: see `turbogr data prepare --help`.",
        ),
    ],
)
def test_terminals_of_any_width_and_encoding_show_one_sentence(
    args: list[str], sentence: str, environment: dict[str, str]
) -> None:
    """tyro frames its messages by the terminal's width, in UTF-8 or in ASCII; the frame is cut off."""
    outcome = subprocess.run(
        [sys.executable, "-m", "turbogr", *args], capture_output=True, text=True, env=os.environ | environment
    )
    assert (outcome.returncode, outcome.stderr) == (2, f"turbogr: {sentence}\n")


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert cli.main(["config", "show", *args]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def test_what_config_show_prints_reads_back_as_the_same_config(tmp_path: Path, capsys, file: str) -> None:
    (tmp_path / "again.toml").write_text(shown(capsys, file, "--split.protocol", "global-time", "--split.time", "9"))
    again = load(tmp_path / "again.toml")
    assert again == read(file, "--split.protocol", "global-time", "--split.time", "9")[0]
    assert again.split.time == 9


def test_json_is_what_a_run_saves(capsys, file: str) -> None:
    assert json.loads(shown(capsys, file, "--format", "json")) == to_dict(load(file))


def test_every_setting_stands_under_its_explanation(capsys) -> None:
    lines = shown(capsys).splitlines()
    place = lines.index('store = ""')
    assert lines[place - 1] == "# " + field_docs(type(Config().data))["store"]
    assert "# time is not set" in lines
    assert field_docs(ModelConfig)["dim"] == "Width of the item embedding and of the encoder."


def test_a_config_that_cannot_work_is_not_shown(capsys) -> None:
    assert cli.main(["config", "show", "--train.epochs", "0"]) == 2
    assert capsys.readouterr().out == ""


@given(store=st.text(), rate=st.floats(1e-300, 1e300), seed=st.integers(0, 2**62))
@example(store='\x7f\x00"\\\n\u0085', rate=1e300, seed=0)
def test_any_value_survives_toml(store: str, rate: float, seed: int) -> None:
    raw = {"data": {"store": store}, "tables": {"lr": rate}, "train": {"seed": seed}}
    config = from_dict(Config, raw, "test")
    assert from_dict(Config, tomllib.loads(to_toml(config)), "toml") == config
