"""What `benchmarks.table` runs in turns: one training step of a large table, ours and the baselines'.

A step looks up the batch's ids, hands the gradient back to the rows, and updates them. Ours is what the trainer does:
table.lookup -> rows.at -> backward into the weight leaf -> table.apply. Baseline and ours update the same memory, in
huge pages, under the tuned allocator: the baselines gain by both.

n ids of a batch, N rows of the table, D width, U distinct ids
"""

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import ROOT
from benchmarks.ops_lookup import Heat, zipf
from benchmarks.ops_measure import Process, relative_error
from turbogr.config import TablesConfig
from turbogr.ops.id_map.reference import id_hash
from turbogr.tables import Limits, LocalTable, RowGradients, UnboundedTable

DIM, IDS, EXPONENT = 64, 100_000, 1.05
BATCHES = 8
LR, BETAS = 0.01, (0.9, 0.98)
EPS = 1e-10
"""So small that it makes no difference: SparseAdam adds it before its bias correction, ours after it."""
FILL = 1 << 17
"""Ids that an unbounded table is given at a time."""
Table = LocalTable | UnboundedTable


@dataclass(frozen=True)
class Batches:
    """Ids of several steps, taken in turn, so that no side finds its rows in the cache; one gradient for all."""

    ids: list[Tensor]  # int64 [n]
    gradients: Tensor  # [n, D]

    @classmethod
    def make(cls, num_rows: int, ids: int = IDS, dim: int = DIM, count: int = BATCHES) -> "Batches":
        heat = Heat(num_rows, 1, EXPONENT)
        # one permutation: what is hot in one batch is hot in all of them
        drawn = zipf(heat, ids * count, np.random.default_rng(1)).split(ids)
        generator = torch.Generator().manual_seed(1)
        return cls([own.clone() for own in drawn], torch.empty(ids, dim).uniform_(-1, 1, generator=generator))

    def save(self, folder: Path) -> None:
        """As table_tbe reads it."""
        np.savez(folder / "batches.npz", ids=torch.stack(self.ids).numpy(), gradients=self.gradients.numpy())

    @property
    def distinct(self) -> float:
        return statistics.mean(len(own.unique()) for own in self.ids)


def config_of(optimizer: str) -> TablesConfig:
    return TablesConfig(optimizer=optimizer, betas=BETAS, eps=EPS)  # type: ignore[arg-type]


def nbytes(table: Table) -> int:
    """Of the weights and the optimizer's state."""
    names = ("weight", "optimizer.")
    return sum(value.nbytes for name, value in table.state().items() if name.startswith(names))


def our_step(table: Table, ids: Tensor, gradients: Tensor) -> None:
    """What the trainer does with a table in a step of one batch."""
    rows = table.lookup(ids)
    rows.at(rows.inverse).backward(gradients)  # type: ignore[no-untyped-call]
    table.apply(RowGradients.merged([rows.gradients()], table.id_bound), LR)


class SparseAdam:
    """`nn.Embedding(sparse=True)` and torch's SparseAdam on the memory of a lazy-adam table."""

    def __init__(self, table: LocalTable) -> None:
        self.layer = torch.nn.Embedding.from_pretrained(table.weight, freeze=False, sparse=True)
        self.optimizer = torch.optim.SparseAdam(self.layer.parameters(), lr=LR, betas=BETAS, eps=EPS)
        state = table.optimizer.state()
        self.optimizer.state[self.layer.weight] = {
            "step": 0, "exp_avg": state["moment1"], "exp_avg_sq": state["moment2"],
        }  # fmt: skip

    def step(self, ids: Tensor, gradients: Tensor) -> None:
        self.layer(ids).backward(gradients)
        self.optimizer.step()
        self.optimizer.zero_grad()


def hashed(ids: Tensor) -> Tensor:
    """Other names for the same ids, spread over all of int64."""
    return id_hash(ids)


def filled(num_rows: int, dim: int = DIM, capacity: int = 0) -> UnboundedTable:
    """A row-wise Adagrad table that has seen every id in [0, num_rows), under its hashed name."""
    table = UnboundedTable(Limits(capacity=capacity or num_rows), dim, config_of("adagrad"), seed=0)
    for begin in range(0, num_rows, FILL):
        names = hashed(torch.arange(begin, min(begin + FILL, num_rows))).sort().values
        table.apply(RowGradients(names, torch.zeros(len(names), dim)), LR)
    return table


class Tbe:
    """fbgemm's table in its own environment (benchmarks.table_tbe), a process that takes a turn when asked."""

    def __init__(self, python: Path, num_rows: int, pooling: str, batches: Path, weights: Path | None = None) -> None:
        given = {
            "rows": num_rows, "dim": DIM, "lr": LR, "eps": EPS, "pooling": pooling, "batches": str(batches),
            "weights": str(weights) if weights else None, "threads": torch.get_num_threads(),
        }  # fmt: skip
        environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "THP_MEM_ALLOC_ENABLE": "1"}
        self._process = Process([str(python), "-m", "benchmarks.table_tbe", json.dumps(given)], environment)

    def step(self, number: int) -> float:
        return float(self._process.ask(f"step {number}")["seconds"])

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = self._process.ask("facts")
        return facts

    def weights(self, target: Path) -> Tensor:
        self._process.ask(f"save {target}")
        return torch.from_numpy(np.load(target))

    def close(self) -> None:
        self._process.close()


def errors(python: Path | None, folder: Path, num_rows: int = 20_000, steps: int = 3) -> dict[str, float]:
    """Relative errors of the rows after some steps, against the baselines, and of unbounded against bounded rows.

    Ids of full size batches, so that there are hot ones and repeats.
    """
    batches = Batches.make(num_rows, count=steps)
    adam, ours = (LocalTable(num_rows, DIM, config_of(name), seed=0) for name in ("lazy-adam", "adagrad"))
    torchs = LocalTable(num_rows, DIM, config_of("lazy-adam"), seed=0)
    theirs = SparseAdam(torchs)
    unbounded = UnboundedTable(Limits(capacity=num_rows), DIM, config_of("adagrad"), seed=0)
    moved = ours.weight.clone()
    for ids in batches.ids:
        our_step(adam, ids, batches.gradients)
        theirs.step(ids, batches.gradients)
        our_step(ours, ids, batches.gradients)
        our_step(unbounded, ids, batches.gradients)
    found = {"lazy Adam against SparseAdam": relative_error(adam.weight, torchs.weight)}
    own = unbounded.ids()
    found["unbounded against bounded"] = relative_error(unbounded.rows(0, len(own)), ours.weight[own])
    if python is not None:
        batches.save(folder)
        np.save(folder / "weights.npy", moved.numpy())
        for pooling in ("none", "bags"):
            tbe = Tbe(python, num_rows, pooling, folder / "batches.npz", folder / "weights.npy")
            try:
                for number in range(steps):
                    tbe.step(number)
                name = f"row-wise Adagrad against TBE, {pooling}"
                found[name] = relative_error(ours.weight, tbe.weights(folder / "theirs.npy"))
            finally:
                tbe.close()
    return found


def life(optimizer: str, num_rows: int, tiny: bool = False) -> Callable[[], Any]:
    """For `peak_bytes`: a table made and taken through some steps; the batches are what it is given."""
    num_rows = 1000 if tiny else num_rows
    batches = Batches.make(num_rows, ids=100 if tiny else IDS, count=3)

    def whole() -> Table:
        table = LocalTable(num_rows, DIM, config_of(optimizer), seed=0)
        for ids in batches.ids:
            our_step(table, ids, batches.gradients)
        return table

    return whole


def in_turn(step: Callable[[int], float | None]) -> Callable[[], float | None]:
    """A variant that takes the next batch every time it is called."""
    calls = iter(range(sys.maxsize))
    return lambda: step(next(calls) % BATCHES)


def bytes_of_step(distinct: float) -> float:
    """What a row-wise Adagrad step must move: rows out and their gradients in, rows read, and read and written."""
    return 4 * DIM * (2 * IDS + 3 * distinct) + 8 * distinct
