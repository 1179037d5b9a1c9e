"""Arguments of a verb: a dataclass, read by tyro; every mistake is one sentence.

The docstring of the dataclass is the verb's help; what follows its line `Examples:` is printed after the options.
"""

import contextlib
import dataclasses
import inspect
import io
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import tyro

from turbogr.config import Config, check, load
from turbogr.errors import ConfigError, UserError, did_you_mean

A = TypeVar("A")
WIDTH = 100

_CONFIG = " [CONFIG]"
_CONFIG_NOTE = """

Settings come from the defaults, then CONFIG (a TOML file, a run's folder or its config.json), then the flags below,
which are the file's keys: `epochs` under `[train]` is --train.epochs. Hyphens and underscores are the same."""


def parse(verb: str, cls: type[A], args: list[str]) -> A:
    """`args` as an instance of dataclass `cls`; a positional is a field annotated with tyro.conf.Positional."""
    text, examples = _texts(cls)
    return _run_tyro(verb, cls, args, text, examples, None)


def config_from(verb: str, extra: type[A], args: list[str]) -> tuple[Config, A]:
    """The checked config of `turbogr VERB [CONFIG] [--a.b c ...]` and the verb's own flags, dataclass `extra`.

    Every field of `extra` needs a default.
    """
    given = args and not args[0].startswith("-")
    base = load_config(args[0]) if given else Config()
    text, examples = _texts(extra)
    both = dataclasses.make_dataclass(
        "Both",
        [
            ("verb", Annotated[extra, tyro.conf.arg(name="")]),
            ("config", Annotated[Config, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]),
        ],
    )
    parsed: Any = _run_tyro(
        verb + _CONFIG, both, args[1:] if given else args, text + _CONFIG_NOTE, examples, both(extra(), base)
    )
    check(parsed.config)
    return parsed.config, parsed.verb


def load_config(path: str | Path) -> Config:
    """The config of a TOML file, of a run's folder or of its config.json."""
    path = Path(path)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise ConfigError(f"{path} is not a run: it holds no config.json.")
        path = path / "config.json"
    return load(path)


def _run_tyro(usage: str, cls: type[A], args: list[str], text: str, examples: str, default: A | None) -> A:
    verb = usage.removesuffix(_CONFIG)
    args = _checked(args, dict(_flags(cls)), verb)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed, stray = tyro.cli(
                cls,
                prog=f"turbogr {usage}",
                description=_wrapped(text),
                args=args,
                default=tyro.MISSING_NONPROP if default is None else default,
                return_unknown_args=True,
                config=(tyro.conf.FlagCreatePairsOff,),
            )
    except SystemExit as leave:
        if leave.code:
            raise UserError(_complaint(complaint.getvalue(), verb)) from None
        print(f"Examples:\n{examples}")
        sys.stdout.flush()
        raise
    if stray:
        place = "CONFIG comes first, right after the verb" if usage != verb else f"see `turbogr {verb} --help`"
        raise UserError(f"unexpected argument {stray[0]!r}: {place}.")
    return cast(A, parsed)


def _texts(cls: type) -> tuple[str, str]:
    """The docstring of an arguments class: description, examples."""
    text, _, examples = (inspect.getdoc(cls) or "").partition("Examples:\n")
    return text.strip(), examples.rstrip()


def _wrapped(text: str) -> str:
    width = min(shutil.get_terminal_size().columns, WIDTH)
    # tyro joins lines that begin with a letter and does not wrap them again: each of ours begins with a blank
    return "\n\n".join(
        textwrap.fill(part, width, initial_indent=" ", subsequent_indent=" ") for part in text.split("\n\n")
    )


def _flags(cls: type, prefix: str = "--") -> Iterator[tuple[str, Any]]:
    """(flag, type) of every option that tyro makes of `cls`."""
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        extras = typing.get_args(hint)[1:] if typing.get_origin(hint) is Annotated else ()
        kind = typing.get_args(hint)[0] if extras else hint
        if tyro.conf.Positional in extras or typing.get_origin(hint) is typing.ClassVar:
            continue
        if not dataclasses.is_dataclass(kind):
            yield prefix + name.replace("_", "-"), kind
        elif prefix == "--" and extras:
            yield from _flags(cast(type, kind))
        else:
            yield from _flags(cast(type, kind), f"{prefix}{name.replace('_', '-')}.")


def _checked(args: list[str], flags: dict[str, Any], verb: str) -> list[str]:
    """Refuse unknown flags by name; spell the TOML booleans true and false as tyro wants them."""
    checked, flag = [], ""
    for arg in args:
        before, flag = flag, ""
        if arg.startswith("--"):
            flag = arg.split("=")[0].replace("_", "-")
            if flag not in flags and flag != "--help":
                raise UserError(
                    f"unknown option {arg.split('=')[0]}{did_you_mean(flag, flags)}: see `turbogr {verb} --help`."
                )
        elif flags.get(before) is bool and arg in ("true", "false"):
            arg = arg.capitalize()
        checked.append(arg)
    return checked


def _complaint(box: str, verb: str) -> str:
    """One sentence of the framed text that tyro prints about a wrong or missing value, framed in UTF-8 or in ASCII."""
    plain = box.translate(str.maketrans("─", "-", "╭╮╰╯│"))
    title, *lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    is_rule = [set(line.strip()) == {"-"} for line in lines]
    begin = is_rule.index(False)
    content = lines[begin : is_rule.index(True, begin)] if True in is_rule[begin:] else lines[begin:]
    if "Required options" in title:
        # "Missing from VERB:", then every argument with its help one step further in
        indent = [len(line) - len(line.lstrip()) for line in content]
        names = [line.strip() for line, place in zip(content, indent, strict=True) if place == min(indent[1:])]
        return f"`turbogr {verb}` needs {', '.join(names)}: see `turbogr {verb} --help`."
    body = " ".join(line.strip() for line in content)
    option = re.match(r"Error parsing (\S+): ", body)
    if option:
        wrong = re.search(r"(?:invalid literal for int\(\) with base 10|could not convert string to float): (.*)", body)
        if wrong:
            return f"{option[1]} takes a number, not {wrong[1]}."
        values = re.search(r"Could not parse arguments \[(.*?)\] into", body)
        if values:
            return f"{option[1]} cannot take {values[1]}."
        body = body.removeprefix("Error parsing ")
    return body[:1].lower() + body[1:].rstrip(".") + "."
