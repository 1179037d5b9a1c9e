"""`benchmarks.peers`: both sides train on the same events, count the same tokens, and the ratio is the right way up."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import peers
from benchmarks.ops_measure import Process
from benchmarks.ops_step import random_store
from tests.support.tiny_store import tiny_store
from turbogr.data.store import Store

FACTS = {"tokens_per_epoch": 10, "threads": 2, "allocator": "tuned", "time_buckets": 9}
CHATTY_SIDE = """
from benchmarks.peers_link import Link
link = Link({"name": "chatty"})
link.wait()
for step in range(100):
    print("a library's words")
    link.step(tokens=10 + step, loss=1 / (step + 1))
"""


class FakeSide:
    """Answers what it is told to."""

    def __init__(self, rate: float, peak_gib: float, **facts: Any) -> None:
        self.facts, self.answers = {**FACTS, **facts}, [{"peak_gib": peak_gib}]
        self.rate, self.open = rate, True

    def ready(self) -> None:
        assert self.open

    def train(self, steps: int) -> float:
        return self.rate

    def close(self) -> None:
        self.open = False


def measured(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> tuple[peers.Part, dict[str, FakeSide]]:
    """What comes of sides of which theirs says `facts`."""
    sides = {"theirs": FakeSide(10.0, 4.0, **facts), "ours": FakeSide(120.0, 1.0)}
    monkeypatch.setattr(peers, "sides_of", lambda *_: sides)
    return peers.measure("hstu", Path("store"), Path("python"), Path("scratch"), quick=True), sides


def test_more_tokens_and_less_memory_are_a_rate_above_and_a_ratio_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a ratio upside down, a process that is left running."""
    part, sides = measured(monkeypatch)
    assert part.figures == {
        "peer_hstu_x": 12.0,
        "peer_hstu_memory_ratio": 0.25,
        "hstu_tokens_per_s": 120.0,
        "peer_hstu_tokens_per_s": 10.0,
    }
    assert not any(side.open for side in sides.values())


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"tokens_per_epoch": 20}, "tokens_per_epoch differ: ours 10, theirs 20"),
        ({"threads": 1}, "threads differ: ours 2, theirs 1"),
        ({"allocator": "left alone"}, "allocator differ: ours tuned, theirs left alone"),
        ({"time_buckets": 1}, "all of RecTools' time differences fall into one bucket"),
    ],
)
def test_sides_that_do_not_compare_have_no_figure(
    facts: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a peer that trains on less, with fewer threads, without the tuned allocator or with a dead time bias."""
    part, sides = measured(monkeypatch, **facts)
    assert set(part.figures.values()) == {None}
    assert part.reasons == dict.fromkeys(peers.figures_of("hstu"), said)
    assert not any(side.open for side in sides.values())


def test_without_an_environment_every_figure_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: a quick run that installs, fails, or leaves a key out."""
    monkeypatch.setattr(
        sys, "argv", ["peers", "--quick", "--environment", str(tmp_path / "none"), "--out", str(tmp_path)]
    )
    peers.main()
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    reasons = figures.pop("reasons")
    assert {"peer_hstu_x", "peer_hstu_large_x", "peer_sasrec_x"} <= set(figures)
    assert set(figures.values()) == {None}
    assert reasons == dict.fromkeys(figures, "no environment none with rectools[torch]==0.19.0: a full run makes it")
    assert not (tmp_path / "none").exists()


def test_an_environment_that_cannot_be_made_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: half an environment that the next run takes for a whole one."""
    monkeypatch.setattr(peers, "REQUIREMENTS", ("--no-index", "a-package-that-is-nowhere"))
    monkeypatch.setenv("PIP_DISABLE_PIP_VERSION_CHECK", "1")
    with pytest.raises(OSError, match="the environment cannot be made: .*a-package-that-is-nowhere"):
        peers.environment(tmp_path / "made", make=True)
    with pytest.raises(OSError, match="no environment made"):
        peers.environment(tmp_path / "made", make=False)


def test_the_peer_gets_every_event_but_the_last_of_each_user(tmp_path: Path) -> None:
    """Catches: test events in the peer's training, or another order."""
    store = tiny_store(
        tmp_path / "store", [[4, 5, 6], [7], [], [8, 9]], [[5, 6, 60], [1], [], [2, 8]], time_units_per_second=2
    )
    peers.write_events(store, tmp_path / "events.npz")
    events = np.load(tmp_path / "events.npz")
    assert {name: events[name].tolist() for name in events} == {
        "user": [0, 0, 3],
        "item": [4, 5, 8],
        "second": [2, 3, 1],
    }


def test_a_side_answers_in_turn_and_ends_when_nobody_asks() -> None:
    """Catches: words of a library among the answers, tokens of a step that was not asked for, a process left behind."""
    side = Process([sys.executable, "-c", CHATTY_SIDE])
    assert side.ask("facts")["name"] == "chatty"
    first, second = side.ask("2"), side.ask("3")
    assert (first["tokens"], second["tokens"]) == (10 + 11, 12 + 13 + 14)
    assert (first["loss"], second["loss"]) == (1 / 2, 1 / 5)
    assert min(first["seconds"], second["seconds"], first["peak_gib"]) > 0
    side.close()
    assert side._process.returncode == 0


def test_our_side_trains_on_the_tokens_that_the_peer_gets(tmp_path: Path) -> None:
    """Catches: an epoch of ours that has other tokens than the peer's events make, or a trainer that does not run."""
    store = random_store(tmp_path, users=30)
    peers.write_events(Store.open(store), tmp_path / "events.npz")
    wanted = int(np.minimum(np.bincount(np.load(tmp_path / "events.npz")["user"]) - 1, 200).sum())
    arguments = {"model": "hstu", "store": str(store), "threads": 1, "scratch": str(tmp_path / "run")}
    side = peers.Side([sys.executable, "-m", "benchmarks.peers_ours"], arguments)
    side.ready()
    assert side.train(3) > 0  # the thirty users are one batch: three epochs
    side.close()
    assert side.facts["tokens_per_epoch"] == wanted
    assert side.answers[0]["tokens"] == 3 * wanted
    assert np.isfinite(side.answers[0]["loss"])
