"""The config: defaults, TOML, unknown keys, types and impossible combinations."""

import json
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.config import Config, check, from_dict, load, to_dict
from turbogr.errors import ConfigError

REPOSITORY = Path(__file__).parent.parent


def toml(folder: Path, text: str) -> Path:
    path = folder / "c.toml"
    path.write_text(text)
    return path


def changed(**sections: dict[str, Any]) -> Config:
    return from_dict(Config, sections, "test")


def test_the_defaults_pass_the_check() -> None:
    check(Config())


def test_a_file_changes_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    config = load(toml(tmp_path, "[train]\nepochs = 3\n[model.hstu]\ntime_bias = false\n"))
    assert config.train.epochs == 3
    assert not config.model.hstu.time_bias
    assert replace(config, train=Config().train, model=Config().model) == Config()


def test_a_saved_config_reads_back_as_it_was(tmp_path: Path) -> None:
    config = changed(train={"epochs": 7}, tables={"betas": [0.5, 0.6]}, split={"protocol": "global-time", "time": 5})
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    assert load(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[train]\nepoch = 3", "train: unknown key 'epoch' \\(did you mean 'epochs'\\?\\)"),
        ("[trian]\nepochs = 3", "unknown key 'trian' \\(did you mean 'train'\\?\\)"),
        ("[model.hstu]\nzzz = 3", "model: hstu: unknown key 'zzz'\\.$"),
        ("[train]\nepochs = 'three'", "train: epochs must be an int, not 'three'"),
        ("[train]\nepochs = 1.5", "train: epochs must be an int, not 1.5"),
        ("[train]\nepochs = true", "train: epochs must be an int, not True"),
        ("[tables]\nlr = 'x'", "tables: lr must be a float, not 'x'"),
        ("[tables]\nbetas = [0.9]", "tables: betas must be 2 values"),
        (
            "[train]\nrate = 'cosin'",
            "train: rate must be one of 'constant', 'cosine', not 'cosin' \\(did you mean 'cosine'",
        ),
        ("train = 3", "train must be a table of settings, got 3"),
        ("[train", "cannot be read"),
    ],
)
def test_a_wrong_file_is_one_sentence_with_place_and_key(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        load(toml(tmp_path, text))
    assert "c.toml" in str(error.value)


def test_a_missing_file_or_a_folder_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none.toml does not exist"):
        load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="is not a config file"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"train": {"epochs": 0}}, "train.epochs must be at least 1"),
        ({"model": {"dim": 50, "heads": 4}}, "model.dim 50 is not a multiple of model.heads 4"),
        ({"model": {"dropout": 1.0}}, "model.dropout must lie in"),
        ({"model": {"max_history": 70000}}, "must stay below 65536"),
        ({"train": {"batch_users": 0, "batch_tokens": 0}}, "batch_users and train.batch_tokens must be above 0"),
        ({"train": {"seed": -1}}, "train.seed must lie in"),
        ({"split": {"protocol": "global-time"}}, "needs split.time"),
        ({"split": {"protocol": "global-time", "time": 5, "validation_time": 5}}, "must lie before split.time"),
        ({"split": {"time": 5}}, "belong to the protocol global-time"),
        ({"train": {"patience": 2}}, "train.select_on_test true"),
        ({"tables": {"weight_decay": 0.1}}, "tables.weight_decay needs tables.optimizer adamw"),
        ({"model": {"name": "sasrec", "hstu": {"time_bias": False}}}, "model.hstu settings mean nothing"),
        ({"model": {"sasrec": {"ffn_dim": 8}}}, "model.sasrec settings mean nothing"),
        ({"dense": {"lr": 0.0}}, "dense.lr must be above 0"),
    ],
)
def test_what_cannot_work_is_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check(changed(**sections))


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"patience": 2}, "split": {"protocol": "leave-one-out-validation"}},
        {"train": {"patience": 2, "select_on_test": True}},
        {"split": {"protocol": "global-time", "time": 5, "validation_time": 4}},
        {"tables": {"weight_decay": 0.1, "optimizer": "adamw"}},
    ],
)
def test_what_can_work_is_not_refused(sections: dict[str, Any]) -> None:
    check(changed(**sections))


def test_every_shipped_config_loads_and_passes() -> None:
    found = sorted((REPOSITORY / "configs").rglob("*.toml"))
    for path in found:
        check(load(path))


def keys(part: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for field in fields(part):
        path = (*prefix, field.name)
        value = getattr(part, field.name)
        found += keys(value, path) if is_dataclass(value) else [path]
    return found


@given(st.sampled_from(keys(Config())), st.text("abcdefghij", min_size=1, max_size=4))
def test_a_misspelt_key_anywhere_names_its_place(path: tuple[str, ...], ending: str) -> None:
    raw: Any = 1
    for key in reversed((*path[:-1], f"{path[-1]}_{ending}")):
        raw = {key: raw}
    with pytest.raises(ConfigError, match=f"unknown key '{path[-1]}_{ending}'"):
        from_dict(Config, raw, "test")
