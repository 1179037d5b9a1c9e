"""A guard under which every public callable of torch.cuda raises, unless torch itself calls it."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

TORCH = str(Path(torch.__file__).parent)


@contextlib.contextmanager
def forbidden() -> Iterator[None]:
    """`with forbidden(): train(...)` fails at the first call of torch.cuda that is ours."""
    public = {name: getattr(torch.cuda, name) for name in dir(torch.cuda) if not name.startswith("_")}
    kept = {name: value for name, value in public.items() if callable(value)}
    try:
        for name, value in kept.items():
            guard = _GuardedClass(name, (), {"kept": value}) if isinstance(value, type) else _guarded(name, value)
            setattr(torch.cuda, name, guard)
        yield
    finally:
        for name, value in kept.items():
            setattr(torch.cuda, name, value)


def _check(name: str) -> None:
    caller = sys._getframe(2).f_code.co_filename
    assert caller.startswith(TORCH), f"torch.cuda.{name} called from {caller}: use turbogr.device"


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def guard(*args: Any, **kwargs: Any) -> Any:
        _check(name)
        return function(*args, **kwargs)

    return guard


class _GuardedClass(type):
    """Stands for a class: isinstance goes on working, making one is checked."""

    kept: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        _check(cls.__name__)
        return cls.kept(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.kept)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.kept, name)
