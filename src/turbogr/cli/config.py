"""`turbogr config show`: the resolved config, each setting explained."""

import ast
import dataclasses
import inspect
import json
import textwrap
from dataclasses import dataclass
from typing import Any, Literal

from turbogr.cli.arguments import config_from
from turbogr.config import Config, to_dict

WIDTH = 110


@dataclass(frozen=True, kw_only=True)
class ShowArgs:
    """Print the config that a run with these arguments would have, and what each setting means.

    Examples:
      turbogr config show                                          every setting with its default
      turbogr config show configs/ml-1m/hstu.toml --model.blocks 8 a file with a change
      turbogr config show configs/ml-1m/hstu.toml > mine.toml      the start of a config of your own
      turbogr config show runs/first --format json                 what a run was trained with
    """

    format: Literal["toml", "json"] = "toml"


def show(args: list[str]) -> None:
    config, chosen = config_from("config show", ShowArgs, args)
    print(json.dumps(to_dict(config), indent=2) if chosen.format == "json" else to_toml(config))


def to_toml(config: Config) -> str:
    """The config as TOML, with every setting's docstring above it; reading it gives the config back."""
    return "\n".join(_table("", config)).strip()


def _table(path: str, part: Any) -> list[str]:
    explained = field_docs(type(part))
    lines = [f"[{path}]"] if path else []
    below: list[str] = []
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if dataclasses.is_dataclass(value):
            below += ["", *_table(f"{path}.{field.name}".lstrip("."), value)]
            continue
        lines += textwrap.wrap(explained.get(field.name, ""), WIDTH, initial_indent="# ", subsequent_indent="# ")
        # TOML has no null: a setting without a value stands as a comment.
        lines.append(f"# {field.name} is not set" if value is None else f"{field.name} = {_value(value)}")
    return lines + below


def _value(value: Any) -> str:
    if isinstance(value, bool | str):
        # the one character that JSON leaves bare and TOML forbids
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value)


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string that stands below the field in the source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return docs
