"""A large embedding table on the CPU: forward, backward and update of a step, and what it holds in memory.

    python -m benchmarks.table [--quick] [--data DIR] [--out DIR]

10 million rows of 64 (quick: 2 million), 100,000 Zipf(1.05) ids a step, the step that the trainer does:
table.lookup -> rows.at -> backward -> table.apply. Each ratio is between like optimizers that take turns in one run,
all with the tuned allocator and huge pages; the rows are compared before anything is timed.

    vs_sparse_adam_x       nn.Embedding(sparse=True) + SparseAdam / ours with lazy Adam
    vs_tbe_x               fbgemm's TBE with row-wise Adagrad / ours; without pooling, as TorchRec's EmbeddingCollection
                           calls it for sequences; in an environment of its own, .venv-tbe, which a full run makes
    vs_tbe_bags_x          the same by its other code path, bags of one id each: the same rows, and much faster
    unbounded_ratio        a table of unbounded ids, all of them known / the bounded one; row-wise Adagrad
    unbounded_new_ratio    the same where one occurrence in a hundred is an id never seen before
    memory_ratio           peak of a process that makes a table and trains it, over weights and optimizer state: the
                           larger of lazy Adam and Adagrad (quick: lazy Adam, 1 million rows)
    copy_share             bytes that a row-wise Adagrad step must move per second, over those of a large copy
    max_rel_error          of the rows after three steps, against the baselines
"""

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import ROOT, finish, interleaved, parser, timed
from benchmarks.environments import environment
from benchmarks.ops_measure import COPY_BYTES, Part, copy_variant, median, milliseconds, peak_bytes
from benchmarks.table_steps import (
    BATCHES,
    DIM,
    IDS,
    Batches,
    SparseAdam,
    Tbe,
    bytes_of_step,
    config_of,
    errors,
    filled,
    hashed,
    in_turn,
    nbytes,
    our_step,
)
from turbogr.cli import SPIN
from turbogr.device import return_freed_memory, tune_allocator
from turbogr.tables import LocalTable, UnboundedTable

ROWS, ROWS_QUICK, ROWS_OF_MEMORY_QUICK = 10_000_000, 2_000_000, 1_000_000
ROUNDS, ROUNDS_QUICK = 33, 9
TOLERANCE = 1e-5
PATHS = {"vs_tbe_x": "none", "vs_tbe_bags_x": "bags"}
NEW = 100
"""One occurrence in so many is of a new id."""
INSTALLS = (("torch==2.13.0", "numpy"), ("--no-deps", "torchrec==1.9.2", "fbgemm-gpu-cpu==1.8.0"))


def adam_part(num_rows: int, rounds: int) -> Part:
    """Lazy Adam against SparseAdam, on the same memory."""
    part, batches = Part(), Batches.make(num_rows)
    table = LocalTable(num_rows, DIM, config_of("lazy-adam"), seed=0)
    theirs = SparseAdam(table)
    seconds = taken_in_turn(
        {
            "lazy_adam": lambda number: our_step(table, batches.ids[number], batches.gradients),
            "sparse_adam": lambda number: theirs.step(batches.ids[number], batches.gradients),
        },
        rounds,
    )
    part.figures["vs_sparse_adam_x"] = median(seconds, "sparse_adam") / median(seconds, "lazy_adam")
    part.details["best_vs_sparse_adam_x"] = min(seconds["sparse_adam"]) / min(seconds["lazy_adam"])
    part.details["adam_ms"] = milliseconds(seconds)
    return part


def adagrad_part(num_rows: int, rounds: int, python: Path | str) -> Part:
    """Row-wise Adagrad: ours, with unbounded ids, and TBE; `python` is TBE's, or why there is none."""
    part, batches = Part(), Batches.make(num_rows)
    table = LocalTable(num_rows, DIM, config_of("adagrad"), seed=0)
    unbounded = filled(num_rows, capacity=num_rows + num_rows // 20)
    names = [hashed(ids) for ids in batches.ids]
    steps: dict[str, Callable[[int], float | None]] = {
        "adagrad": lambda number: our_step(table, batches.ids[number], batches.gradients),
        "unbounded": lambda number: our_step(unbounded, names[number], batches.gradients),
        "unbounded_new": in_turn_with_new_ids(unbounded, names, num_rows, batches.gradients),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if isinstance(python, Path):
            batches.save(Path(folder))
            for pooling in PATHS.values():
                side = Tbe(python, num_rows, pooling, Path(folder) / "batches.npz")
                stack.callback(side.close)
                steps[f"tbe_{pooling}"] = side.step
                part.details[f"tbe_{pooling}"] = side.facts()
        seconds = taken_in_turn(steps, rounds, copy=copy_variant())
    ours = median(seconds, "adagrad")
    part.figures["unbounded_ratio"] = median(seconds, "unbounded") / ours
    part.figures["unbounded_new_ratio"] = median(seconds, "unbounded_new") / ours
    copied = 2 * COPY_BYTES / median(seconds, "copy")
    part.figures["copy_share"] = bytes_of_step(batches.distinct) / ours / copied
    if isinstance(python, Path):
        for name, pooling in PATHS.items():
            part.figures[name] = median(seconds, f"tbe_{pooling}") / ours
            part.details[f"best_{name}"] = min(seconds[f"tbe_{pooling}"]) / min(seconds["adagrad"])
    else:
        part.missing(list(PATHS), python)
    part.details |= {"adagrad_ms": milliseconds(seconds), "copy_gb_per_s": copied / 1e9, "distinct": batches.distinct}
    part.details["eviction"] = eviction(unbounded)
    return part


def in_turn_with_new_ids(
    table: UnboundedTable, names: list[Tensor], num_rows: int, gradients: Tensor
) -> Callable[[int], None]:
    """A step some of whose ids nobody has seen; their names are hashes of numbers that no row has."""
    places = torch.arange(0, IDS, NEW)
    first = num_rows

    def step(number: int) -> None:
        nonlocal first
        ids = names[number].clone()
        ids[places] = hashed(torch.arange(first, first + len(places)))
        first += len(places)
        our_step(table, ids, gradients)

    return step


def eviction(table: UnboundedTable) -> dict[str, Any]:
    """What it costs to free a share of the slots, which is done once in as many new ids."""
    count = table.limits.capacity // 64
    table.apply_occurrences(torch.tensor([0]), torch.zeros(1, DIM), 0.0)
    return {"rows": count, "ms": 1e3 * timed(lambda: table._evict(count))}


def taken_in_turn(
    steps: dict[str, Callable[[int], float | None]], rounds: int, **others: Callable[[], Any]
) -> dict[str, list[float]]:
    """Seconds by variant; every variant takes batch after batch. A step that answers seconds was timed elsewhere."""

    def timer(step: Callable[[int], float | None]) -> Callable[[], float]:
        one = in_turn(step)

        def call() -> float:
            answers: list[float | None] = []
            here = timed(lambda: answers.append(one()))
            return here if answers[0] is None else answers[0]

        return call

    timers = {name: timer(step) for name, step in steps.items()}
    timers |= {name: lambda call=call: timed(call) for name, call in others.items()}
    interleaved(timers, 2)
    return interleaved(timers, rounds)


def memory_part(quick: bool) -> Part:
    part, ratios = Part(), {}
    num_rows = ROWS_OF_MEMORY_QUICK if quick else ROWS
    for optimizer in ("lazy-adam",) if quick else ("lazy-adam", "adagrad"):
        held = nbytes(LocalTable(1, DIM, config_of(optimizer), seed=0)) * num_rows
        ratios[optimizer] = peak_bytes("benchmarks.table_steps:life", optimizer=optimizer, num_rows=num_rows) / held
    part.figures["memory_ratio"] = max(ratios.values())
    part.details["memory"] = {"rows": num_rows, "ratios": ratios}
    return part


def tbe_python(arguments: argparse.Namespace) -> Path | str:
    try:
        return environment(arguments.environment, INSTALLS, make=not arguments.quick)
    except OSError as reason:
        return str(reason)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--environment", type=Path, default=ROOT / ".venv-tbe", help="where fbgemm is, or will be")
    arguments = made.parse_args()
    if arguments.device != "cpu":
        made.error("the table is measured on the CPU")
    if "GOMP_SPINCOUNT" not in os.environ:  # as the command line does; read when torch is loaded, so begin again
        os.environ["GOMP_SPINCOUNT"] = SPIN
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.table", *sys.argv[1:]])
    tune_allocator()
    python = tbe_python(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = errors(python if isinstance(python, Path) else None, Path(folder))
    off = [f"{name}: relative error {error:.2e}" for name, error in found.items() if not error <= TOLERANCE]
    if off:
        print("\n".join(off), file=sys.stderr)
        return 1
    num_rows, rounds = (ROWS_QUICK, ROUNDS_QUICK) if arguments.quick else (ROWS, ROUNDS)
    whole = Part(figures={"max_rel_error": max(found.values())})
    for make in (lambda: adam_part(num_rows, rounds), lambda: adagrad_part(num_rows, rounds, python)):
        seconds = timed(lambda make=make: whole.add(make()))
        print(f"measured in {seconds:.1f} s", flush=True)
        gc.collect()
        return_freed_memory()
    whole.add(memory_part(arguments.quick))
    details = {"rows": num_rows, "ids": IDS, "batches": BATCHES, "threads": torch.get_num_threads(), "errors": found}
    figures = {**whole.figures, "reasons": whole.reasons}
    finish("table", arguments, figures, {"details": {**details, **whole.details}})
    return 0


if __name__ == "__main__":
    sys.exit(main())
