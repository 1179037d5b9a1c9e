"""The embedding operators' Triton kernels against torch in double precision."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.close import assert_close
from tests.support.triton_device import DEVICE, DTYPES, TOLERANCES
from turbogr.ops.embedding import (
    AdamStep,
    Gradients,
    dense_adamw,
    distinct,
    embedding_lookup,
    group,
    lazy_adam,
    merge_rows,
    rowwise_adagrad,
    sum_groups,
    triton,
)

WIDTHS = (1, 50, 64)
STEP = AdamStep(number=3, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
ROWS = 23


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "PIECE", 16)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def random_ids(count: int, bound: int, seed: int = 0) -> Tensor:
    return torch.randint(0, bound, (count,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_several_tables_and_their_gradients_are_those_of_dense_embeddings(dtype: torch.dtype) -> None:
    """Catches: ids read in another table, a table without ids that shifts the next, repeats counted once."""
    shapes, counts = [(5, 50), (9, 3), (300, 64), (2, 1)], [40, 0, 57, 1]
    tables = [random(*shape, dtype=dtype, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    ids = [random_ids(count, shape[0], seed=i) for i, (count, shape) in enumerate(zip(counts, shapes, strict=True))]
    out = embedding_lookup(tables, torch.cat(ids), torch.tensor([0, *counts]).cumsum(0), backend="triton")
    weights = [random(*rows.shape, dtype=dtype, seed=9) for rows in out]
    gradients = torch.autograd.grad(out, tables, weights)
    for table, own, rows, weight, got in zip(tables, ids, out, weights, gradients, strict=True):
        assert torch.equal(rows, table[own])
        exact = table.detach().double().requires_grad_()
        (wanted,) = torch.autograd.grad(exact[own], [exact], weight.double())
        assert got.is_coalesced() and got.dtype == dtype and torch.equal(got.indices()[0], own.unique())
        assert_close(got.to_dense(), wanted, TOLERANCES[dtype])


@pytest.mark.skipif(DEVICE.type != "cpu", reason="an assertion on the device ends the process")
@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_an_id_that_its_table_does_not_have_is_an_error(bad: int) -> None:
    ids = torch.tensor([11, 3, bad, 4], device=DEVICE)
    with pytest.raises(RuntimeError, match="out of range"):
        embedding_lookup([random(20, 3), random(10, 3)], ids, torch.tensor([0, 1, 4]), backend="triton")


def test_distinct_ids_are_those_of_torch_unique() -> None:
    for num_rows in (1, 40, 70_000):
        for count in (0, 1, 90):
            ids = random_ids(count, num_rows)
            wanted = torch.unique(ids, return_inverse=True)
            assert all(map(torch.equal, distinct(ids, num_rows, backend="triton"), wanted))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_by_group_are_exact_and_repeat(dtype: torch.dtype, width: int) -> None:
    """Catches: occurrences lost between pieces, a piece added to another row, groups without any that are not zero."""
    places = random_ids(200, 12)
    places[places == 3] = 4
    places[30:90] = 11
    values = random(200, width, dtype=dtype)
    groups = group(places, 12, backend="triton")
    assert torch.equal(groups.order, torch.sort(places, stable=True).indices.int())
    assert groups.starts.diff().tolist() == torch.bincount(places.cpu(), minlength=12).tolist()
    wanted = torch.zeros(12, width, dtype=torch.float64, device=DEVICE).index_add_(0, places, values.double())
    got = sum_groups(values, groups, backend="triton")
    assert got.dtype == dtype and torch.equal(got, sum_groups(values, groups, backend="triton"))
    assert_close(got, wanted, TOLERANCES[dtype])
    none = group(places[:0], 0, backend="triton")
    assert sum_groups(values[:0], none, backend="triton").shape == (0, width)


def test_merged_lists_are_their_sum() -> None:
    ids = [torch.tensor(own, dtype=torch.int64, device=DEVICE) for own in ([1, 4, 7], [], [0, 4], [4])]
    values = [random(len(own), 6, seed=i) for i, own in enumerate(ids)]
    unique, total = merge_rows(ids, values, 300, backend="triton")
    wanted = torch.zeros(300, 6, dtype=torch.float64, device=DEVICE)
    for own, part in zip(ids, values, strict=True):
        wanted[own] += part
    assert unique.tolist() == [0, 1, 4, 7]
    assert_close(total, wanted[unique], 1e-6)


def update(name: str, state: list[Tensor], gradients: Gradients, backend: str) -> list[Tensor]:
    weight, moment1, moment2 = (one.clone() for one in state)
    if name == "adagrad":
        total = moment1[:, 0].contiguous()
        rowwise_adagrad(weight, total, gradients, lr=0.1, eps=1e-6, backend=backend)
        return [weight, total]
    (lazy_adam if name == "lazy-adam" else dense_adamw)(weight, moment1, moment2, gradients, STEP, backend=backend)
    return [weight, moment1, moment2]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["adagrad", "lazy-adam", "adamw"])
def test_an_update_is_the_reference_in_double(name: str, width: int) -> None:
    """Catches: a wrong formula, a row updated twice, a scale or a clip left out, long rows summed otherwise."""
    state = [random(ROWS, width, seed=i) for i in range(3)]
    state[1].abs_(), state[2].square_()
    ids = random_ids(90, ROWS - 8)
    ids[20:60] = 7
    unique, places = distinct(ids, ROWS, backend="triton")
    apart = Gradients(unique, random(90, width), group(places, len(unique), backend="triton"))
    assert apart.groups is not None
    summed = replace(apart, values=sum_groups(apart.values, apart.groups, backend="triton"), groups=None)
    none = Gradients(unique[:0], apart.values[:0])
    for gradients in (apart, summed, none):
        for scale, row_clip in ((1.0, 0.0), (-0.3, 1.5)):
            given = replace(gradients, scale=scale, row_clip=row_clip)
            exact = replace(given, values=given.values.double())
            wanted = update(name, [one.double() for one in state], exact, "reference")
            for one, other in zip(update(name, state, given, "triton"), wanted, strict=True):
                assert_close(one, other, 3e-6)
