"""A training step over a tiny store, driven as the trainer drives it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.tiny_store import tiny_store
from turbogr.config import Config
from turbogr.data.batching import Selection, training_pairs
from turbogr.data.split import Split, make_split, training_counts
from turbogr.data.store import Store
from turbogr.ranks import ALONE
from turbogr.tables import LocalTable, ShardedTable, Table
from turbogr.tasks.retrieval import build_retrieval, build_table
from turbogr.train.cost import WorkCost
from turbogr.train.schedule import SequentialSchedule
from turbogr.train.spans import Spans
from turbogr.train.step import StepContext, StepSums, TrainStep

CPU = torch.device("cpu")
ITEMS = 80


def random_store(folder: Path, lengths: list[int], seed: int = 0) -> Store:
    generator = np.random.default_rng(seed)
    items = [generator.integers(0, ITEMS, length).tolist() for length in lengths]
    times = [np.sort(generator.integers(0, 10**7, length)).tolist() for length in lengths]
    return tiny_store(folder, items, times, num_items=ITEMS)


def whole_users(store: Store, split: Split, users: list[int], max_history: int) -> Selection:
    """These users, numbered from 0 on."""
    return Selection.of(np.array(users), training_pairs(store, split, max_history)[users])


def make_double(encoder: torch.nn.Module, table: Table) -> None:
    """Parameters, this process's rows and their optimizer's state in float64."""
    encoder.double()
    own = table.own if isinstance(table, ShardedTable) else table
    assert isinstance(own, LocalTable)
    own.weight = own.weight.double()
    for name, value in vars(own.optimizer).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            setattr(own.optimizer, name, value.double())


class SmallRun:
    """One model on one store; `step` runs the given micro-batches as one global step."""

    def __init__(self, config: Config, store: Store) -> None:
        split = make_split(store, config.split)
        self.store, self.split = store, split
        self.task = build_retrieval(config, store.num_items, training_counts(store, split), CPU)
        self.table = build_table(config, store.num_items, CPU)
        self.pairs = training_pairs(store, split, config.model.max_history)
        cost = WorkCost(config, CPU)
        self.train = TrainStep(
            config, (store, split), self.task, self.table, lambda step: 1.0, CPU, (ALONE, ALONE), cost
        )
        self.schedule = SequentialSchedule(self.train.stages, Spans())
        self.done = 0

    def double(self) -> "SmallRun":
        """Everything in float64."""
        make_double(self.task.encoder, self.table)
        return self

    def contexts(self, *micro_batches: list[int]) -> list[StepContext]:
        sums, number, contexts = StepSums(), 0, []
        for index, users in enumerate(micro_batches):
            completes = index == len(micro_batches) - 1
            rows = Selection.of(np.array(users), self.pairs[users], number)
            contexts.append(StepContext(self.done, rows, completes=completes, sums=sums))
            number += len(users)
        return contexts

    def step(self, *micro_batches: list[int]) -> StepSums:
        sums = self.schedule.progress(iter(self.contexts(*micro_batches)))
        assert sums is not None
        self.done += 1
        return sums

    def gradients(self, *micro_batches: list[int]) -> tuple[StepSums, dict[str, torch.Tensor], torch.Tensor]:
        """(sums, summed dense gradients by name, summed row gradients [N, D]) with nothing divided or updated."""
        contexts = self.contexts(*micro_batches)
        for context in contexts:
            for stage in self.train.stages:
                if not stage.once:
                    stage.run(context)
        rows = torch.zeros_like(self.table.weight)
        for part in contexts[0].sums.row_gradients:
            rows[part.ids] += part.values
        dense = {name: one.grad for name, one in self.task.encoder.named_parameters() if one.grad is not None}
        self.task.encoder.zero_grad(set_to_none=True)
        return contexts[0].sums, dense, rows

    def state(self) -> dict[str, Any]:
        """Copies of everything that a step may change."""
        tensors = {**self.task.encoder.state_dict(), **self.table.state()}
        return {name: value.clone() for name, value in tensors.items()}
