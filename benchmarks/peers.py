"""Training against RecTools, the public library with both models: real tokens per second, and the memory beside it.

    python -m benchmarks.peers [--quick] [--data DIR] [--out DIR]

The ML-1M recipes of configs/ on both sides: same events, order, sizes, loss (sampled softmax, cosine / temperature),
negatives, threads and tuned allocator, data loading included. RecTools runs in an environment of its own, .venv-peers,
which a full run makes. Each side is a process that trains some steps when asked; the sides take turns. A real token
is one with a loss: padding does not count. RecTools knows only items that it trains on and draws negatives among those;
its loader makes a batch in a hundredth of a step's time and needs no workers.

Figures for hstu, hstu_large and sasrec: peer_NAME_x (tokens per second, ours / theirs), peer_NAME_memory_ratio (peak
of the process, ours / theirs), NAME_tokens_per_s, peer_NAME_tokens_per_s.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT, finish, interleaved, parser, summary
from benchmarks.ops_measure import Part, Process, Settings
from benchmarks.ops_step import config_of, random_store, store_like_ml1m
from turbogr.data.store import Store

MODELS = {
    "hstu": ("hstu", "HSTUModel"),
    "hstu_large": ("hstu-large", "HSTUModel"),
    "sasrec": ("sasrec", "SASRecModel"),
}
"""Key of the figures -> (recipe in configs/ml-1m, RecTools' class)."""
REQUIREMENTS = ("torch==2.13.0", "numpy<2", "rectools[torch]==0.19.0")
ROUNDS, ROUNDS_QUICK = 7, 1
STEPS = {"ours": 24, "theirs": 4}
STEPS_QUICK = {"ours": 4, "theirs": 1}
"""In a round; ours does more in less time. One round of each warms up."""
USERS_QUICK = 1024


class Side:
    """A process that trains (see peers_link) and what it answered."""

    def __init__(self, program: Sequence[str], arguments: Mapping[str, Any]) -> None:
        self._process = Process([*program, json.dumps(arguments)], {"PYTHONPATH": str(ROOT / "src")})
        self.facts: dict[str, Any] = {}
        self.answers: list[dict[str, Any]] = []

    def ready(self) -> None:
        self.facts = self._process.ask("facts")

    def train(self, steps: int) -> float:
        """Real tokens per second."""
        answer = self._process.ask(str(steps))
        self.answers.append(answer)
        return float(answer["tokens"] / answer["seconds"])

    def close(self) -> None:
        self._process.close()


def environment(folder: Path, make: bool) -> Path:
    """The Python that has RecTools; raises OSError with the reason where there is none."""
    python, done, wanted = folder / "bin" / "python", folder / ".installed", "\n".join(REQUIREMENTS)
    if not done.exists() or done.read_text() != wanted:
        if not make:
            raise OSError(f"no environment {folder.name} with {wanted.splitlines()[-1]}: a full run makes it")
        for command in (
            [sys.executable, "-m", "venv", "--clear", folder],
            [python, "-m", "pip", "install", "--quiet", *REQUIREMENTS],
        ):
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            if said.returncode:
                raise OSError(f"the environment cannot be made: {(said.stderr.strip().splitlines() or ['?'])[-1]}")
        done.write_text(wanted)
    return python


def write_events(store: Store, target: Path) -> None:
    """What both sides train on, in the store's order: every event but each user's last, which our split holds out."""
    offsets = np.asarray(store.offsets)
    counts = np.diff(offsets)
    kept = np.ones(store.num_events, dtype=bool)
    kept[offsets[1:][counts > 0] - 1] = False
    user = np.repeat(np.arange(len(counts)), counts)
    seconds = store.seconds(0, store.num_events)
    np.savez(target, user=user[kept], item=np.asarray(store.item)[kept], second=seconds[kept])


def sides_of(name: str, store: Path, python: Path, scratch: Path) -> dict[str, Side]:
    recipe, peer = MODELS[name]
    config, threads = config_of(recipe, store), torch.get_num_threads()
    ours = {"model": recipe, "store": str(store), "threads": threads, "scratch": str(scratch / recipe)}
    theirs = {
        "model": peer,
        "events": str(scratch / "events.npz"),
        "threads": threads,
        "temperature": config.task.temperature,
        "n_blocks": config.model.blocks,
        "n_heads": config.model.heads,
        "n_factors": config.model.dim,
        "session_max_len": config.model.max_history,
        "dropout_rate": config.model.dropout,
        "n_negatives": config.negatives.count,
        "batch_size": config.train.batch_users,
        "lr": config.dense.lr,
    }
    return {
        "theirs": Side([str(python), "-m", "benchmarks.peers_rectools"], theirs),
        "ours": Side([sys.executable, "-m", "benchmarks.peers_ours"], ours),
    }


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Why the two sides' rates would not compare; empty where they do."""
    found = [
        f"{what} differ: ours {ours[what]}, theirs {theirs[what]}"
        for what in ("tokens_per_epoch", "threads", "allocator")
        if ours[what] != theirs[what]
    ]
    if theirs.get("time_buckets", 2) < 2:
        found.append("all of RecTools' time differences fall into one bucket")
    return found


def measure(name: str, store: Path, python: Path, scratch: Path, quick: bool) -> Part:
    part = Part()
    sides = sides_of(name, store, python, scratch)
    try:
        for side in sides.values():
            side.ready()
        wrong = differences(sides["ours"].facts, sides["theirs"].facts)
        if wrong:
            part.missing(figures_of(name), "; ".join(wrong))
            return part
        steps = STEPS_QUICK if quick else STEPS
        turns = {which: lambda which=which, side=side: side.train(steps[which]) for which, side in sides.items()}
        interleaved(turns, 1)
        rates = interleaved(turns, ROUNDS_QUICK if quick else ROUNDS)
    finally:
        for side in sides.values():
            side.close()
    ours, theirs = (statistics.median(rates[which]) for which in ("ours", "theirs"))
    peaks = {which: side.answers[-1]["peak_gib"] for which, side in sides.items()}
    values = (ours / theirs, peaks["ours"] / peaks["theirs"], ours, theirs)
    part.figures |= dict(zip(figures_of(name), values, strict=True))
    part.details[name] = {
        which: {
            "tokens_per_s": summary(rates[which]),
            "peak_gib": peaks[which],
            "facts": side.facts,
            "rounds": side.answers,
        }
        for which, side in sides.items()
    }
    return part


def figures_of(name: str) -> list[str]:
    return [f"peer_{name}_x", f"peer_{name}_memory_ratio", f"{name}_tokens_per_s", f"peer_{name}_tokens_per_s"]


def compare(arguments: argparse.Namespace) -> Part:
    part = Part()
    names = [figure for name in MODELS for figure in figures_of(name)]
    if arguments.device != "cpu":
        part.missing(names, "the peers are compared on the CPU")
        return part
    try:
        python = environment(arguments.environment, make=not arguments.quick)
    except OSError as reason:
        part.missing(names, str(reason))
        return part
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        if arguments.quick:
            store = random_store(scratch, USERS_QUICK)
        else:
            store = store_like_ml1m(Settings(quick=False, data=arguments.data), scratch)
        write_events(Store.open(store), scratch / "events.npz")
        for name in MODELS:
            part.add(measure(name, store, python, scratch, arguments.quick))
        part.details["store"] = store.name
    return part


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--environment", type=Path, default=ROOT / ".venv-peers", help="where RecTools is, or will be")
    arguments = made.parse_args()
    part = compare(arguments)
    finish("peers", arguments, {**part.figures, "reasons": part.reasons}, part.details)


if __name__ == "__main__":
    main()
