"""Which backend an operator takes, and what is said when it cannot."""

from pathlib import Path

import pytest
import torch

from turbogr.errors import ConfigError
from turbogr.ops import registry
from turbogr.ops.registry import Backend, Operator

CPU = torch.device("cpu")
OPERATOR = Operator(
    "toy",
    (
        Backend("fast", lambda: None, lambda device: None if device.type == "cuda" else "needs a GPU"),
        Backend("plain", lambda: None, lambda device: "is broken" if device.type == "meta" else None),
    ),
)


@pytest.fixture(autouse=True)
def no_choice_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURBOGR_BACKEND", raising=False)


def test_the_first_that_runs_is_taken_and_says_why_faster_ones_were_not() -> None:
    backend, reason = OPERATOR.pick(CPU)
    assert backend.name == "plain" and reason == "fast: needs a GPU; fastest that runs on cpu"
    assert OPERATOR.pick(torch.device("cuda"))[0].name == "fast"


def test_a_forced_backend_that_cannot_run_raises_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a silent fall-back, which makes a measurement say the wrong thing."""
    with pytest.raises(ConfigError, match="backend 'fast' of toy cannot run here: needs a GPU"):
        OPERATOR.pick(CPU, "fast")
    monkeypatch.setenv("TURBOGR_BACKEND", "fast")
    with pytest.raises(ConfigError, match="needs a GPU"):
        OPERATOR.pick(CPU)


def test_the_argument_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURBOGR_BACKEND", "fast")
    assert OPERATOR.pick(CPU, "plain") == (OPERATOR.backends[1], "asked for")
    monkeypatch.setenv("TURBOGR_BACKEND", "plain")
    assert OPERATOR.pick(CPU)[1] == "TURBOGR_BACKEND"


def test_the_environment_speaks_only_to_operators_that_have_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a variable for one operator that stops training in another, and a misspelt one that is passed over."""
    monkeypatch.setenv("TURBOGR_BACKEND", "tiles")
    assert OPERATOR.pick(CPU)[0].name == "plain"
    monkeypatch.setenv("TURBOGR_BACKEND", "tyles")
    with pytest.raises(ConfigError, match="no backend 'tyles'"):
        OPERATOR.pick(CPU)


def test_an_unknown_backend_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"toy has no backend 'plane' \(did you mean 'plain'\?\); it has fast, plain"):
        OPERATOR.pick(CPU, "plane")


def test_none_that_runs_says_why_each_was_passed_over() -> None:
    with pytest.raises(ConfigError, match="no backend of toy runs on meta: fast: needs a GPU; plain: is broken"):
        OPERATOR.pick(torch.device("meta"))


def test_the_table_lists_every_operator() -> None:
    """Catches: an operator that doctor does not know."""
    folders = {path.parent.name for path in Path(registry.__file__).parent.glob("*/__init__.py")}
    assert {name for name, _, _ in registry.table(CPU)} == folders - {"native"}
