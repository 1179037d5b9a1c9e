"""Which backend an operator takes, and why.

Every operator lists its backends from fastest to plainest. `pick` answers (backend, reason); an argument or the
variable TURBOGR_BACKEND forces one, and a forced one that cannot run raises with the reason.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

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
        wanted = forced or os.environ.get("TURBOGR_BACKEND")
        if wanted:
            return self._forced(device, wanted, "asked for" if forced else "TURBOGR_BACKEND")
        passed_over: list[str] = []
        for backend in self.backends:
            refusal = backend.rejects(device)
            if refusal is None:
                return backend, "; ".join([*passed_over, f"fastest that runs on {device.type}"])
            passed_over.append(f"{backend.name}: {refusal}")
        raise ConfigError(f"no backend of {self.name} runs on {device}: {'; '.join(passed_over)}.")

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


def table(device: torch.device) -> list[tuple[str, str, str]]:
    """(operator, backend, reason) of every operator, for `turbogr doctor`."""
    # an operator registers itself when its package is imported
    from turbogr.ops import dropout, hstu_attention, philox, sampled_softmax, softmax_attention

    assert dropout and hstu_attention and philox and sampled_softmax and softmax_attention
    rows = []
    for name, operator in sorted(_OPERATORS.items()):
        try:
            backend, reason = operator.pick(device)
            rows.append((name, backend.name, reason))
        except ConfigError as error:
            rows.append((name, "-", str(error)))
    return rows
