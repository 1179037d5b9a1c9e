"""Embedding operators: every backend against torch in float64, for any number of threads."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.close import assert_close
from turbogr.errors import ConfigError
from turbogr.ops import native
from turbogr.ops.embedding import (
    OPERATOR,
    AdamStep,
    Gradients,
    Groups,
    all_finite,
    cpu,
    dense_adamw,
    distinct,
    embedding_lookup,
    group,
    lazy_adam,
    merge_rows,
    reference,
    rowwise_adagrad,
    sum_groups,
)

CPU = torch.device("cpu")
COMPILED = next(one for one in OPERATOR.backends if one.name == "cpu").rejects(CPU) is None
needs_compiled = pytest.mark.skipif(not COMPILED, reason="the compiled library is not here")
BACKENDS = [pytest.param("cpu", marks=needs_compiled), "reference"]
WIDTHS = (1, 7, 16, 33, 50, 64, 128, 130)
HOT = 1300
"""Occurrences of one id that the compiled sum cuts into three pieces."""
PAST_CACHE = 20_000
"""Rows of 128 that are written past the cache."""


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- lookup


def assert_lookup_is_torchs(widths: list[int], ids: list[Tensor], num_rows: list[int], backend: str) -> None:
    """Values to the bit, gradients against float64 autograd."""
    tables = [torch.randn(rows, width, requires_grad=True) for rows, width in zip(num_rows, widths, strict=True)]
    out = embedding_lookup(tables, torch.cat(ids), offsets_of([len(own) for own in ids]), backend=backend)
    weights = [0.5 + torch.rand_like(rows) for rows in out]  # of one sign: a sum near zero has no relative error
    grads = torch.autograd.grad(out, tables, weights)
    for table, own, rows, weight, got in zip(tables, ids, out, weights, grads, strict=True):
        assert torch.equal(rows, table[own])
        double = table.detach().double().requires_grad_()
        (wanted,) = torch.autograd.grad(double[own], [double], weight.double())
        assert got.is_coalesced() and torch.equal(got.indices()[0], own.unique())
        assert_close(got.to_dense(), wanted, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data())
def test_rows_and_their_gradients_are_those_of_a_dense_embedding(backend: str, data: st.DataObject) -> None:
    """Catches: ids read in another table, repeats counted once, a last vector of a row that is left out or doubled."""
    count = data.draw(st.integers(1, 4))
    widths = data.draw(st.lists(st.sampled_from(WIDTHS), min_size=count, max_size=count))
    num_rows = data.draw(st.lists(st.sampled_from((1, 5, 64, 65, 300)), min_size=count, max_size=count))
    ids = [ints(*data.draw(st.lists(st.integers(0, rows - 1), max_size=40))) for rows in num_rows]
    assert_lookup_is_torchs(widths, ids, num_rows, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_large_lookup_with_hot_ids_is_right_too(backend: str, generator: torch.Generator) -> None:
    """Catches: what only happens between blocks of ids, past the cache, or to an id that is summed in pieces."""
    ids = [torch.randint(0, rows, (n,), generator=generator) for rows, n in ((9000, PAST_CACHE), (70, 5000))]
    ids[0][100 : 100 + HOT] = 4
    assert_lookup_is_torchs([128, 50], ids, [9000, 70], backend)


def test_a_table_without_a_gradient_gets_none_and_an_expanded_one_is_read_right() -> None:
    """Catches: a gradient of stride 0 that is read as if it were packed."""
    tables = [torch.randn(4, 20, requires_grad=True), torch.randn(4, 20), torch.randn(4, 20, requires_grad=True)]
    out = embedding_lookup(tables, ints(1, 1, 2, 0, 3), ints(0, 3, 4, 5))
    out[0].sum().backward()
    assert tables[0].grad is not None and tables[0].grad.to_dense()[:, 0].tolist() == [0, 2, 1, 0]
    assert tables[1].grad is None and tables[2].grad is None


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_an_id_that_its_table_does_not_have_is_an_error(backend: str, bad: int) -> None:
    """Catches: memory beside the table read as a row, or an id that only another table has."""
    tables = [torch.randn(20, 3), torch.randn(10, 3)]
    with pytest.raises(IndexError, match="out of range"):
        embedding_lookup(tables, ints(11, 3, bad, 4), ints(0, 1, 4), backend=backend)


@needs_compiled
def test_the_first_bad_id_is_named_with_its_place() -> None:
    ids = torch.zeros(5000, dtype=torch.int64)
    ids[[1500, 4000]] = ints(77, -3)
    message = "id 77 at place 1500 is out of range for a table of 10 rows"
    with pytest.raises(IndexError, match=message):
        embedding_lookup([torch.randn(5, 3), torch.randn(10, 3)], ids, ints(0, 30, 5000))
    with pytest.raises(IndexError, match=message):
        distinct(ids, 10)


def test_calls_that_do_not_fit_together_are_refused() -> None:
    table, ids = torch.randn(5, 2), ints(1, 2, 3)
    for offsets in (ints(0, 2), ints(1, 3), ints(0, 4)):
        with pytest.raises(ValueError, match="offsets must rise from 0 to the number of ids, 3"):
            embedding_lookup([table], ids, offsets)
    with pytest.raises(ValueError, match=r"offsets is int64 \[3\], wanted int64 \[2\]"):
        embedding_lookup([table], ids, ints(0, 1, 3))
    with pytest.raises(ValueError, match=r"tables\[1\] is float64 \[5, 2\], wanted floating-point \[N, D\], as all"):
        embedding_lookup([table, table.double()], ids, ints(0, 1, 3))


IDS, ROWS_OF_IDS, PAIR = ints(1, 2, 3), torch.ones(3, 2), group(ints(0, 0, 1), 2)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "a table of integers": (
        lambda: embedding_lookup([IDS.view(1, 3)], IDS, ints(0, 3)),
        r"tables\[0\] is int64 \[1, 3\]",
    ),
    "no table": (lambda: embedding_lookup([], IDS, ints(0)), "tables is empty"),
    "lookup of short ids": (lambda: embedding_lookup([ROWS_OF_IDS], IDS.int(), ints(0, 3)), r"ids is int32 \[3\]"),
    "ids that are floats": (lambda: distinct(torch.zeros(3), 9), r"ids is float32 \[3\], wanted int64 \[3\]"),
    "places that are floats": (lambda: group(torch.zeros(3), 9), r"places is float32 \[3\], wanted int64 \[3\]"),
    "a place past the last": (lambda: group(ints(0, 2), 2), r"places\[1\] is 2, wanted at least 0 and less than 2"),
    "a place before the first": (
        lambda: group(ints(-1, 1), 2),
        r"places\[0\] is -1, wanted at least 0 and less than 2",
    ),
    "values of other occurrences": (
        lambda: sum_groups(torch.ones(4, 2), PAIR),
        r"values is float32 \[4, 2\], wanted floating-point \[3, D\]",
    ),
    "values that are integers": (
        lambda: sum_groups(torch.ones(3, 2).long(), PAIR),
        r"values is int64 \[3, 2\], wanted floating-point \[3, D\]",
    ),
    "groups that end early": (
        lambda: sum_groups(ROWS_OF_IDS, replace(PAIR, starts=ints(0, 2, 2))),
        "groups.starts go from 0 to 2, wanted 0 to 3",
    ),
    "groups of another type": (
        lambda: sum_groups(ROWS_OF_IDS, replace(PAIR, order=PAIR.order.long())),
        r"groups.order is int64 \[3\], wanted int32 \[n\]",
    ),
    "no list": (lambda: merge_rows([], [], 5), "ids are 0 lists, values 0"),
    "a list missing": (lambda: merge_rows([IDS], [], 5), "ids are 1 lists, values 0"),
    "a list of other ids": (
        lambda: merge_rows([IDS], [torch.ones(2, 2)], 5),
        r"ids\[0\] is int64 \[3\], wanted int64 \[2\]",
    ),
    "lists of two widths": (
        lambda: merge_rows([IDS, IDS], [ROWS_OF_IDS, torch.ones(3, 1)], 5),
        r"values\[1\] is float32 \[3, 1\], wanted the type and the width of float32 \[3, 2\]",
    ),
    "integers that are finite": (lambda: all_finite(IDS), r"values is int64 \[3\], wanted a floating-point tensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_its_name(case: str) -> None:
    """Catches: numbers of one type read as those of another, lists and groups that write beside the sums."""
    call, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()


# ---- distinct ids and sums


@pytest.mark.parametrize("backend", BACKENDS)
@given(data=st.data(), num_rows=st.sampled_from((1, 63, 64, 65, 4000, 65_536, 70_000)))
def test_distinct_ids_are_those_of_torch_unique(backend: str, data: st.DataObject, num_rows: int) -> None:
    """Catches: a row at a word's or a block's edge counted with its neighbour, another order or type."""
    edges = st.sampled_from([row for row in (0, 63, 64, 65_535, 65_536) if row < num_rows] + [num_rows - 1])
    ids = ints(*data.draw(st.lists(st.one_of(edges, st.integers(0, num_rows - 1)), max_size=90)))
    unique, inverse = distinct(ids, num_rows, backend=backend)
    wanted, wanted_inverse = torch.unique(ids, return_inverse=True)
    assert torch.equal(unique, wanted) and torch.equal(inverse, wanted_inverse)
    assert unique.dtype == inverse.dtype == torch.int64


@needs_compiled
def test_distinct_ids_of_several_blocks_are_those_of_torch_unique(
    threads: Callable[[int], None], generator: torch.Generator
) -> None:
    """Catches: a place that counts the rows of its own block only."""
    ids = torch.randint(0, 300_000, (40_000,), generator=generator)
    wanted = torch.unique(ids, return_inverse=True)
    for count in (1, 3):
        threads(count)
        for got, one in zip(distinct(ids, 300_000, backend="cpu"), wanted, strict=True):
            assert torch.equal(got, one)


def test_marking_and_the_other_way_answer_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a threshold under which the test above would try one way only."""
    calls: list[int] = []
    unique, hashed = torch.unique, cpu._distinct_any
    monkeypatch.setattr(torch, "unique", lambda *args, **options: calls.append(1) or unique(*args, **options))
    monkeypatch.setattr(cpu, "_distinct_any", lambda ids: calls.append(1) or hashed(ids))
    for backend, rows_per_id in (("cpu", 1024), ("reference", 32)):
        if backend == "cpu" and not COMPILED:
            continue
        calls.clear()
        marked = distinct(torch.arange(10), 10 * rows_per_id, backend=backend)
        assert not calls
        other = distinct(torch.arange(10), 10 * rows_per_id + 1, backend=backend)
        assert calls and all(torch.equal(one, again) for one, again in zip(marked, other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
@given(ids=st.lists(st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-3, 3)), max_size=300))
def test_distinct_ids_of_any_size_are_those_of_torch_unique(backend: str, ids: list[int]) -> None:
    """Catches: negative ids sorted behind the others, a digit that the sort leaves out, ids that one hash joins."""
    got = distinct(ints(*ids), None, backend=backend)
    for one, wanted in zip(got, torch.unique(ints(*ids), return_inverse=True), strict=True):
        assert torch.equal(one, wanted)


@needs_compiled
def test_many_ids_of_any_size_are_found_by_any_number_of_threads(
    threads: Callable[[int], None], generator: torch.Generator
) -> None:
    """Catches: places that count the ids of one thread only."""
    ids = torch.randint(-(2**62), 2**62, (5000,), generator=generator)[torch.randint(0, 5000, (40_000,))]
    wanted = torch.unique(ids, return_inverse=True)
    for count in (1, 2, 3, 9):
        threads(count)
        for got, one in zip(distinct(ids, None, backend="cpu"), wanted, strict=True):
            assert torch.equal(got, one)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_sums_by_group_are_those_of_float64(backend: str, width: int, generator: torch.Generator) -> None:
    """Catches: occurrences of a group lost or taken from its neighbour, groups without any that are not zero."""
    places = torch.randint(0, 200, (3000,), generator=generator)
    places[places % 50 == 3] = 0
    places[-HOT:] = 199
    values = torch.randn(3000, width, generator=generator)
    groups = group(places, 200, backend=backend)
    assert torch.equal(groups.order, torch.sort(places, stable=True).indices.int())
    assert torch.equal(groups.starts, offsets_of(torch.bincount(places, minlength=200).tolist()))
    wanted = torch.zeros(200, width).double().index_add_(0, places, values.double())
    assert_close(sum_groups(values, groups, backend=backend), wanted, 1e-6)
    none = group(places[:0], 0, backend=backend)
    assert sum_groups(values[:0], none, backend=backend).shape == (0, width)


@pytest.mark.parametrize("backend", BACKENDS)
@given(lists=st.lists(st.lists(st.integers(0, 299), unique=True, max_size=150), min_size=1, max_size=4))
def test_merged_lists_are_their_sum_over_the_rows_that_occur(backend: str, lists: list[list[int]]) -> None:
    """Catches: an id of two lists that appears twice, rows of a list that a block's edge cuts off."""
    ids = [ints(*sorted(own)) for own in lists]
    values = [torch.randn(len(own), 5) for own in ids]
    unique, total = merge_rows(ids, values, 300, backend=backend)
    assert torch.equal(unique, torch.cat(ids).unique())
    wanted = torch.zeros(300, 5).double()
    for own, part in zip(ids, values, strict=True):
        wanted[own] += part
    assert_close(total, wanted[unique], 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_finite_means_every_value(backend: str) -> None:
    """Catches: a tail that nobody looks at, large numbers whose sum overflows taken for infinite ones."""
    values = torch.full((67, 41), 3e38)
    assert all_finite(values, backend=backend) and all_finite(values[:0], backend=backend)
    for place in (0, 1024, 67 * 41 - 1):
        for bad in (torch.inf, -torch.inf, torch.nan):
            spoiled = values.clone()
            spoiled.view(-1)[place] = bad
            assert not all_finite(spoiled, backend=backend)


# ---- row optimizers

STEP = AdamStep(number=3, lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
ROWS = 150


def update(name: str, state: list[Tensor], gradients: Gradients, backend: str | None) -> list[Tensor]:
    """State after one step; of Adagrad the second tensor's first column is the accumulator."""
    weight, moment1, moment2 = (one.clone() for one in state)
    if name == "adagrad":
        total = moment1[:, 0].contiguous()
        rowwise_adagrad(weight, total, gradients, lr=0.1, eps=1e-6, backend=backend)
        return [weight, total]
    (lazy_adam if name == "lazy-adam" else dense_adamw)(weight, moment1, moment2, gradients, STEP, backend=backend)
    return [weight, moment1, moment2]


def state_and_gradients(width: int, generator: torch.Generator) -> tuple[list[Tensor], Gradients, Gradients]:
    """(weight and two moments, gradients by occurrence, the same summed)."""
    state = [torch.randn(ROWS, width, generator=generator) for _ in range(3)]
    state[1].abs_(), state[2].square_()
    ids = torch.randint(0, ROWS - 40, (2500,), generator=generator)
    ids[500 : 500 + HOT] = 7
    values = torch.randn(2500, width, generator=generator)
    unique, places = distinct(ids, ROWS)
    groups = group(places, len(unique))
    return state, Gradients(unique, values, groups), Gradients(unique, sum_groups(values, groups))


def double(gradients: Gradients) -> Gradients:
    return replace(gradients, values=gradients.values.double())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["adagrad", "lazy-adam", "adamw"])
def test_an_update_is_the_reference_in_float64(backend: str, width: int, name: str, generator: torch.Generator) -> None:
    """Catches: a wrong formula, rows updated twice, a scale or a clip applied to the wrong thing or not at all."""
    state, apart, summed = state_and_gradients(width, generator)
    for scale, row_clip in ((1.0, 0.0), (-0.3, 0.0), (0.3, 1.5)):
        given_summed = replace(summed, scale=scale, row_clip=row_clip)
        wanted = update(name, [one.double() for one in state], double(given_summed), "reference")
        for gradients in (given_summed, replace(apart, scale=scale, row_clip=row_clip)):
            got = update(name, state, gradients, backend)
            for one, other in zip(got, wanted, strict=True):
                assert_close(one, other, 3e-6)


def gradients(ids: Tensor = IDS, values: Tensor = ROWS_OF_IDS, groups: Groups | None = None) -> dict[str, Any]:
    return {"gradients": Gradients(ids, values, groups)}


TABLE = torch.zeros(9, 2)
REFUSED_UPDATES: dict[str, tuple[dict[str, Any], str]] = {
    "an id past the table": (gradients(ints(1, 2, 9)), "gradients.ids go from 1 to 9, wanted 0 to 8"),
    "an id before the table": (gradients(ints(-1, 2, 3)), "gradients.ids go from -1 to 3, wanted 0 to 8"),
    "an id twice": (gradients(ints(1, 3, 3)), "gradients.ids go from 3 to 3 at place 1, wanted distinct ascending ids"),
    "ids in no order": (gradients(ints(3, 1, 2)), "gradients.ids go from 3 to 1 at place 0, wanted distinct ascending"),
    "short ids": (gradients(IDS.int()), r"gradients.ids is int32 \[3\], wanted int64 \[3\]"),
    "ids of two dimensions": (gradients(IDS.view(3, 1)), r"gradients.ids is int64 \[3, 1\], wanted int64 \[3\]"),
    "gradients of another width": (
        gradients(values=torch.ones(3, 4)),
        r"gradients.values is float32 \[3, 4\] on cpu, wanted float32 \[3, 2\]",
    ),
    "gradients of other ids": (
        gradients(values=torch.ones(2, 2)),
        r"gradients.values is float32 \[2, 2\] on cpu, wanted float32 \[3, 2\]",
    ),
    "gradients of another type": (
        gradients(values=ROWS_OF_IDS.bfloat16()),
        r"gradients.values is bfloat16 \[3, 2\] on cpu, wanted float32 \[3, 2\]",
    ),
    "groups of other ids": (gradients(groups=PAIR), r"groups.starts is int64 \[3\], wanted int64 \[4\]"),
    "groups of short starts": (
        gradients(groups=Groups(PAIR.order, ints(0, 1, 2, 3).int())),
        r"groups.starts is int32 \[4\], wanted int64 \[4\]",
    ),
    "short state": ({"state": torch.zeros(8, 2)}, r"is float32 \[8.*\] on cpu, wanted float32 \[9.*\] on cpu"),
    "state of another type": ({"state": TABLE.double()}, r"is float64 \[9.*\] on cpu, wanted float32 \[9.*\] on cpu"),
    "state apart": ({"state": torch.zeros(9, 4)[:, ::2]}, "has strides .*, wanted it contiguous"),
    "a table apart": ({"weight": torch.zeros(9, 4)[:, ::2]}, "weight has strides .*, wanted it contiguous"),
    "a table of integers": ({"weight": torch.zeros(9, 2).long()}, r"weight is int64 \[9, 2\], wanted floating-point"),
    "a table of one dimension": (
        {"weight": torch.zeros(9)},
        r"weight is float32 \[9\], wanted floating-point \[N, D\]",
    ),
}


@pytest.mark.parametrize("name", ["adagrad", "lazy-adam", "adamw"])
@pytest.mark.parametrize("case", REFUSED_UPDATES)
def test_an_update_that_does_not_fit_its_table_is_refused(case: str, name: str) -> None:
    """Catches: writing beside the table or its state for an id it does not have, ids of 32 bits read as such of 64, a
    row that two threads update at once, a copy updated in the table's place."""
    changed, message = REFUSED_UPDATES[case]
    x: dict[str, Any] = {"weight": TABLE.clone(), "state": TABLE.clone(), **gradients(), **changed}
    with pytest.raises(ValueError, match=message):
        if name == "adagrad":
            rowwise_adagrad(
                x["weight"], x["state"][:, 0] if "state" in changed else torch.zeros(9), x["gradients"], lr=1.0, eps=0.0
            )
        else:
            run = lazy_adam if name == "lazy-adam" else dense_adamw
            run(x["weight"], torch.zeros(9, 2), x["state"], x["gradients"], STEP)


def test_groups_apart_are_summed_as_they_are() -> None:
    """Catches: strided places of occurrences read as if they lay one after the other."""
    apart = Groups(PAIR.order.repeat_interleave(2)[::2], PAIR.starts.repeat_interleave(2)[::2])
    values = torch.randn(3, 2)
    assert torch.equal(sum_groups(values, apart), sum_groups(values, PAIR))
    updated = [torch.zeros(9, 2), torch.zeros(9, 2)]
    for weight, groups in zip(updated, (apart, PAIR), strict=True):
        rowwise_adagrad(weight, torch.zeros(9), Gradients(ints(1, 2), values, groups), lr=1.0, eps=0.1)
    assert torch.equal(*updated)


def test_scale_and_clip_are_what_they_say() -> None:
    """Catches: a clip by the norm of all rows, one before the scale, one that lengthens short gradients."""
    gradient = torch.tensor([[3.0, 0.0, 4.0, 0.0], [0.1, 0.0, 0.0, 0.2], [0.0] * 4])
    settled = reference._settled(Gradients(ints(1, 2, 3), gradient, scale=2.0, row_clip=0.5))
    assert_close(settled[0], gradient[0] / 10, 1e-6)
    assert torch.equal(settled[1:], 2 * gradient[1:])


@needs_compiled
@pytest.mark.parametrize("name", ["adagrad", "lazy-adam", "adamw"])
@pytest.mark.parametrize("width", [1, 50, 128])
def test_summing_in_the_update_gives_the_bits_of_summing_before(
    name: str, width: int, generator: torch.Generator
) -> None:
    """Catches: occurrences that the fused form adds in another order."""
    state, apart, summed = state_and_gradients(width, generator)
    for one, other in zip(update(name, state, apart, "cpu"), update(name, state, summed, "cpu"), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_without_any_occurrence_have_a_gradient_of_zero(backend: str) -> None:
    """Catches: no occurrences taken for gradients that are summed already, which reads memory that is not there."""
    none = Groups(torch.empty(0, dtype=torch.int32), torch.zeros(4, dtype=torch.int64))
    assert torch.equal(sum_groups(torch.empty(0, 20), none, backend=backend), torch.zeros(3, 20))
    weight = torch.ones(5, 20)
    rowwise_adagrad(weight, torch.ones(5), Gradients(ints(0, 2, 4), torch.empty(0, 20), none), lr=1.0, eps=1e-6)
    assert torch.equal(weight, torch.ones(5, 20))


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_without_ids_leaves_a_lazy_table_alone(backend: str, generator: torch.Generator) -> None:
    state, _, _ = state_and_gradients(5, generator)
    none = Gradients(ints(), torch.zeros(0, 5))
    for name in ("adagrad", "lazy-adam"):
        got = update(name, state, none, backend)
        assert torch.equal(got[0], state[0])
    assert_close(update("adamw", state, none, backend)[1], state[1] * 0.8, 1e-6)


# ---- any number of threads, no compiler, other types


def everything(generator: torch.Generator) -> list[Tensor]:
    """What the compiled operators answer on inputs with hot ids."""
    ids = torch.randint(0, 3000, (PAST_CACHE,), generator=generator).square() // 3000
    ids[:HOT] = 11
    table = torch.randn(3000, 128, generator=generator, requires_grad=True)
    (rows,) = embedding_lookup([table], ids, ints(0, PAST_CACHE))
    weights = torch.randn(rows.shape, generator=generator)
    (gradient,) = torch.autograd.grad(rows, [table], weights)
    state, apart, _ = state_and_gradients(50, generator)
    updated = [one for name in ("adagrad", "lazy-adam", "adamw") for one in update(name, state, apart, None)]
    merged = merge_rows(
        [ids[:900].unique(), ids[500:].unique()], [weights[: len(x.unique())] for x in (ids[:900], ids[500:])], 3000
    )
    return [rows, gradient.indices(), gradient.values(), *updated, *merged, *distinct(ids, 3000)]


@needs_compiled
def test_any_number_of_threads_gives_the_same_bits(threads: Callable[[int], None]) -> None:
    """Catches: sums cut at the edges of what a thread works on."""
    answers = []
    for count in (1, 2, 3, 8):
        threads(count)
        answers.append(everything(torch.Generator().manual_seed(0)))
    for other in answers[1:]:
        assert all(torch.equal(one, again) for one, again in zip(answers[0], other, strict=True))


def test_without_the_compiled_library_torch_answers_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, generator: torch.Generator
) -> None:
    """Catches: an operator that only runs where there was a compiler."""
    wanted = everything(torch.Generator().manual_seed(0))

    def missing(name: str) -> None:
        raise OSError("not compiled: no C++ compiler was found")

    monkeypatch.setattr(native, "library", missing)
    picked, reason = OPERATOR.pick(CPU)
    assert picked.name == "reference" and "no C++ compiler" in reason
    for one, other in zip(everything(torch.Generator().manual_seed(0)), wanted, strict=True):
        assert_close(one, other, 3e-6)
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler was found"):
        distinct(ints(1), 2, backend="cpu")


@needs_compiled
def test_what_is_not_fp32_takes_the_reference() -> None:
    """Catches: doubles read as floats."""
    table = torch.randn(9, 4).double()
    (rows,) = embedding_lookup([table], ints(2, 8), ints(0, 2))
    assert torch.equal(rows, table[[2, 8]])
    with pytest.raises(ConfigError, match="takes float32 or bfloat16 rows, not torch.float64"):
        embedding_lookup([table], ints(2, 8), ints(0, 2), backend="cpu")
