"""The training step: a list of named stages over one context per batch.

    read, balance, sample, exchange_ids, wait_unique, lookup, forward_backward, exchange_grads      every (micro-)batch
    sync_replicas, update_rows, update_dense                                                        once per step

A stage reads fields that earlier stages filled and fills its own. balance is where ranks that read batches of their own
swap rows. The sum of the dense gradients over the ranks starts at the end of forward_backward; sync_replicas sums the
row gradients; the dense sum is awaited in update_rows, because no row may move where a dense gradient is not finite.
Where a table is sharded, exchange_ids, wait_unique, lookup and exchange_grads are talks between the ranks of a group,
and all of them go through as many micro-batches; sync_replicas sums between groups.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from turbogr.config import Config
from turbogr.data.batching import Selection
from turbogr.data.dealing import Cost
from turbogr.data.exchange import exchange_rows
from turbogr.data.loader import Batch, read_batch
from turbogr.data.split import Split
from turbogr.data.store import Store
from turbogr.errors import TrainingError
from turbogr.jagged import position_in_row, row_of_token
from turbogr.ops.dropout import Noise
from turbogr.ops.sampled_softmax import UniformDraws
from turbogr.ranks import Ranks, talked_s
from turbogr.tables import Lookup, RowGradients, Rows, Table
from turbogr.tasks.retrieval import RetrievalTask
from turbogr.train.dense_sharding import whole
from turbogr.train.flops import causal_pairs
from turbogr.train.replicas import Replicas, StepFacts


@dataclass
class StepSums:
    """What the micro-batches of one step add up on this rank."""

    users: int = 0
    tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    """Tokens of every row."""
    loss: float = 0.0
    row_gradients: list[RowGradients] = field(default_factory=list)
    bad_users: list[int] = field(default_factory=list)
    """Users with a non-finite loss."""
    oversized: int = 0
    """Rows that alone cost more than a rank's fair share."""
    moved_tokens: int = 0
    """Tokens that ranks swapped."""
    begun: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), talked_s()))
    """When the step began, and how long this process had talked with other ranks until then."""
    facts: StepFacts | None = None
    """What all ranks said, from sync_replicas on."""
    grad_norm: float = math.nan
    skipped: bool = False
    """Nothing was updated, because a loss or a gradient was not finite."""

    @property
    def total(self) -> StepFacts:
        assert self.facts is not None, "the ranks speak in sync_replicas"
        return self.facts


@dataclass
class StepContext:
    """One (micro-)batch on its way through the stages."""

    step: int
    rows: Selection
    completes: bool
    """The last micro-batch of its step: the updates run after it."""
    sums: StepSums
    batch: Batch | None = None
    noise: Noise | None = None
    negatives: Tensor | UniformDraws | None = None
    ids: Tensor | None = None
    lookup: Lookup | None = None
    looked_up: Rows | None = None


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
        data: tuple[Store, Split],
        task: RetrievalTask,
        table: Table,
        rates: Callable[[int], float],
        device: torch.device,
        ranks: tuple[Ranks, Ranks],
        cost: Cost,
    ) -> None:
        """`ranks`: those of the run, and those of them that hold the same rows as this one."""
        self.config, (self.store, self.split) = config, data
        self.task, self.table, self.device = task, table, device
        self.rates = rates  # step -> factor on both learning rates
        (self.ranks, copies), self.cost = ranks, cost
        dense = config.dense
        self.parameters = list(task.encoder.parameters())
        sharded = any(isinstance(parameter, DTensor) for parameter in self.parameters)
        self.replicas = Replicas(self.ranks, copies, [] if sharded else self.parameters)
        self.dense_optimizer = torch.optim.AdamW(
            self.parameters, lr=dense.lr, betas=dense.betas, eps=dense.eps, weight_decay=dense.weight_decay
        )
        self.stages = [
            Stage("read", self._read),
            Stage("balance", self._balance),
            Stage("sample", self._sample),
            Stage("exchange_ids", self._exchange_ids),
            Stage("wait_unique", self._wait_unique),
            Stage("lookup", self._lookup),
            Stage("forward_backward", self._forward_backward),
            Stage("exchange_grads", self._exchange_grads),
            Stage("sync_replicas", self._sync_replicas, once=True),
            Stage("update_rows", self._update_rows, once=True),
            Stage("update_dense", self._update_dense, once=True),
        ]

    def _read(self, ctx: StepContext) -> None:
        ctx.batch = read_batch(self.store, self.split, ctx.rows, self.config.model.max_history)

    def _balance(self, ctx: StepContext) -> None:
        balance = self.config.balance
        if balance.users == "exchanged" and not self.ranks.alone:
            assert ctx.batch is not None
            ctx.batch, moved = exchange_rows(ctx.batch, self.ranks, self.cost, balance.rank_tokens)
            ctx.sums.moved_tokens += moved

    def _sample(self, ctx: StepContext) -> None:
        assert ctx.batch is not None
        ctx.batch = batch = ctx.batch.to(self.device)
        rows = row_of_token(batch.offsets, batch.tokens)
        ctx.noise = Noise(
            self.config.train.seed, ctx.step, batch.numbers[rows], position_in_row(batch.offsets, batch.tokens)
        )
        ctx.sums.users += len(batch.users)
        ctx.sums.tokens += batch.tokens
        ctx.sums.lengths += batch.lengths
        ctx.negatives = self.task.sample(ctx.noise)
        ctx.ids = self.task.ids(batch, ctx.negatives)

    def _exchange_ids(self, ctx: StepContext) -> None:
        assert ctx.ids is not None
        ctx.lookup = self.table.request(ctx.ids)

    def _wait_unique(self, ctx: StepContext) -> None:
        assert ctx.lookup is not None
        self.table.wait(ctx.lookup)

    def _lookup(self, ctx: StepContext) -> None:
        assert ctx.lookup is not None
        ctx.looked_up = self.table.answer(ctx.lookup)

    def _forward_backward(self, ctx: StepContext) -> None:
        sums, batch = ctx.sums, ctx.batch
        assert batch is not None and ctx.noise is not None
        assert ctx.looked_up is not None and ctx.negatives is not None
        # a rank may have no row: it goes through the same motions with empty tensors, beside the others
        total, losses = self.task.loss(batch, ctx.noise, ctx.negatives, ctx.looked_up)
        sums.loss += float(total.detach())
        if self.config.balance.weight == "samples":
            total = total * (len(batch.users) / max(batch.tokens, 1))
        total.backward()  # type: ignore[no-untyped-call]
        if not math.isfinite(sums.loss):
            bad = row_of_token(batch.offsets, batch.tokens)[~torch.isfinite(losses)]
            sums.bad_users += batch.users[torch.unique(bad).cpu().numpy()].tolist()
        if ctx.completes:
            self.replicas.begin_dense()

    def _exchange_grads(self, ctx: StepContext) -> None:
        assert ctx.lookup is not None and ctx.looked_up is not None
        ctx.sums.row_gradients.append(self.table.collect(ctx.lookup, ctx.looked_up))

    def _sync_replicas(self, ctx: StepContext) -> None:
        """Sums losses, counts and row gradients over the ranks."""
        sums = ctx.sums
        own = RowGradients.merged(sums.row_gradients, self.table.local_rows)
        lengths = np.asarray(sums.lengths, np.int64)
        sums.facts = self.replicas.tell(
            sums.begun,
            users=sums.users,
            tokens=sums.tokens,
            pairs=causal_pairs(lengths),
            cost=float(self.cost(lengths).sum()),
            loss=sums.loss,
            bad_rows=float(not own.finite()),
        )
        sums.row_gradients = [self.replicas.sum_rows(own, self.table.local_rows)]

    def _update_rows(self, ctx: StepContext) -> None:
        """Divides every gradient by the step's tokens, refuses what is not finite, and updates the touched rows."""
        sums, (rows,) = ctx.sums, ctx.sums.row_gradients
        self.replicas.end_dense()
        facts = sums.total
        parts = facts.tokens if self.config.balance.weight == "tokens" else facts.users
        divisor = float(parts.sum())
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= divisor
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        sums.grad_norm = float(whole(torch.nn.utils.get_total_norm(gradients)))
        finite = math.isfinite(facts.loss.sum()) and math.isfinite(sums.grad_norm) and not facts.bad_rows.any()
        sums.skipped = not finite
        if finite:
            self.table.apply(rows, self.config.tables.lr * self.rates(ctx.step), scale=1.0 / divisor)
        elif self.config.train.on_nonfinite == "stop":
            with self.ranks.agreed():
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
        what = "gradient" if math.isfinite(ctx.sums.total.loss.sum()) else "loss"
        texts = self.ranks.texts(",".join(map(str, ctx.sums.bad_users)))
        named_bad = [int(user) for text in texts for user in text.split(",") if user]
        users = named_bad or ctx.rows.users.tolist()
        named = ", ".join(map(repr, self.store.raw_users(users[:5]))) + (", ..." if len(users) > 5 else "")
        return (
            f"the {what} of step {ctx.step} is not finite (users {named}): lower tables.lr and dense.lr or set "
            "dense.clip, or count and skip such steps by train.on_nonfinite skip."
        )
