"""Errors a user can mend: one sentence with place, fault and remedy. The CLI prints them without a traceback."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something the user can mend; the message names the place and the remedy. Exit code 2."""


class ConfigError(UserError):
    """A setting that is unknown, out of range or impossible together with another."""


class DataError(UserError):
    """A raw log or a prepared store that cannot be used as it is."""


class CheckpointError(UserError):
    """A checkpoint or an exported model that cannot be loaded."""


class TrainingError(UserError):
    """A run that had to stop: a non-finite loss, no memory left."""


class SaidByAll(UserError):
    """An error that every rank of a run raises; one of them need say it."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the nearest known name, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {near[0]!r}?)" if near else ""
