"""Ranks on the nodes of a made network: they check and time lookup, gradients and copies; part of `exchange`.

A part begins when every rank is there; its time is the slowest rank's, its bytes those over a node's link. The
variants take turns round by round on the same batches.
"""

import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import ROOT
from benchmarks.exchange_load import Load
from benchmarks.network import PORT, link_bytes, network
from turbogr.config import TablesConfig
from turbogr.ops.embedding import distinct
from turbogr.ranks import Ranks
from turbogr.tables import LocalTable, RowGradients, Rows, ShardedTable, Table, make_grid
from turbogr.tables.placement import Placement
from turbogr.train.replicas import Replicas

PARTS = ("lookup", "gradients", "copies")
WARM_UP, FEWEST = 2, 3
TOLERANCE = 1e-5
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """What every rank of a launch does."""

    variants: dict[str, int]
    """Name -> groups."""
    loads: list[Load]
    rounds: int
    seconds: float
    """After which no further round of a load begins."""
    steps: int = 0
    store: str = ""


def launch(nodes: int, per_node: int, job: Job, folder: Path, *, limit_s: float, rate: str) -> list[dict[str, Any]]:
    """What each of nodes x per_node ranks answers. All are ended when one fails, or at the limit."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
    world, workers = nodes * per_node, []
    end = time.monotonic() + limit_s
    with network(nodes, rate) as net:
        try:
            for rank in range(world):
                node, local = divmod(rank, per_node)
                environment = os.environ | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(local),
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(per_node),
                    "MASTER_ADDR": net.address(0),
                    "MASTER_PORT": str(PORT),
                    "GLOO_SOCKET_IFNAME": "eth0",
                    "TURBOGR_TIMEOUT_S": "120",
                    "TORCH_CPP_LOG_LEVEL": "ERROR",  # names of nodes cannot be looked up, and need not be
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
                }
                command = [sys.executable, "-m", "benchmarks.exchange_ranks", str(folder.resolve())]
                workers.append(net.start(node, command, environment))
            while any(worker.poll() is None for worker in workers):
                if any(worker.poll() for worker in workers) or time.monotonic() > end:
                    break
                time.sleep(0.05)
            failed = [rank for rank, worker in enumerate(workers) if worker.poll() != 0]
        finally:
            for worker in workers:
                worker.kill()
            for worker in workers:
                worker.wait()
    if failed:
        raise RuntimeError(f"ranks {failed} failed or took longer than {limit_s:g} s; see the messages above")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]


class Variant:
    """One way to share a table."""

    table: Table

    def __init__(self, load: Load, groups: int, ranks: Ranks) -> None:
        config = TablesConfig(optimizer="adagrad")
        self.ranks, self.copies = ranks, ranks
        self.placement: Placement | None = None
        if groups == ranks.world:
            self.table = whole_table(load.items, load.dim, load.seed)
        else:
            grid = make_grid(ranks, groups, CPU)
            sharded = ShardedTable(load.items, load.dim, config, seed=load.seed, grid=grid)
            self.table, self.copies, self.placement = sharded, grid.across, sharded.placement
        self.replicas = Replicas(ranks, self.copies, [])

    def round(self, ids: Tensor, timed: Callable[[str, Callable[[], Any]], Any]) -> tuple[Rows, RowGradients]:
        """One batch through the three parts, each run by `timed`; the rows, and the sums of this rank's ones."""
        table = self.table

        def look_up() -> tuple[Any, Rows]:
            lookup = table.request(ids)
            table.wait(lookup)
            return lookup, table.answer(lookup)

        lookup, rows = timed("lookup", look_up)
        rows.weight.grad = gradient_of(rows.unique_ids, self.ranks.rank, rows.weight.shape[1])
        own = timed("gradients", lambda: table.collect(lookup, rows))
        return rows, timed("copies", lambda: self.replicas.sum_rows(own, table.local_rows))


@cache
def whole_table(items: int, dim: int, seed: int) -> LocalTable:
    """A table in one process; nothing here moves its rows."""
    return LocalTable(items, dim, TablesConfig(optimizer="adagrad"), seed=seed)


def gradient_of(ids: Tensor, rank: int, dim: int) -> Tensor:
    """[U, D] any gradient that tells ids, ranks and columns apart."""
    return torch.sin(ids.float() * 0.37 + rank).unsqueeze(1) * torch.linspace(0.5, 1.5, dim)


def check(variant: Variant, load: Load) -> dict[str, float]:
    """Largest differences from one process on all ranks' batches; raises where they are too large."""
    ranks = variant.ranks
    whole, total = whole_table(load.items, load.dim, load.seed), torch.zeros(load.items, load.dim)
    touched = torch.zeros(load.items, dtype=torch.bool)
    for rank in range(ranks.world):
        unique, _ = distinct(load.ids(rank, 0), load.items)
        total[unique] += gradient_of(unique, rank, load.dim)
        touched[unique] = True
    ids = load.ids(ranks.rank, 0)
    rows, sums = variant.round(ids, lambda _, call: call())
    here = variant.placement
    held = torch.arange(load.items) if here is None else here.ids(torch.arange(here.begin, here.end))
    found = torch.zeros(len(held), dtype=torch.bool)
    found[sums.ids] = True
    row_error = float((rows.weight.detach()[rows.inverse] - whole.weight[ids]).abs().max())
    error = float((sums.values - total[held[sums.ids]]).norm() / total[held].norm())
    copies = variant.copies.gather_rows(sums.values, [len(sums.values)] * variant.copies.world)
    same = all(torch.equal(copies[0], one) for one in copies)
    if not torch.equal(found, touched[held]) or row_error > 0 or error > TOLERANCE or not same:
        raise RuntimeError(f"not what one process gives: rows off by {row_error}, gradients by {error}, equal: {same}")
    return {"row_error": row_error, "gradient_error": error}


class Clock:
    """Times parts: [ms of the slowest rank, bytes sent and received by this rank's node] by part."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.found = ranks, dict[str, list[float]]()

    def __call__(self, part: str, call: Callable[[], Any]) -> Any:
        self.ranks.barrier()
        before, begin = link_bytes(), time.perf_counter()
        answer = call()
        seconds = time.perf_counter() - begin
        slowest = float(self.ranks.gather(torch.tensor([seconds], dtype=torch.float64)).max())
        self.found[part] = [1e3 * slowest, *(now - then for now, then in zip(link_bytes(), before, strict=True))]
        return answer


def measure(ranks: Ranks, load: Load, job: Job) -> dict[str, Any]:
    """Variant -> part -> [round][ms, sent, received], after the check."""
    variants = {name: Variant(load, groups, ranks) for name, groups in job.variants.items()}
    errors = {name: check(variant, load) for name, variant in variants.items()}
    found: dict[str, dict[str, list[list[float]]]] = {name: {part: [] for part in PARTS} for name in variants}
    names, begin = list(variants), time.monotonic()
    for turn in range(job.rounds + WARM_UP):
        first = turn % len(names)
        ids = load.ids(ranks.rank, turn + 1)
        for name in names[first:] + names[:first]:
            clock = Clock(ranks)
            variants[name].round(ids, clock)
            if turn >= WARM_UP:
                for part, values in clock.found.items():
                    found[name][part].append(values)
        if turn >= WARM_UP + FEWEST and _over(ranks, begin, job.seconds):
            break
    return {"load": dataclasses.asdict(load), "check": errors, "parts": found}


def _over(ranks: Ranks, begin: float, seconds: float) -> bool:
    """Whether time is up for the first rank; every rank answers the same."""
    return bool(ranks.gather(torch.tensor([time.monotonic() - begin > seconds]))[0])


def worker(folder: Path) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlives the benchmark
    raw = json.loads((folder / "job.json").read_text())
    job = Job(**raw | {"loads": [Load(**load) for load in raw["loads"]]})
    from benchmarks.exchange_steps import train_steps
    from turbogr.device import tune_allocator
    from turbogr.ranks import joined

    tune_allocator()
    torch.set_num_threads(1)
    with joined() as ranks:
        answer: dict[str, Any] = {"loads": [measure(ranks, load, job) for load in job.loads]}
        if job.steps:
            answer["steps"] = train_steps(ranks, job.variants, Path(job.store), folder, job.steps, job.seconds)
        ranks.barrier()
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    worker(Path(sys.argv[1]))
