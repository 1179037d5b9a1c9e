"""The compiled operators under each instruction set that this processor runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from turbogr.ops import native


def runnable() -> list[str]:
    """Plainest first; empty where nothing is compiled for this machine."""
    return native.runnable()


@contextmanager
def forced(name: str, library: str, symbols: Callable[..., Any]) -> Iterator[None]:
    """Within, `library` is the one of instruction set `name`; `symbols` is the cache of its functions."""
    caches = (native.instruction_set, native.library, symbols)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native.FORCED_SET, name)
        for cache in caches:
            cache.cache_clear()
        refusal = native.rejects(library)(torch.device("cpu"))
        if refusal is not None:
            pytest.skip(refusal)
        if native.library_set(library) != name:
            pytest.skip(f"{library} has no code of its own for {name}")
        yield
    for cache in caches:
        cache.cache_clear()
