"""Retrieval: predict the next item among the whole catalogue.

Where the loss draws the negatives itself it reads them and the targets in the table, and only the history is looked up.

T tokens, R negatives, D width, U distinct rows of a batch; ids of a batch = [items T | targets T | negatives T * R]
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor, nn

from turbogr.config import Config
from turbogr.data.loader import Batch
from turbogr.data.queries import Queries
from turbogr.errors import ConfigError, DataError
from turbogr.jagged import last_of_rows, position_in_row
from turbogr.models import Sequences, build_encoder
from turbogr.negatives.sampler import Sampler, build_sampler
from turbogr.ops.dropout import Noise
from turbogr.ops.sampled_softmax import UniformDraws, sampled_softmax
from turbogr.tables import Grid, LocalTable, ReadableTable, Rows, ShardedTable, Table

NORM_EPS = 1e-6


class RetrievalTask:
    """Turns encoder output and rows into a loss (sum over tokens of a sampled softmax)."""

    def __init__(self, config: Config, encoder: nn.Module, sampler: Sampler, device: torch.device) -> None:
        self.encoder = encoder
        self.sampler = sampler
        self.negatives = config.negatives.count
        self.logq = config.negatives.logq
        self.temperature = config.task.temperature
        self.in_place = config.tables.dtype == "fp32"
        """The whole table is in this process: the loss may read its rows where they lie."""
        self.bf16 = config.train.precision == "bf16"
        self.device = device

    def sample(self, noise: Noise) -> Tensor | UniformDraws:
        """Negatives of every token: int64 [T, R], or how the loss draws them itself."""
        draws = self.sampler.draws(noise, self.negatives) if self.in_place else None
        return self.sampler.negative_ids(noise, self.negatives) if draws is None else draws

    def ids(self, batch: Batch, negatives: Tensor | UniformDraws) -> Tensor:
        """Every id to look up, with repeats."""
        if isinstance(negatives, UniformDraws):
            return batch.items
        return torch.cat((batch.items, batch.targets, negatives.flatten()))

    def loss(self, batch: Batch, noise: Noise, negatives: Tensor | UniformDraws, rows: Rows) -> tuple[Tensor, Tensor]:
        """(sum of the tokens' losses, losses [T] without gradient)."""
        tokens = batch.tokens
        items = rows.inverse[:tokens]
        sequences = Sequences(batch.offsets, noise.positions, batch.times, batch.next_times, noise)
        with self._autocast():
            encoded = encode(self.encoder, rows.at(items), sequences)
        if isinstance(negatives, UniformDraws):
            assert rows.whole is not None
            # no correction: one that is the same for every item changes nothing
            targets, table, log_q = batch.targets, rows.whole, None
        else:
            targets, table = rows.inverse[tokens : 2 * tokens], rows.weight
            negatives = rows.inverse[2 * tokens :].view(tokens, self.negatives)
            log_q = self.sampler.log_q(rows.unique_ids) if self.logq else None
        return sampled_softmax(
            encoded, table, targets, negatives, temperature=self.temperature, log_q=log_q, eps=NORM_EPS
        )

    def _autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)


class RetrievalScorer:
    """Cosine of a user's encoded history with every item: what evaluation and recommendation ask.

    It needs an encoder and any table that can be read.
    """

    def __init__(self, encoder: nn.Module, table: ReadableTable, max_history: int, device: torch.device) -> None:
        self.encoder = encoder
        self.table = table
        self.max_history = max_history
        self.device = device

    @property
    def num_items(self) -> int:
        return self.table.num_rows

    @torch.no_grad()
    def encode(self, queries: Queries) -> Tensor:
        """Unit vectors [B, D] of the histories."""
        lengths = np.diff(queries.offsets)
        if len(lengths) and not lengths.min():
            raise DataError(f"history {int(lengths.argmin())} is empty: a model needs one event at least.")
        if len(lengths) and lengths.max() > self.max_history:
            raise DataError(
                f"history {int(lengths.argmax())} has {int(lengths.max())} events, the model sees {self.max_history}: "
                "cut it to the latest ones."
            )
        offsets = self._tensor(queries.offsets)
        items, times = self._tensor(queries.item), self._tensor(queries.time)
        last = last_of_rows(offsets)
        next_times = torch.cat((times[1:], times[:1]))
        next_times[last] = self._tensor(queries.next_time)
        rows = self.table.lookup(items)
        sequences = Sequences(offsets, position_in_row(offsets, len(items)), times, next_times, None)
        training = self.encoder.training
        self.encoder.eval()
        encoded = encode(self.encoder, rows.weight[rows.inverse], sequences)[last]
        self.encoder.train(training)
        return unit(encoded)

    @torch.no_grad()
    def scores(self, encoded: Tensor, start: int, stop: int) -> Tensor:
        return encoded @ self.item_vectors(start, stop).T

    @torch.no_grad()
    def item_vectors(self, start: int, stop: int) -> Tensor:
        """Unit vectors [stop - start, D]."""
        return unit(self.table.rows(start, stop))

    def scan(self, chunk: int) -> Iterator[Tensor]:
        """All unit item vectors, in order."""
        for start in range(0, self.num_items, chunk):
            yield self.item_vectors(start, min(start + chunk, self.num_items))

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device, non_blocking=True)


class ShardedScorer(RetrievalScorer):
    """Scores the items that this rank holds, in the order in which it holds them; the ranks of its group, all asked
    about the same histories, score the others."""

    def __init__(self, encoder: nn.Module, table: ShardedTable, max_history: int, device: torch.device) -> None:
        super().__init__(encoder, table, max_history, device)
        self.ranks, self.placement = table.grid.inside, table.placement
        self._own = table.own

    @property
    def num_items(self) -> int:
        return self._own.local_rows

    @torch.no_grad()
    def item_vectors(self, start: int, stop: int) -> Tensor:
        return unit(self._own.weight[start:stop])


def encode(encoder: nn.Module, x: Tensor, sequences: Sequences) -> Tensor:
    """The encoder as retrieval may run it: no token may know the one that it is to predict."""
    if sequences.mask.context_sees_history:
        raise ConfigError(
            "context_sees_history leaks the future from the second layer on, where a token sees through the context "
            "the event that retrieval has it predict: leave it off."
        )
    encoded: Tensor = encoder(x, sequences)
    return encoded


def unit(x: Tensor) -> Tensor:
    x = x.float()
    length: Tensor = x.norm(dim=1, keepdim=True)
    return x / length.clamp(min=NORM_EPS)


def build_retrieval(config: Config, num_items: int, counts: np.ndarray, device: torch.device) -> RetrievalTask:
    """The task with a freshly initialised encoder; `counts` are the items' training counts."""
    encoder = build_encoder(config.model, config.train.seed).to(device)
    return RetrievalTask(config, encoder, build_sampler(config.negatives, num_items, counts), device)


def build_table(config: Config, num_items: int, device: torch.device, grid: Grid | None = None) -> Table:
    """The table of this process: whole, or this rank's part of one that the ranks of a group share."""
    seed, dim = config.train.seed, config.model.dim
    if grid is None or grid.inside.alone:
        return LocalTable(num_items, dim, config.tables, seed=seed, device=device)
    return ShardedTable(num_items, dim, config.tables, seed=seed, grid=grid, device=device)
