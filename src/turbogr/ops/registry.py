"""Which backend an operator takes, and why.

Every operator lists its backends from fastest to plainest. `pick` answers (backend, reason); an argument or the
variable TURBOGR_BACKEND forces one, and a forced one that cannot run raises with the reason. The variable speaks to the
operators that have a backend of that name; the others pick as usual.
"""

import importlib
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import turbogr.ops
from turbogr.errors import ConfigError, did_you_mean


def always(device: torch.device) -> str | None:
    """For backends that run everywhere."""
    return None


@dataclass(frozen=True)
class Backend:
    name: str
    run: Callable[..., Any]
    rejects: Callable[[torch.device], str | None] = always
    """Why it cannot run on a device, or None."""


@dataclass(frozen=True)
class Operator:
    name: str
    backends: tuple[Backend, ...]

    def pick(self, device: torch.device, forced: str | None = None) -> tuple[Backend, str]:
        """The backend for tensors on `device` and the reason for it."""
        if forced:
            return self._forced(device, forced, "asked for")
        everywhere = os.environ.get("TURBOGR_BACKEND")
        if everywhere and (self._has(everywhere) or not any(one._has(everywhere) for one in _all_operators())):
            return self._forced(device, everywhere, "TURBOGR_BACKEND")
        passed_over: list[str] = []
        for backend in self.backends:
            refusal = backend.rejects(device)
            if refusal is None:
                return backend, "; ".join([*passed_over, f"fastest that runs on {device.type}"])
            passed_over.append(f"{backend.name}: {refusal}")
        raise ConfigError(f"no backend of {self.name} runs on {device}: {'; '.join(passed_over)}.")

    def _has(self, name: str) -> bool:
        return any(backend.name == name for backend in self.backends)

    def _forced(self, device: torch.device, wanted: str, why: str) -> tuple[Backend, str]:
        names = [backend.name for backend in self.backends]
        if wanted not in names:
            raise ConfigError(
                f"{self.name} has no backend {wanted!r}{did_you_mean(wanted, names)}; it has {', '.join(names)}."
            )
        backend = self.backends[names.index(wanted)]
        refusal = backend.rejects(device)
        if refusal is not None:
            raise ConfigError(f"backend {wanted!r} of {self.name} cannot run here: {refusal}.")
        return backend, why


_OPERATORS: dict[str, Operator] = {}


def register(name: str, *backends: Backend) -> Operator:
    """Make an operator known under `name`, its backends from fastest to plainest."""
    _OPERATORS[name] = Operator(name, backends)
    return _OPERATORS[name]


def _all_operators() -> list[Operator]:
    # an operator registers itself when its package is imported
    for found in pkgutil.iter_modules(turbogr.ops.__path__):
        if found.ispkg:
            importlib.import_module(f"turbogr.ops.{found.name}")
    return [operator for _, operator in sorted(_OPERATORS.items())]


def table(device: torch.device) -> list[tuple[str, str, str]]:
    """(operator, backend, reason) of every operator, for `turbogr doctor`."""
    rows = []
    for operator in _all_operators():
        try:
            backend, reason = operator.pick(device)
            rows.append((operator.name, backend.name, reason))
        except ConfigError as error:
            rows.append((operator.name, "-", str(error)))
    return rows
