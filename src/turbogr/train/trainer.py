"""Train one model on one store, into a run folder.

config.json      the resolved config          metrics.jsonl   every step, once
epochs.jsonl     loss and metrics by epoch    tb/             TensorBoard
checkpoints/     see turbogr.train.checkpoint result.json     metrics of the best and the last epoch, with their card
"""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from turbogr.config import Config, to_dict
from turbogr.data.batching import EpochPlan, ensure_enough_rows, ensure_rows_fit, plan_epoch, training_pairs
from turbogr.data.dealing import Dealer
from turbogr.data.split import Which, make_split, training_counts
from turbogr.data.store import Store
from turbogr.device import pick_device, return_freed_memory, set_threads
from turbogr.errors import ConfigError, UserError
from turbogr.evaluate import Evaluation, evaluate
from turbogr.files import said_where, write_json
from turbogr.launch import began
from turbogr.ops.gemm import take as take_gemm
from turbogr.progress import Bar, bar
from turbogr.ranks import ALONE, Ranks
from turbogr.tables import Grid, ShardedTable, groups_of, make_grid
from turbogr.tasks.retrieval import RetrievalScorer, ShardedScorer, build_retrieval, build_table
from turbogr.train import checkpoint
from turbogr.train.checkpoint import Progress
from turbogr.train.cost import WorkCost
from turbogr.train.dense_sharding import shard_encoder, whole_encoder
from turbogr.train.feed import Feed
from turbogr.train.flops import table_bytes
from turbogr.train.metrics import JsonLines, Sink, open_sinks
from turbogr.train.schedule import SequentialSchedule
from turbogr.train.spans import Spans
from turbogr.train.start import (
    check_run,
    ensure_same_everywhere,
    ensure_shared,
    preflight,
    settled,
    with_batches,
    with_gemm,
)
from turbogr.train.step import StepSums, TrainStep
from turbogr.train.throughput import Throughput

COSINE_END = 0.1
WHOLE_TABLE_BYTES = 1 << 30
"""Below it every rank holds the whole table unless tables.groups says otherwise: the loss then reads rows in place."""


def train(config: Config, folder: Path, *, resume: bool = False, ranks: Ranks = ALONE) -> dict[str, Any]:
    """Train into `folder` and answer what result.json says. `resume` continues from the newest checkpoint there.

    With several ranks every one of them calls this with the same arguments, and the folder is one that all see.
    """
    with ranks.agreed():
        store = preflight(config)
        found = checkpoint.latest(folder)
        if resume and not (folder / "config.json").exists():
            raise UserError(f"{folder} holds no run to resume: leave --resume out to start one.")
        # hidden files are leftovers of a process that was killed before it began
        if not resume and folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UserError(f"{folder} exists already: continue it with --resume, or choose another --out.")
        if found is not None:
            config = settled(config, checkpoint.read_meta(found)["config"])
    with ranks.agreed():
        ensure_same_everywhere(ranks, config, store, found)
        ensure_shared(ranks, folder)
    with ranks.agreed():
        trainer = Trainer(config, store, folder, ranks)
        if found is not None:
            trainer.restore(found)
    return trainer.fit()


class Trainer:
    def __init__(self, config: Config, store: Store, folder: Path, ranks: Ranks = ALONE) -> None:
        config = with_gemm(config, take_gemm(config.device.gemm))
        config = with_batches(config, config.balance.batches or ranks.world)
        self.config, self.store, self.folder, self.ranks = config, store, folder, ranks
        self.threads = set_threads(config.device.threads)
        self.device = pick_device(config.device.name)
        torch.use_deterministic_algorithms(self.device.type == "cpu")
        # a debugging aid that costs time
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.split = make_split(store, config.split)
        self.pairs = training_pairs(store, self.split, config.model.max_history)
        first = self.plan(0)
        ensure_enough_rows(first, ranks.world)
        if config.balance.weight == "samples" and config.balance.batches != ranks.world:
            raise ConfigError(
                f"balance.weight samples weights by rank, and a step has {config.balance.batches} batches for "
                f"{ranks.world} ranks: start {config.balance.batches} ranks, or weight by tokens."
            )
        ensure_rows_fit(first, config.balance.rank_tokens, store)
        counts = training_counts(store, self.split)
        self.task = build_retrieval(config, store.num_items, counts, self.device)
        self.sharded_encoder = config.dense.sharding == "fsdp" and not ranks.alone
        if self.sharded_encoder:
            shard_encoder(self.task.encoder, ranks, self.device)
        self.grid = grid_of(config, store.num_items, ranks, self.device)
        self.table = build_table(config, store.num_items, self.device, self.grid)
        self.task.in_place = self.table.in_place
        self.cost = WorkCost(config, self.device, ranks)
        dealer = Dealer(config.balance, ranks.rank, ranks.world, self.cost)
        self.feed = Feed(config, dealer, together=isinstance(self.table, ShardedTable) or self.sharded_encoder)
        rates = rate_course(config, config.train.epochs * self.feed.steps_of(first))
        copies = self.grid.across if self.grid else ranks
        self.step = TrainStep(
            config, (store, self.split), self.task, self.table, rates, self.device, (ranks, copies), self.cost
        )
        self.spans = Spans()
        self.schedule = SequentialSchedule(self.step.stages, self.spans)
        self.progress = Progress()
        self.identity = checkpoint.identity_of(config, store.path, self.threads)
        self.resumed = False
        self._sinks: list[Sink] = []
        self._epochs_log: JsonLines | None = None
        self._ranked: Evaluation | None = None  # the latest, where it was on the test targets

    def plan(self, epoch: int) -> EpochPlan:
        return plan_epoch(self.pairs, epoch, self.config.train, self.config.balance)

    def state(self) -> dict[str, Tensor]:
        """Every tensor that the run's future depends on, by name. The ranks that share a table make it together."""
        dense = checkpoint.dense_state(self.task.encoder, self.step.dense_optimizer)
        return {**dense, **{f"table.{name}": value for name, value in self.table.state().items()}}

    def restore(self, path: Path) -> None:
        meta = checkpoint.read_meta(path)
        checkpoint.ensure_same(path, meta, self.identity)
        self._load(path)
        self.progress = Progress(**meta["progress"])
        self.resumed = True

    def _load(self, path: Path) -> None:
        state = self.state()
        checkpoint.load(path, state, self.ranks)
        self.table.restored({name.removeprefix("table."): value for name, value in state.items()})

    def fit(self) -> dict[str, Any]:
        """Train to the end of the last epoch (or an early stop) and evaluate."""
        try:
            with self.ranks.agreed():
                self.open_logs()
            while self.progress.epoch < self.config.train.epochs and not self._stale():
                self._train_epoch()
            return self._finish()
        except KeyboardInterrupt:
            raise KeyboardInterrupt(self._where_to_resume()) from None
        finally:
            self.close_logs()

    def open_logs(self) -> None:
        """Begin the run's folder, or go on with it where the checkpoint stands. The first rank writes for all."""
        if not self.ranks.first:
            return
        with said_where(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / "config.json", to_dict(self.config))
        began(self.folder)
        keep_through = self.progress.step - 1 if self.resumed else None
        done = self.progress.epoch
        keep_epochs = (lambda line: line["epoch"] <= done) if self.resumed else None
        self._epochs_log = JsonLines(self.folder / "epochs.jsonl", keep_epochs)
        self._sinks = open_sinks(self.config, self.folder, keep_through)

    def close_logs(self) -> None:
        for sink in [*self._sinks, *([self._epochs_log] if self._epochs_log else [])]:
            sink.close()

    def scorer(self) -> RetrievalScorer:
        parts = (self.config.model.max_history, self.device)
        encoder = self.task.encoder
        if self.sharded_encoder:
            encoder = whole_encoder(encoder, self.config, self.device)
        if isinstance(self.table, ShardedTable):
            return ShardedScorer(encoder, self.table, *parts)
        return RetrievalScorer(encoder, self.table, *parts)

    def _train_epoch(self) -> None:
        train, progress = self.config.train, self.progress
        plan = self.plan(progress.epoch)
        title = f"epoch {progress.epoch + 1}/{train.epochs}"
        with bar(title, total=len(plan), silent=not self.ranks.first) as shown:
            for values in self.steps(plan):
                if values and progress.step % self.config.log.every == 0:
                    shown.update(progress.batches, Throughput.line(progress.step, values))
                if train.checkpoint_every and progress.step % train.checkpoint_every == 0:
                    self._save()
            self._end_epoch(shown)

    def steps(self, plan: EpochPlan) -> Iterator[dict[str, Any]]:
        """Run the epoch's remaining steps, each when its turn comes: what is logged of it (by the first rank)."""
        contexts = self.feed.contexts(plan, self.progress.batches, self.progress.step)
        throughput = Throughput(self.config, self.device, self.ranks.world) if self.ranks.first else None
        begin = time.perf_counter()
        while (sums := self.schedule.progress(contexts)) is not None:
            now = time.perf_counter()
            self._count(sums, now - begin, len(plan))
            begin = now
            self.cost.learn(sums.total)
            yield self._log_step(sums, throughput) if throughput else {}

    def _count(self, sums: StepSums, seconds: float, batches: int) -> None:
        progress = self.progress
        progress.step += 1
        progress.batches = min(progress.batches + self.feed.step_batches, batches)
        progress.train_seconds += seconds
        if sums.skipped:
            progress.skipped_steps += 1
        else:
            progress.epoch_loss += float(sums.total.loss.sum())
            progress.epoch_tokens += int(sums.total.tokens.sum())

    def _log_step(self, sums: StepSums, throughput: Throughput) -> dict[str, Any]:
        values = {
            "epoch": self.progress.epoch + 1,
            "train/loss": float(sums.total.loss.sum() / sums.total.tokens.sum()),
            "train/grad_norm": sums.grad_norm,
            "train/rate": self.step.rates(self.progress.step - 1),
            "train/skipped_steps": self.progress.skipped_steps,
            **throughput.measure(sums, self.spans.take(), self.device),
        }
        if not self.ranks.alone:
            values |= sums.total.balance() | {"balance/oversized_rows": sums.oversized}
            values["balance/cost_fitted"] = float(self.cost.fitted)
            values |= {"balance/moved_tokens": sums.moved_tokens} if self.feed.exchanged else {}
            values["tables/held_rows_share"] = self.table.local_rows / self.table.num_rows
        for sink in self._sinks:
            sink.log(self.progress.step - 1, values)
        return values

    def _end_epoch(self, shown: Bar) -> None:
        config, progress = self.config.train, self.progress
        loss = progress.epoch_loss / max(progress.epoch_tokens, 1)
        last = progress.epoch + 1 == config.epochs
        entry: dict[str, Any] = {"epoch": progress.epoch + 1, "loss": loss}
        if last or (config.evaluate_every and (progress.epoch + 1) % config.evaluate_every == 0):
            entry.update(self._evaluate(shown))
        progress.epoch, progress.batches, progress.epoch_loss, progress.epoch_tokens = progress.epoch + 1, 0, 0.0, 0
        entry["seconds"] = round(progress.train_seconds + progress.evaluate_seconds, 1)
        if self._epochs_log:
            self._epochs_log.log(progress.step - 1, entry)
        for sink in self._sinks[1:]:
            sink.log(progress.step - 1, {f"epoch/{name}": value for name, value in entry.items()})
        self._save()
        return_freed_memory()
        shown.write(_epoch_line(entry, config.epochs))

    def _evaluate(self, shown: Bar) -> dict[str, float]:
        """Metrics of the model as it is now, and whether it is the best so far."""
        config, progress = self.config.train, self.progress
        which: Which = "validation" if self.split.validation is not None else "test"
        evaluation = self._metrics(which, lambda note: shown.update(progress.batches, note))
        self._ranked = evaluation if which == "test" else None
        progress.metrics = metrics = evaluation.metrics["model"]
        if self.split.validation is None and not config.select_on_test:
            return metrics  # nothing may be selected by the test: the last epoch stands
        if metrics[config.select_by] > progress.best_value:
            progress.best_value, progress.best_step = metrics[config.select_by], progress.step
            progress.best_epoch, progress.stale_evaluations = progress.epoch + 1, 0
        else:
            progress.stale_evaluations += 1
        return metrics

    def _metrics(self, which: Which, tell: Callable[[str], None] | None = None) -> Evaluation:
        begin = time.perf_counter()
        evaluation = evaluate(
            {"model": self.scorer()},
            self.store,
            self.split,
            which,
            config=self.config.evaluate,
            max_history=self.config.model.max_history,
            seed=self.config.train.seed,
            progress=tell or (None if self.ranks.first else _say_nothing),
            ranks=self.grid.across if self.grid else self.ranks,
        )
        self.progress.evaluate_seconds += time.perf_counter() - begin
        return evaluation

    def _stale(self) -> bool:
        return 0 < self.config.train.patience <= self.progress.stale_evaluations

    def _finish(self) -> dict[str, Any]:
        """Test metrics of the last epoch and, where one was selected, of the best.

        The last epoch was ranked at its end, unless on other targets or by a process that was killed then.
        """
        progress = self.progress
        last = self._ranked or self._metrics("test")
        result: dict[str, Any] = {
            "last": {"epoch": progress.epoch, "metrics": last.metrics["model"]},
            "card": last.card,
            "selected_by": self.config.train.select_by if progress.best_step >= 0 else None,
            "selected_on": None if progress.best_step < 0 else ("validation" if self.split.validation else "test"),
            "skipped_steps": progress.skipped_steps,
        }
        if progress.best_step >= 0:
            best = last
            path = checkpoint.best(self.folder)
            if progress.best_step != progress.step and path is not None:
                self._load(path)
                best = self._metrics("test")
            result["best"] = {"epoch": progress.best_epoch, "metrics": best.metrics["model"]}
        result["train_seconds"] = round(progress.train_seconds, 1)
        result["evaluate_seconds"] = round(progress.evaluate_seconds, 1)
        if self.ranks.first:
            write_json(self.folder / "result.json", result)
        return result

    def _save(self) -> None:
        keep = self.config.train.keep_checkpoints
        checkpoint.save(self.folder, self.state(), self.progress, self.identity, keep, self.ranks)

    def _where_to_resume(self) -> str:
        newest = checkpoint.latest(self.folder)
        if newest is None:
            return f"stopped at step {self.progress.step}, before the first checkpoint"
        return f"stopped at step {self.progress.step}; --resume continues from step {int(newest.name[5:])}"


def grid_of(config: Config, num_items: int, ranks: Ranks, device: torch.device) -> Grid | None:
    """How the ranks share the table; None where every one of them holds all of it."""
    groups = config.tables.groups
    if groups == 0 and table_bytes(config, num_items) < WHOLE_TABLE_BYTES:
        groups = ranks.world
    groups = groups_of(ranks.world, groups)
    return None if groups == ranks.world else make_grid(ranks, groups, device)


def rate_course(config: Config, total_steps: int) -> Callable[[int], float]:
    """Step (from 0) -> factor on the learning rates: linear warm-up, then constant, or a cosine down to a tenth."""
    warmup, cosine = config.train.warmup_steps, config.train.rate == "cosine"

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if not cosine:
            return 1.0
        done = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        return COSINE_END + (1 - COSINE_END) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def _say_nothing(note: str) -> None:
    """Another rank shows the progress."""


def _epoch_line(entry: dict[str, Any], epochs: int) -> str:
    shown = "".join(f"  {name} {entry[name]:.4f}" for name in ("hr@10", "ndcg@10") if name in entry)
    return f"epoch {entry['epoch']}/{epochs}  loss {entry['loss']:.4f}{shown}  {entry['seconds']:.0f} s"


__all__ = ["Sink", "Trainer", "check_run", "preflight", "rate_course", "train"]
