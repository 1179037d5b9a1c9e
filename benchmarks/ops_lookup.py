"""A part of `benchmarks.ops`: lookup in eight tables against padded ones, and a whole step of one large table.

Lookup: 2,080 rows of 512 ids, half of them padding, in eight tables of unequal size and heat. The baseline looks up
the padded rectangles one table after the other and makes dense gradients; ours takes the valid ids of all tables at
once and answers gradients by distinct id. Both have the tuned allocator.

Step: 100,000 Zipf ids of one table: lookup, gradient, update. The baseline is `nn.Embedding(sparse=True)` with torch's
SparseAdam or Adagrad; ours updates by row-wise Adagrad, through a table's distinct rows as the trainer does it
(`table_step_x`), and fused with the sum over duplicates (`table_step_fused_x`). Both update the same memory.

n ids, N rows of a table, D width
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import padded_lookup
from benchmarks.ops_measure import COPY_BYTES, Part, Settings, copy_variant, median, milliseconds, seconds_of, worst
from turbogr.config import TablesConfig
from turbogr.ops.embedding import OPERATOR, Gradients, distinct, embedding_lookup, group, rowwise_adagrad
from turbogr.tables import LocalTable
from turbogr.tables.optimizer import RowwiseAdagrad

WIDTH = 512
"""Cells of a padded row; half of all cells are padding."""


@dataclass(frozen=True)
class Heat:
    """One table: its size, the padded rows of ids that ask for it, and the exponent of the ids' Zipf distribution."""

    num_rows: int
    id_rows: int
    exponent: float


TABLES = (
    Heat(10_000, 588, 0.6),
    Heat(20_000, 360, 0.7),
    Heat(50_000, 272, 0.8),
    Heat(100_000, 222, 0.9),
    Heat(200_000, 190, 0.95),
    Heat(300_000, 166, 1.0),
    Heat(500_000, 150, 1.1),
    Heat(1_000_000, 132, 1.2),
)
DIM = 128
OTHER_DIM = 64
STEP_DIM, STEP_IDS, STEP_EXPONENT = 64, 100_000, 1.05
STEP_ROWS, STEP_ROWS_QUICK = 10_000_000, 1_000_000
LR = 0.01


def zipf(heat: Heat, count: int, generator: np.random.Generator) -> Tensor:
    """int64 [count] ids in [1, num_rows), the k-th most frequent with probability ~ k^-exponent, in any place."""
    weights = np.cumsum(np.arange(1, heat.num_rows, dtype=np.float64) ** -heat.exponent)
    ranks = np.searchsorted(weights, generator.random(count) * weights[-1])
    return torch.from_numpy(generator.permutation(heat.num_rows - 1)[np.minimum(ranks, heat.num_rows - 2)] + 1)


@dataclass(frozen=True)
class Lookups:
    tables: list[Tensor]  # [N_t, D] leaves
    padded: list[Tensor]  # int64 [b_t, WIDTH], 0 is padding
    ids: Tensor  # int64 [n] the valid ones, by table
    offsets: Tensor  # int64 [tables + 1]
    padded_gradients: list[Tensor]  # [b_t, WIDTH, D]
    gradients: list[Tensor]  # [n_t, D] the same without the padding


def lookups(heats: tuple[Heat, ...], dim: int, width: int = WIDTH) -> Lookups:
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    made = Lookups([], [], torch.empty(0), torch.empty(0), [], [])
    own = []
    for heat in heats:
        ids = zipf(heat, heat.id_rows * width, generator).view(heat.id_rows, width)
        half = generator.integers(1, width, heat.id_rows // 2)
        lengths = torch.from_numpy(np.concatenate((half, width - half)))  # half of all cells, whatever the draw
        ids[torch.arange(width) >= lengths.unsqueeze(1)] = 0
        gradient = torch.empty(*ids.shape, dim).uniform_(-1, 1)
        made.tables.append(torch.empty(heat.num_rows, dim).uniform_(-1, 1).requires_grad_())
        made.padded.append(ids)
        made.padded_gradients.append(gradient)
        made.gradients.append(gradient[ids != 0])
        own.append(ids[ids != 0])
    offsets = torch.tensor([0] + [len(one) for one in own]).cumsum(0)
    return replace(made, ids=torch.cat(own), offsets=offsets)


def check(settings: Settings) -> dict[str, float]:
    """Relative errors of rows, gradients and one update against float64, by case."""
    small = tuple(Heat(heat.num_rows // 50, 4, heat.exponent) for heat in TABLES)
    errors = {}
    for dim in (DIM, OTHER_DIM, 50):
        x = lookups(small, dim)
        doubles = [table.detach().double().requires_grad_() for table in x.tables]
        got = embedding_lookup(x.tables, x.ids, x.offsets)
        wanted = embedding_lookup(doubles, x.ids, x.offsets, backend="reference")
        errors[f"lookup D={dim}"] = worst(got, wanted)
        grads = torch.autograd.grad(got, x.tables, x.gradients)
        # the padded loop in float64 is right by tests/benchmarks; both must agree
        dense = padded_lookup.backward_index_add(doubles, x.padded, [one.double() for one in x.padded_gradients])
        errors[f"lookup gradient D={dim}"] = worst(tuple(one.to_dense() for one in grads), tuple(dense))
        errors[f"row-wise Adagrad D={dim}"] = _update_error(x.tables[0], x.ids[: x.offsets[1]], x.gradients[0])
    return errors


def _update_error(table: Tensor, ids: Tensor, gradients: Tensor) -> float:
    unique, places = distinct(ids, len(table))
    groups = group(places, len(unique))
    answers = []
    for dtype, backend in ((torch.float32, None), (torch.float64, "reference")):
        weight, total = table.detach().to(dtype, copy=True), torch.ones(len(table), dtype=dtype)
        given = Gradients(unique, gradients.to(dtype), groups)
        rowwise_adagrad(weight, total, given, lr=LR, eps=1e-8, backend=backend)
        answers.append((weight, total))
    return worst(answers[0], answers[1])


def measure(settings: Settings) -> Part:
    part = Part()
    for dim in (DIM,) if settings.quick else (DIM, OTHER_DIM):
        _measure_lookup(dim, settings, part)
    _measure_step(settings, part)
    picked, reason = OPERATOR.pick(torch.device("cpu"))
    part.details["lookup_backend"] = {"name": picked.name, "reason": reason}
    return part


def _measure_lookup(dim: int, settings: Settings, part: Part) -> None:
    x = lookups(TABLES, dim)
    out = embedding_lookup(x.tables, x.ids, x.offsets)
    plain = [table.detach() for table in x.tables]
    variants: dict[str, Callable[[], Any]] = {
        "forward": lambda: embedding_lookup(x.tables, x.ids, x.offsets),
        "padded_forward": lambda: padded_lookup.forward(plain, x.padded),
        "backward": lambda: torch.autograd.grad(out, x.tables, x.gradients, retain_graph=True),
        "padded_backward": lambda: padded_lookup.backward(plain, x.padded, x.padded_gradients),
        "padded_backward_index_add": lambda: padded_lookup.backward_index_add(plain, x.padded, x.padded_gradients),
        "copy": copy_variant(),
    }
    seconds = seconds_of(variants, 4 if settings.quick else 9)
    tag = "" if dim == DIM else f"_d{dim}"
    part.figures[f"lookup_forward{tag}_x"] = median(seconds, "padded_forward") / median(seconds, "forward")
    part.figures[f"lookup_backward{tag}_x"] = median(seconds, "padded_backward", "padded_backward_index_add") / median(
        seconds, "backward"
    )
    copied = 2 * COPY_BYTES / median(seconds, "copy")
    part.figures[f"lookup_forward{tag}_copy_share"] = 2 * len(x.ids) * dim * 4 / median(seconds, "forward") / copied
    part.details[f"lookup_d{dim}"] = {
        "cells": sum(ids.numel() for ids in x.padded),
        "ids": len(x.ids),
        "tables": [vars(heat) | {"distinct": len(x.ids[a:b].unique())} for heat, a, b in _spans(x)],
        "ms": milliseconds(seconds),
        "copy_gb_per_s": copied / 1e9,
    }


def _spans(x: Lookups) -> list[tuple[Heat, int, int]]:
    bounds = x.offsets.tolist()
    return list(zip(TABLES, bounds[:-1], bounds[1:], strict=True))


def _measure_step(settings: Settings, part: Part) -> None:
    num_rows = STEP_ROWS_QUICK if settings.quick else STEP_ROWS
    ids = zipf(Heat(num_rows, 1, STEP_EXPONENT), STEP_IDS, np.random.default_rng(1))
    weight = torch.empty(num_rows, STEP_DIM).uniform_(-1, 1)
    gradients = torch.empty(STEP_IDS, STEP_DIM).uniform_(-1, 1)
    variants = {**_our_steps(weight, ids, gradients), **_torch_steps(weight, ids, gradients)}
    seconds = seconds_of(variants, 5 if settings.quick else 9)
    torchs = median(seconds, "sparse_adam", "adagrad")
    part.figures["table_step_x"] = torchs / median(seconds, "as_the_trainer")
    part.figures["table_step_fused_x"] = torchs / median(seconds, "fused")
    part.details["table_step"] = {
        "rows": num_rows,
        "dim": STEP_DIM,
        "ids": STEP_IDS,
        "distinct": len(ids.unique()),
        "exponent": STEP_EXPONENT,
        "ms": milliseconds(seconds),
    }


def _our_steps(weight: Tensor, ids: Tensor, gradients: Tensor) -> dict[str, Callable[[], Any]]:
    config = TablesConfig(optimizer="adagrad")
    table = LocalTable(1, STEP_DIM, config, seed=0)
    # in place of initial rows drawn one by one, which take minutes at this size
    table.weight, table.num_rows = weight, len(weight)
    table.optimizer = RowwiseAdagrad(config, len(weight), STEP_DIM, None)
    offsets = torch.tensor([0, len(ids)])

    def fused() -> None:
        embedding_lookup([weight], ids, offsets)
        table.apply_occurrences(ids, gradients, LR)

    def as_the_trainer() -> None:
        rows = table.lookup(ids)
        rows.weight.index_select(0, rows.inverse).backward(gradients)  # type: ignore[no-untyped-call]
        table.apply(rows.gradients(), LR)

    return {"fused": fused, "as_the_trainer": as_the_trainer}


def _torch_steps(weight: Tensor, ids: Tensor, gradients: Tensor) -> dict[str, Callable[[], Any]]:
    def step_of(optimizer: type[torch.optim.Optimizer]) -> Callable[[], None]:
        layer = torch.nn.Embedding.from_pretrained(weight, freeze=False, sparse=True)
        updates = optimizer(layer.parameters(), lr=LR)  # type: ignore[call-arg]

        def step() -> None:
            layer(ids).backward(gradients)
            updates.step()
            updates.zero_grad()

        return step

    return {"sparse_adam": step_of(torch.optim.SparseAdam), "adagrad": step_of(torch.optim.Adagrad)}
