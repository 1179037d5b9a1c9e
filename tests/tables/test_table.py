"""Embedding tables: lookups, their gradients, and initial rows."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.close import assert_close
from turbogr.config import TablesConfig
from turbogr.tables import LocalTable, RowGradients, table
from turbogr.tables.dedup import distinct

ADAGRAD = TablesConfig(optimizer="adagrad")


def make(rows: int = 30, dim: int = 4, config: TablesConfig = ADAGRAD, seed: int = 0) -> LocalTable:
    return LocalTable(rows, dim, config, seed=seed)


@given(ids=st.lists(st.integers(0, 39), max_size=60), num_rows=st.sampled_from((40, 5000)))
def test_distinct_ids_are_those_of_torch_unique_whichever_way_is_taken(ids: list[int], num_rows: int) -> None:
    """Catches: the marking way and the sorting way answering in another order or type."""
    given_ids = torch.tensor(ids, dtype=torch.int64)
    unique, inverse = distinct(given_ids, num_rows)
    wanted, wanted_inverse = torch.unique(given_ids, return_inverse=True)
    assert torch.equal(unique, wanted) and torch.equal(inverse, wanted_inverse)
    assert unique.dtype == inverse.dtype == torch.int64


def test_both_ways_of_finding_distinct_ids_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a threshold under which the test above would try one way only."""
    calls: list[int] = []
    true = torch.unique
    monkeypatch.setattr(torch, "unique", lambda *args, **options: calls.append(1) or true(*args, **options))
    distinct(torch.arange(10), 320)
    assert not calls
    distinct(torch.arange(10), 321)
    assert calls


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
    monkeypatch.setattr(table, "INITIAL_CHUNK", 7)
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


def test_the_row_clip_bounds_each_row_alone() -> None:
    """Catches: a clip by the norm of all rows, or one that lengthens short gradients."""
    plain, clipped = make(), make(config=TablesConfig(optimizer="adagrad", row_clip=0.5))
    gradient = torch.tensor([[3.0, 0.0, 4.0, 0.0], [0.1, 0.0, 0.0, 0.2], [0.0] * 4])
    seen: list[torch.Tensor] = []
    for local in (plain, clipped):
        local.optimizer.update = lambda weight, ids, values, lr: seen.append(values)  # type: ignore[method-assign]
        local.apply(RowGradients(torch.tensor([1, 2, 3]), gradient), lr=1.0)
    assert torch.equal(seen[0], gradient)
    assert_close(seen[1][0], gradient[0] / 10, 1e-6)
    assert torch.equal(seen[1][1:], gradient[1:])


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
