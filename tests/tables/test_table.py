"""Embedding tables: lookups, their gradients, and initial rows."""

import pytest
import torch

from tests.support.close import assert_close
from turbogr.config import TablesConfig
from turbogr.tables import LocalTable, RowGradients, storage

ADAGRAD = TablesConfig(optimizer="adagrad")


def make(rows: int = 30, dim: int = 4, config: TablesConfig = ADAGRAD, seed: int = 0) -> LocalTable:
    return LocalTable(rows, dim, config, seed=seed)


def test_the_rows_gradient_is_that_of_a_dense_embedding() -> None:
    """Catches: repeated ids whose gradient is counted once, rows matched with the wrong id."""
    local = make()
    ids = torch.tensor([7, 3, 7, 7, 29, 0, 3])
    weights = torch.randn(7, 4)
    rows = local.lookup(ids)
    (rows.weight[rows.inverse] * weights).sum().backward()
    dense = torch.nn.Embedding.from_pretrained(local.weight.clone(), freeze=False)
    (dense(ids) * weights).sum().backward()
    got = rows.gradients()
    assert got.ids.tolist() == [0, 3, 7, 29]
    full = torch.zeros(30, 4)
    full[got.ids] = got.values
    assert_close(full, dense.weight.grad, 1e-6)


def test_looked_up_rows_are_copies() -> None:
    """Catches: an update that reaches a batch already looked up, which staleness would make a race."""
    local = make()
    rows = local.lookup(torch.tensor([2, 5]))
    before = rows.weight.detach().clone()
    local.apply(RowGradients(torch.tensor([2, 5]), torch.ones(2, 4)), lr=1.0)
    assert torch.equal(rows.weight, before) and not torch.equal(local.weight[[2, 5]], before)
    assert not local.weight.requires_grad and rows.weight.is_leaf


def test_rows_without_a_gradient_give_zeros() -> None:
    gradients = make().lookup(torch.tensor([4, 1])).gradients()
    assert gradients.ids.tolist() == [1, 4] and not gradients.values.any()


def test_initial_rows_depend_on_seed_table_and_id_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: rows drawn by chunk or by the table's size: a larger catalogue would be another model."""
    whole = make(50).weight
    assert torch.equal(make(20).weight, whole[:20])
    monkeypatch.setattr(storage, "INITIAL_CHUNK", 7 * 4)
    assert torch.equal(make(50).weight, whole)
    assert not torch.equal(make(50, seed=1).weight, whole)
    assert not torch.equal(LocalTable(50, 4, ADAGRAD, seed=0, number=1).weight, whole)
    assert len(torch.unique(whole)) == whole.numel()


def test_initial_rows_are_truncated_normal() -> None:
    """Catches: another scale of the item embedding than the recipe's."""
    weight = make(2000, 50).weight
    assert float(weight.abs().max()) <= 0.04 * (1 + 1e-6)
    assert float(weight.std()) == pytest.approx(0.02 * 0.8796, rel=0.02)


def test_merged_gradients_are_the_sum_over_micro_batches() -> None:
    """Catches: an id of two micro-batches updated twice, or its second gradient lost."""
    parts = [
        RowGradients(torch.tensor([1, 4, 9]), torch.randn(3, 4)),
        RowGradients(torch.tensor([], dtype=torch.int64), torch.zeros(0, 4)),
        RowGradients(torch.tensor([0, 4]), torch.randn(2, 4)),
        RowGradients(torch.tensor([4, 9]), torch.randn(2, 4)),
    ]
    merged = RowGradients.merged(parts, 10)
    assert merged.ids.tolist() == [0, 1, 4, 9]
    full = torch.zeros(10, 4)
    for part in parts:
        full.index_add_(0, part.ids, part.values)
    assert_close(merged.values, full[merged.ids], 1e-6)
    assert RowGradients.merged(parts[:1], 10) is parts[0]


@pytest.mark.parametrize("optimizer", ["adagrad", "lazy-adam", "adamw"])
def test_gradients_by_occurrence_update_as_their_sums_do(optimizer: str) -> None:
    """Catches: repeats that update a row several times, a scale or a clip that only one of the two forms knows."""
    config = TablesConfig(optimizer=optimizer, row_clip=0.5, eps=1e-3)  # type: ignore[arg-type]
    one, other = make(config=config), make(config=config)
    ids, gradients = torch.tensor([7, 3, 7, 7, 29, 0, 3]), torch.randn(7, 4)
    summed = torch.zeros(30, 4).index_add_(0, ids, gradients)
    unique = ids.unique()
    one.apply_occurrences(ids, gradients, 0.1, scale=0.7)
    other.apply(RowGradients(unique, summed[unique]), 0.1, scale=0.7)
    for name, value in one.state().items():
        assert_close(value, other.state()[name], 1e-6, name)


def test_the_row_clip_bounds_each_row_alone_after_the_scale() -> None:
    """Catches: a clip that the table forgets to hand on, one by the norm of all rows or before the scale."""
    gradient = torch.tensor([[3.0, 0.0, 4.0, 0.0], [0.1, 0.0, 0.0, 0.2], [0.0] * 4])
    wanted = torch.stack((gradient[0] / 10, 2 * gradient[1], gradient[2]))
    plain, clipped = make(), make(config=TablesConfig(optimizer="adagrad", row_clip=0.5))
    clipped.apply(RowGradients(torch.tensor([1, 2, 3]), gradient), lr=1.0, scale=2.0)
    plain.apply(RowGradients(torch.tensor([1, 2, 3]), wanted), lr=1.0)
    for name, value in plain.state().items():
        assert_close(clipped.state()[name], value, 1e-6, name)


def test_gradients_say_whether_they_are_finite() -> None:
    values = torch.ones(3, 4)
    gradients = RowGradients(torch.tensor([1, 2, 3]), values)
    assert gradients.finite()
    values[2, 3] = torch.inf
    assert not gradients.finite()


def test_a_scan_yields_the_whole_table_in_order() -> None:
    local = make(10)
    parts = list(local.scan(4))
    assert [start for start, _ in parts] == [0, 4, 8]
    assert torch.equal(torch.cat([rows for _, rows in parts]), local.weight)


@pytest.mark.parametrize("optimizer", ["adagrad", "lazy-adam", "adamw"])
def test_a_table_continues_from_its_state(optimizer: str) -> None:
    """Catches: a part of the optimizer that a checkpoint forgets."""
    config = TablesConfig(optimizer=optimizer)  # type: ignore[arg-type]
    one, other = make(config=config), make(config=config, seed=9)
    steps = [RowGradients(torch.tensor(ids), torch.randn(len(ids), 4)) for ids in ([1, 2], [2, 5], [0, 2])]
    for step in steps[:2]:
        one.apply(step, 0.1)
    for name, value in one.state().items():
        other.state()[name].copy_(value)
    for local in (one, other):
        local.apply(steps[2], 0.1)
    assert all(torch.equal(value, other.state()[name]) for name, value in one.state().items())
