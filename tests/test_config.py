"""The config: defaults, TOML, unknown keys, types and impossible combinations."""

import json
import math
import re
import typing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turbogr.config import RANGES, Config, check, from_dict, load, to_dict
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
        ({"model": {"dropout": 1.0}}, "model.dropout must be at least 0 and below 1, not 1.0"),
        ({"model": {"max_history": 70000}}, "must stay below 65536"),
        ({"train": {"batch_users": 0, "batch_tokens": 0}}, "batch_users and train.batch_tokens must be above 0"),
        ({"train": {"seed": -1}}, "train.seed must be at least 0 and below 9223372036854775808"),
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


def numeric(cls: type, prefix: str = "") -> dict[str, Any]:
    """Type of every number of a config class, by dotted name."""
    found: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if is_dataclass(hint):
            found |= numeric(typing.cast(type, hint), f"{prefix}{name}.")
        elif {int, float} & {hint, *typing.get_args(hint)}:
            found[prefix + name] = hint
    return found


def with_value(name: str, value: Any) -> Config:
    """The defaults with one setting changed, by its dotted name."""
    raw = value
    for key in reversed(name.split(".")):
        raw = {key: raw}
    return from_dict(Config, raw, "test")


def test_every_number_has_a_range_and_every_range_a_number() -> None:
    assert set(RANGES) == set(numeric(Config))


@pytest.mark.parametrize("name", numeric(Config))
def test_no_number_may_leave_its_range(name: str) -> None:
    hint, (low, high, is_open) = numeric(Config)[name], RANGES[name]
    is_float = float in (hint, *typing.get_args(hint))
    wrong = [low if is_open else low - 1]
    wrong += [high, math.inf, -math.inf, math.nan] if is_float else [high] if math.isfinite(high) else []
    for value in wrong:
        value = float(value) if is_float else value
        # both places of a pair are looked at
        for setting in [[value, 0.5], [0.5, value]] if typing.get_origin(hint) is tuple else [value]:
            with pytest.raises(ConfigError, match=rf"^{name} must be .*, not {re.escape(str(value))}\.$"):
                check(with_value(name, setting))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.batch_users", -4),
        ("train.batch_tokens", -1),
        ("device.threads", -2),
        ("dense.betas", [2, 3]),
        ("dense.eps", -1),
        ("dense.weight_decay", -1),
        ("dense.lr", math.inf),
        ("dense.clip", -3),
        ("model.sasrec.ffn_dim", -3),
        ("model.hstu.time_buckets", -1),
        ("model.hstu.bucket_width", 0),
        ("tables.betas", [2, 3]),
        ("tables.eps", -1),
        ("tables.row_clip", math.nan),
        ("train.warmup_steps", -5),
        ("train.patience", -1),
        ("train.evaluate_every", -2),
        ("train.checkpoint_every", -1),
        ("evaluate.max_users", -3),
        ("task.temperature", math.inf),
        ("negatives.power", math.nan),
    ],
)
def test_numbers_that_would_fail_later_or_mean_nothing_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        check(with_value(name, value))


@pytest.mark.parametrize(
    "name", ["train.batch_users", "train.patience", "dense.weight_decay", "tables.row_clip", "evaluate.max_users"]
)
def test_zero_is_allowed_where_it_switches_off(name: str) -> None:
    check(with_value(name, 0))
