"""Settings from TOML and JSON, and back to plain mappings."""

import dataclasses
import json
import tomllib
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar

from turbogr.config.settings import Config
from turbogr.errors import ConfigError, did_you_mean

T = TypeVar("T")


def load(path: str | Path) -> Config:
    """The config of a TOML file (or of a run's config.json); what the file does not say keeps its default."""
    path = Path(path)
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist.") from None
    except (IsADirectoryError, UnicodeDecodeError):
        raise ConfigError(f"{path} is not a config file: a TOML file is wanted, as in configs/.") from None
    try:
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from None
    return from_dict(Config, raw, str(path))


def from_dict(cls: type[T], raw: Any, where: str) -> T:
    """Build dataclass `cls` from nested mappings; raises ConfigError naming place and key."""
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must be a table of settings, got {raw!r}.")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(f"{where}: unknown key {key!r}{did_you_mean(key, hints)}.")
        values[key] = _convert(hints[key], value, f"{where}: {key}")
    return cls(**values)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain mappings, as JSON and TOML hold them."""
    result: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    return result


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as type `hint`; only lossless steps (int to float, list to tuple)."""
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_dict(hint, value, where)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(
                f"{where} must be one of {', '.join(map(repr, choices))}, not {value!r}"
                f"{did_you_mean(str(value), map(str, choices))}."
            )
        return value
    if origin in (types.UnionType, typing.Union):
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return None if value is None else _convert(inner[0], value, where)
    if origin is tuple:
        kinds = typing.get_args(hint)
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise ConfigError(f"{where} must be {len(kinds)} values, not {value!r}.")
        return tuple(_convert(kind, one, where) for kind, one in zip(kinds, value, strict=True))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} must be {'an' if hint is int else 'a'} {hint.__name__}, not {value!r}.")
    return value
