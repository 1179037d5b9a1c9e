"""The training step: a list of named stages over one context per batch.

    read, balance, sample, exchange_ids, wait_unique, lookup, forward_backward, exchange_grads      every (micro-)batch
    sync_replicas, update_rows, update_dense                                                        once per step

A stage reads fields that earlier stages filled and fills its own. With one rank and a local table, balance,
exchange_ids, wait_unique, exchange_grads and sync_replicas have nothing to do; they are named so that schedules and
spans know their place.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from turbogr.config import Config
from turbogr.data.loader import Batch, read_batch
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import TrainingError
from turbogr.jagged import position_in_row, row_of_token
from turbogr.ops.dropout import Noise
from turbogr.ops.sampled_softmax import UniformDraws
from turbogr.tables import LocalTable, RowGradients, Rows
from turbogr.tasks.retrieval import RetrievalTask


@dataclass
class StepSums:
    """What the micro-batches of one step add up."""

    users: int = 0
    tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of every user."""
    loss: float = 0.0
    row_gradients: list[RowGradients] = field(default_factory=list)
    bad_users: list[int] = field(default_factory=list)
    """Users with a non-finite loss."""
    grad_norm: float = math.nan
    skipped: bool = False
    """Nothing was updated, because a loss or a gradient was not finite."""


@dataclass
class StepContext:
    """One (micro-)batch on its way through the stages."""

    step: int
    users: np.ndarray
    first_number: int
    """Number in the global step of this batch's first user."""
    completes: bool
    """The last micro-batch of its step: the updates run after it."""
    sums: StepSums
    batch: Batch | None = None
    noise: Noise | None = None
    negatives: Tensor | UniformDraws | None = None
    ids: Tensor | None = None
    rows: Rows | None = None


@dataclass(frozen=True)
class Stage:
    name: str
    run: Callable[[StepContext], None]
    once: bool = False
    """Runs after the last micro-batch of a step only."""


class TrainStep:
    """The stages of a model on one store."""

    def __init__(
        self,
        config: Config,
        store: Store,
        split: Split,
        task: RetrievalTask,
        table: LocalTable,
        rates: Callable[[int], float],
        device: torch.device,
    ) -> None:
        self.config, self.store, self.split = config, store, split
        self.task, self.table, self.device = task, table, device
        self.rates = rates  # step -> factor on both learning rates
        dense = config.dense
        self.parameters = list(task.encoder.parameters())
        self.dense_optimizer = torch.optim.AdamW(
            self.parameters, lr=dense.lr, betas=dense.betas, eps=dense.eps, weight_decay=dense.weight_decay
        )
        self.stages = [
            Stage("read", self._read),
            Stage("balance", _nothing),
            Stage("sample", self._sample),
            Stage("exchange_ids", _nothing),
            Stage("wait_unique", _nothing),
            Stage("lookup", self._lookup),
            Stage("forward_backward", self._forward_backward),
            Stage("exchange_grads", self._exchange_grads),
            Stage("sync_replicas", _nothing, once=True),
            Stage("update_rows", self._update_rows, once=True),
            Stage("update_dense", self._update_dense, once=True),
        ]

    def _read(self, ctx: StepContext) -> None:
        max_history = self.config.model.max_history
        batch = read_batch(self.store, self.split, ctx.users, ctx.first_number, max_history).to(self.device)
        rows = row_of_token(batch.offsets, batch.tokens)
        ctx.batch = batch
        ctx.noise = Noise(
            self.config.train.seed, ctx.step, batch.numbers[rows], position_in_row(batch.offsets, batch.tokens)
        )
        ctx.sums.users += len(ctx.users)
        ctx.sums.tokens += batch.tokens
        ctx.sums.lengths += batch.lengths

    def _sample(self, ctx: StepContext) -> None:
        assert ctx.batch is not None and ctx.noise is not None
        ctx.negatives = self.task.sample(ctx.noise)
        ctx.ids = self.task.ids(ctx.batch, ctx.negatives)

    def _lookup(self, ctx: StepContext) -> None:
        assert ctx.ids is not None
        ctx.rows = self.table.lookup(ctx.ids)

    def _forward_backward(self, ctx: StepContext) -> None:
        assert ctx.batch is not None and ctx.noise is not None and ctx.rows is not None and ctx.negatives is not None
        total, losses = self.task.loss(ctx.batch, ctx.noise, ctx.negatives, ctx.rows)
        total.backward()  # type: ignore[no-untyped-call]
        ctx.sums.loss += float(total.detach())
        if not math.isfinite(ctx.sums.loss):
            bad = row_of_token(ctx.batch.offsets, ctx.batch.tokens)[~torch.isfinite(losses)]
            ctx.sums.bad_users += ctx.users[torch.unique(bad).cpu().numpy()].tolist()

    def _exchange_grads(self, ctx: StepContext) -> None:
        assert ctx.rows is not None
        ctx.sums.row_gradients.append(ctx.rows.gradients())

    def _update_rows(self, ctx: StepContext) -> None:
        """Divides every gradient by the step's tokens, refuses what is not finite, and updates the touched rows."""
        sums = ctx.sums
        rows = RowGradients.merged(sums.row_gradients, self.table.id_bound)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= sums.tokens
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        sums.grad_norm = float(torch.nn.utils.get_total_norm(gradients))
        finite = math.isfinite(sums.loss) and math.isfinite(sums.grad_norm) and rows.finite()
        sums.skipped = not finite
        if finite:
            self.table.apply(rows, self.config.tables.lr * self.rates(ctx.step), scale=1.0 / sums.tokens)
        elif self.config.train.on_nonfinite == "stop":
            raise TrainingError(self._nonfinite(ctx))

    def _update_dense(self, ctx: StepContext) -> None:
        if not ctx.sums.skipped:
            clip = self.config.dense.clip
            if clip > 0:
                torch.nn.utils.clip_grads_with_norm_(self.parameters, clip, torch.tensor(ctx.sums.grad_norm))
            for group in self.dense_optimizer.param_groups:
                group["lr"] = self.config.dense.lr * self.rates(ctx.step)
            self.dense_optimizer.step()
        self.dense_optimizer.zero_grad(set_to_none=True)

    def _nonfinite(self, ctx: StepContext) -> str:
        what = "loss" if not math.isfinite(ctx.sums.loss) else "gradient"
        users = ctx.sums.bad_users or ctx.users.tolist()
        named = ", ".join(map(repr, self.store.raw_users(users[:5]))) + (", ..." if len(users) > 5 else "")
        return (
            f"the {what} of step {ctx.step} is not finite (users {named}): lower tables.lr and dense.lr or set "
            "dense.clip, or count and skip such steps by train.on_nonfinite skip."
        )


def _nothing(ctx: StepContext) -> None:
    """One rank, local table: nothing to do."""
