"""bf16 tables: rounding by chance, the same for any backend, order, rank and number of threads."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.close import assert_close
from turbogr.config import TablesConfig
from turbogr.ops.embedding import OPERATOR, Gradients, Rounding, round_rows, rowwise_adagrad
from turbogr.ops.philox import Key, Purpose
from turbogr.tables import LocalTable, RowGradients

KEY = Key(seed=(3 << 32) | 5, step=9, purpose=Purpose.ROUNDING, layer=2)
COMPILED = next(one for one in OPERATOR.backends if one.name == "cpu").rejects(torch.device("cpu")) is None
needs_compiled = pytest.mark.skipif(not COMPILED, reason="the compiled library is not here")
OPTIMIZERS = ("adagrad", "lazy-adam", "adamw")


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make(rows: int = 40, optimizer: str = "adagrad", **options: object) -> LocalTable:
    config = TablesConfig(optimizer=optimizer, dtype="bf16", eps=1e-3)  # type: ignore[arg-type]
    return LocalTable(rows, 6, config, **{"seed": 1, **options})  # type: ignore[arg-type]


def step(ids: list[int], seed: int) -> RowGradients:
    return RowGradients(torch.tensor(ids), torch.randn(len(ids), 6, generator=torch.Generator().manual_seed(seed)))


@pytest.mark.parametrize("value", [1 + 2**-9, -(0.02 + 3e-5), 1e-30, 3.14159])
def test_rounding_is_unbiased_over_a_million_draws(value: float) -> None:
    """Catches: chances of another width than what is cut off, a sign that turns up into down, half-open intervals."""
    values = torch.full((1000, 1000), value)
    got = round_rows(values, Rounding(KEY)).double()
    low, high = got.min().item(), got.max().item()
    exact = float(values[0, 0])
    assert low <= exact <= high and len(got.unique()) <= 2
    share = (got == high).double().mean().item() if high > low else 1.0
    wanted = (exact - low) / (high - low) if high > low else 1.0
    assert abs(share - wanted) <= 4 * (0.25 / 1e6) ** 0.5


@needs_compiled
@given(
    width=st.sampled_from((1, 3, 16, 50, 64, 65, 130)),
    names=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9),
    step_number=st.integers(0, 2**32 - 1),
)
def test_compiled_rounding_is_the_references_to_the_bit(width: int, names: list[int], step_number: int) -> None:
    """Catches: another counter of the generator, a column's chance given to its neighbour, a folded upper half."""
    values = torch.randn(len(names), width) * 10.0 ** torch.randint(-30, 30, (len(names), 1))
    rounding = Rounding(Key(7, step_number, Purpose.ROUNDING, 1), torch.tensor(names))
    got, wanted = (round_rows(values, rounding, backend=one) for one in ("cpu", "reference"))
    assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_compiled), "reference"])
def test_numbers_that_bf16_has_stay_and_infinities_too(backend: str) -> None:
    """Catches: an infinity that becomes NaN, a NaN that becomes an infinity, an exact number that moves."""
    values = torch.tensor([[0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, torch.nan, 2.0**-130]])
    got = round_rows(values, Rounding(KEY), backend=backend).float()
    assert torch.equal(got.nan_to_num(nan=7.0, posinf=9e9), values.nan_to_num(nan=7.0, posinf=9e9))


def test_draws_depend_on_seed_step_table_row_and_column() -> None:
    """Catches: a part of the key that is left out: rows or steps that would all round the same way."""
    values = torch.full((4, 64), 1 + 2**-8 / 2)
    names = torch.tensor([0, 1, 2**32, 2**50 + 1])
    base = round_rows(values, Rounding(KEY, names))
    assert len({tuple(row.tolist()) for row in base}) == 4
    for other in (Key(1, 9, KEY.purpose, 2), Key(KEY.seed, 8, KEY.purpose, 2), Key(KEY.seed, 9, KEY.purpose, 1)):
        assert not torch.equal(round_rows(values, Rounding(other, names)), base)
    turned = round_rows(values.flip(0), Rounding(KEY, names.flip(0)))
    assert torch.equal(turned.flip(0), base)


@needs_compiled
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bf16_update_is_the_reference_but_for_sums_of_another_order(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: an update computed in bf16, a moment rounded, draws of another row."""
    tables = []
    for backend in ("cpu", "reference"):
        monkeypatch.setenv("TURBOGR_BACKEND", backend)
        tables.append(make(300, optimizer))
        for number in range(3):
            tables[-1].apply(step(list(range(number, 300, 2)), number), 0.05)
    one, other = tables
    for name, value in one.state().items():
        if name != "weight":
            assert_close(value, other.state()[name], 1e-6, name)
    apart = one.weight.view(torch.int16).int() - other.weight.view(torch.int16).int()
    # the last bit of an fp32 sum turns one draw in 2^16
    assert int(apart.abs().max()) <= 1 and float((apart != 0).float().mean()) < 2e-3


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_spread_over_tables_are_those_of_one_table(optimizer: str) -> None:
    """Catches: initial rows or rounding that depend on which rank a row lies on, or on its place there."""
    whole = make(40, optimizer)
    names = [torch.arange(rank, 40, 3).flip(0) for rank in range(3)]
    parts = [make(len(own), optimizer, names=own) for own in names]
    for number in range(4):
        gradients = step(sorted({(7 * number + k * k) % 40 for k in range(12)}), number)
        whole.apply(gradients, 0.1)
        for own, part in zip(names, parts, strict=True):
            mine = {int(name): place for place, name in enumerate(own)}
            pairs = sorted((mine[int(i)], k) for k, i in enumerate(gradients.ids) if int(i) in mine)
            ids, values = torch.tensor([p for p, _ in pairs]), gradients.values[[k for _, k in pairs]]
            part.apply(RowGradients(ids, values), 0.1)
    for own, part in zip(names, parts, strict=True):
        assert torch.equal(part.weight, whole.weight[own])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_bf16_table_continues_from_its_state(optimizer: str) -> None:
    """Catches: a checkpoint that forgets how many updates there were, so that draws repeat."""
    one, other = make(optimizer=optimizer), make(optimizer=optimizer, seed=1)
    for number in range(2):
        one.apply(step([1, 2, 9], number), 0.1)
    for name, value in one.state().items():
        other.state()[name].copy_(value)
    for table in (one, other):
        table.apply(step([2, 9], 5), 0.1)
    assert all(torch.equal(value, other.state()[name]) for name, value in one.state().items())


@needs_compiled
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_number_of_threads_rounds_the_same(optimizer: str, threads: Callable[[int], None]) -> None:
    """Catches: draws that go by thread."""
    answers: list[Tensor] = []
    for count in (1, 2, 5):
        threads(count)
        table = make(500, optimizer)
        table.apply(step(list(range(0, 500, 3)), 0), 0.1)
        answers.append(table.weight)
    assert all(torch.equal(answers[0], other) for other in answers[1:])


def test_steps_smaller_than_a_bf16_step_are_not_lost() -> None:
    """Catches: rounding to the nearest, with which a row of 1 never moves by steps of 1/1000."""
    ids, ones = torch.arange(50), torch.ones(50, 64)
    by_chance, nearest = torch.ones(50, 64, dtype=torch.bfloat16), torch.ones(50, 64, dtype=torch.bfloat16)
    for number in range(100):
        total = torch.full((50,), 1e12)  # so large that it stays: every step is lr * 1e-6
        rounding = Rounding(Key(0, number, Purpose.ROUNDING))
        rowwise_adagrad(by_chance, total, Gradients(ids, ones), lr=1e3, eps=0.0, rounding=rounding)
        rowwise_adagrad(nearest, total, Gradients(ids, ones), lr=1e3, eps=0.0)
    assert float(by_chance.double().mean()) == pytest.approx(0.9, abs=2e-3)
    assert float(nearest.double().mean()) == 1.0


def test_looked_up_rows_of_a_bf16_table_are_fp32_and_not_read_in_place() -> None:
    """Catches: gradients in halves, a loss kernel that reads bf16 rows as if they were fp32."""
    table = make()
    rows = table.lookup(torch.tensor([3, 3, 7]))
    assert rows.weight.dtype == torch.float32 and rows.whole is None
    assert torch.equal(rows.weight, table.weight[[3, 7]].float())
    assert table.rows(0, 5).dtype == torch.float32
