"""Sampled softmax: every backend, the public formulation, degenerate tokens, negatives drawn inside."""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tests.support.close import assert_close
from tests.support.instruction_sets import forced, runnable
from turbogr.ops.philox import Key, Purpose
from turbogr.ops.sampled_softmax import OPERATOR, UniformDraws, cpu, sampled_softmax

COMPILED = next(one for one in OPERATOR.backends if one.name == "cpu").rejects(torch.device("cpu")) is None
needs_compiled = pytest.mark.skipif(not COMPILED, reason="the compiled library is not here")
BACKENDS = [pytest.param("cpu", marks=needs_compiled), "sparse", "reference"]
FASTER = BACKENDS[:-1]
PRECISION = {"cpu": 1e-5, "sparse": 1e-10, "reference": 1e-10}
"""The compiled backend takes single precision, the others what they are given."""
WIDTHS = (2, 7, 16, 33, 50, 64, 130, 200)
Inputs = dict[str, Tensor]


def inputs(tokens: int, rows: int, negatives: int, dim: int = 6, seed: int = 0) -> Inputs:
    """Negatives repeat among themselves and hit the positive as soon as there are few rows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "query": torch.randn(tokens, dim, generator=generator).double().requires_grad_(),
        "rows": torch.randn(rows, dim, generator=generator).double().requires_grad_(),
        "positive": torch.randint(0, rows, (tokens,), generator=generator),
        "negatives": torch.randint(0, rows, (tokens, negatives), generator=generator),
    }


def run(x: Inputs, backend: str, **options: Any) -> list[Tensor]:
    """Losses, query gradient, row gradient of 3 * the summed loss."""
    if backend == "cpu":
        doubles = {name: x[name] for name in ("query", "rows") if x[name].dtype == torch.float64}
        x = x | {name: y.detach().float().requires_grad_() for name, y in doubles.items()}
    total, losses = sampled_softmax(**x, **({"temperature": 0.5} | options), backend=backend)
    assert not losses.requires_grad
    assert float(total.detach()) == pytest.approx(float(losses.sum()), rel=1e-6, abs=1e-12)
    dquery, drows = torch.autograd.grad(3 * total, [x["query"], x["rows"]])
    return [losses, dquery, drows]


def assert_same(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other, what in zip(got, wanted, ("losses", "query gradient", "row gradient"), strict=True):
        assert_close(one, other, tolerance, what)


@pytest.mark.parametrize("backend", FASTER)
@given(
    tokens=st.integers(0, 9),
    rows=st.integers(1, 12),
    negatives=st.integers(1, 8),
    log_q=st.booleans(),
    temperature=st.sampled_from((0.05, 1.0)),
    seed=st.integers(0, 99),
)
def test_values_and_every_gradient_are_those_of_the_reference(
    backend: str, tokens: int, rows: int, negatives: int, log_q: bool, temperature: float, seed: int
) -> None:
    """Catches: repeated candidates counted once, a gradient that misses the norm, entries sorted to the wrong row."""
    x = inputs(tokens, rows, negatives, seed=seed)
    options = {"temperature": temperature, "log_q": torch.randn(rows).double() if log_q else None}
    wanted = run(x, "reference", **options)
    assert_same(run(x, backend, **options), wanted, PRECISION[backend])


@pytest.mark.parametrize("backend", FASTER)
def test_single_precision_stays_near_double(backend: str) -> None:
    """Catches: sums in an order or a type that loses digits."""
    x = inputs(200, 300, 64, dim=32)
    single = dict(x)
    for name in ("query", "rows"):
        single[name] = x[name].detach().float().requires_grad_()
    assert_same(run(single, backend, temperature=0.05), run(x, "reference", temperature=0.05), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_public_formulation_gives_the_same(backend: str) -> None:
    """Catches: the positive missing from the denominator, hits not masked, similarity not a cosine."""
    x = inputs(20, 9, 7)

    def public(query: Tensor, rows: Tensor) -> Tensor:
        unit_query, unit_rows = F.normalize(query, dim=1, eps=1e-6), F.normalize(rows, dim=1, eps=1e-6)
        positive = (unit_query * unit_rows[x["positive"]]).sum(1, keepdim=True) / 0.05
        negative = torch.einsum("td,trd->tr", unit_query, unit_rows[x["negatives"]]) / 0.05
        negative = torch.where(x["negatives"] == x["positive"][:, None], torch.full_like(negative, -5e4), negative)
        return -torch.cat((positive, negative), dim=1).log_softmax(dim=1)[:, 0]

    losses = public(x["query"], x["rows"])
    wanted = [losses.detach(), *torch.autograd.grad(3 * losses.sum(), [x["query"], x["rows"]])]
    assert_same(run(x, backend, temperature=0.05), wanted, PRECISION[backend])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_whose_negatives_all_are_its_positive_has_loss_zero(backend: str) -> None:
    """Catches: -inf - -inf, or a division by an empty sum."""
    x = inputs(3, 5, 4)
    x["negatives"][1] = x["positive"][1]
    losses, dquery, drows = run(x, backend)
    assert abs(losses[1]) < 1e-6 and dquery[1].abs().max() < PRECISION[backend]
    assert torch.isfinite(losses).all() and torch.isfinite(drows).all() and losses[0] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_vectors_shorter_than_eps_are_divided_by_eps(backend: str) -> None:
    """Catches: NaN from a zero vector, and a gradient through the norm where the norm was not used."""
    x = inputs(4, 6, 3)
    with torch.no_grad():
        x["query"][0] = 0.0
        x["query"][1] *= 1e-9
        x["rows"][2] = 0.0
        x["rows"][3] *= 1e-9
    x["positive"][2], x["negatives"][2] = 2, torch.tensor([3, 2, 0])

    losses, dquery, drows = run(x, backend)
    assert all(torch.isfinite(part).all() for part in (losses, dquery, drows))
    assert float(losses[0]) == pytest.approx(math.log(1 + int((x["negatives"][0] != x["positive"][0]).sum())))
    # below eps the map is x / eps, so that the gradient of a zero query is that of a linear score over eps
    unit_rows = F.normalize(x["rows"].detach(), dim=1, eps=1e-6)
    candidates = torch.cat((x["positive"][:1], x["negatives"][0][x["negatives"][0] != x["positive"][0]]))
    slopes = torch.full((len(candidates),), 1 / len(candidates), dtype=torch.float64)
    slopes[0] -= 1
    wanted = 3 * (slopes / 0.5) @ unit_rows[candidates] / 1e-6
    assert_close(dquery[0], wanted, max(PRECISION[backend], 1e-9))


@pytest.mark.parametrize("backend", FASTER)
def test_vectors_just_shorter_than_eps_have_the_gradient_of_a_plain_division(backend: str) -> None:
    """Catches: the projection of the norm's gradient kept where the norm was replaced by eps."""
    x = inputs(6, 8, 4)
    with torch.no_grad():
        for name in ("query", "rows"):
            x[name][::2] *= 0.7e-6 / x[name][::2].norm(dim=1, keepdim=True)
    assert_same(run(x, backend), run(x, "reference"), PRECISION[backend])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_correction_changes_nothing_for_a_uniform_sampler(backend: str) -> None:
    """Catches: a correction of the negatives alone."""
    x = inputs(20, 50, 8)
    assert_same(run(x, backend, log_q=torch.full((50,), -math.log(50))), run(x, backend), max(PRECISION[backend], 1e-6))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_correction_is_subtracted_from_every_score(backend: str) -> None:
    """Catches: a correction with the wrong sign, or one divided by the temperature."""
    x = inputs(1, 3, 2)
    x["positive"][:], x["negatives"][:] = 0, torch.tensor([1, 2])
    log_q = torch.tensor([0.2, 0.5, 0.3]).double().log()
    scores = (F.normalize(x["query"], dim=1) @ F.normalize(x["rows"], dim=1).T)[0].detach() / 0.5 - log_q
    losses, *_ = run(x, backend, log_q=log_q)
    assert float(losses) == pytest.approx(float(torch.logsumexp(scores, 0) - scores[0]), rel=PRECISION[backend])


@pytest.mark.parametrize("backend", FASTER)
def test_two_runs_add_in_the_same_order(backend: str) -> None:
    """Catches: sums whose order depends on chance, so that a resumed run would not repeat."""
    x = inputs(300, 20, 40, dim=16)
    for one, other in zip(run(x, backend), run(x, backend), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("backend", FASTER)
def test_half_precision_queries_are_scored_in_single(backend: str) -> None:
    """Catches: a loss in bf16, and a gradient of another type than its tensor's."""
    x = inputs(50, 60, 16, dim=16)
    half = dict(x)
    for name, kind in (("query", torch.bfloat16), ("rows", torch.float32)):
        half[name] = x[name].detach().to(kind).requires_grad_()
    losses, dquery, drows = run(half, backend, temperature=0.05)
    assert losses.dtype == torch.float32 and dquery.dtype == torch.bfloat16 and drows.dtype == torch.float32
    exact = {**x, "query": half["query"].detach().double().requires_grad_()}  # what bf16 could hold
    assert_close(losses, run(exact, "reference", temperature=0.05)[0], 1e-5)


@pytest.mark.parametrize("backend", FASTER)
def test_a_token_alone_whose_negatives_repeat_is_taken(backend: str) -> None:
    """Catches: torch's refusal of a pattern with more entries than cells, at the end of an epoch or on few items."""
    x = inputs(1, 3, 128)
    assert_same(run(x, backend), run(x, "reference"), PRECISION[backend])


@pytest.mark.parametrize("rows", [30, 3000], ids=["copied", "in place"])
@pytest.mark.parametrize("name", runnable())
def test_every_width_runs_on_every_instruction_set(name: str, rows: int) -> None:
    """Catches: the last vector of a row left out or read past its end, a width without code."""
    with forced(name, "sampled_softmax", cpu._compiled):
        for width in WIDTHS:
            x = inputs(11, rows, 37, dim=width)
            assert_same(run(x, "cpu"), run(x, "reference"), 1e-5)


@needs_compiled
@pytest.mark.parametrize("rows", [300, 9000], ids=["copied", "in place"])
def test_any_number_of_threads_adds_to_the_same_bits(rows: int) -> None:
    """Catches: entries in the order in which threads came, sums cut where a thread's part ends."""
    x = inputs(1000, rows, 40, dim=16)
    answers = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        answers.append(run(x, "cpu"))
    for other in answers[1:]:
        assert all(torch.equal(one, same) for one, same in zip(answers[0], other, strict=True))


@needs_compiled
def test_entries_hold_token_and_row_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a row's number that is shifted into the token's, once tokens are by the million."""
    monkeypatch.setattr(cpu, "KEY_BITS", 11)
    x = inputs(500, 4000, 5)
    assert_same(run(x, "cpu"), run(x, "reference"), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [-1, 6, 2**32])
def test_a_candidate_that_is_no_row_is_an_error(bad: int, backend: str) -> None:
    """Catches: memory beside the table read as a row, a negative number that is counted from the table's end."""
    x = inputs(4, 6, 3)
    for name in ("positive", "negatives"):
        wrong = {**x, name: x[name].clone()}
        wrong[name][2] = bad
        with pytest.raises(IndexError, match="token 2 has a candidate that is none of the 6 rows"):
            run(wrong, backend)
    wrong = {**inputs(4, 6, 3), "negatives": drawn(4, 3, 6)}  # type: ignore[dict-item]
    wrong["positive"][2] = bad
    with pytest.raises(IndexError):
        run(wrong, backend)


def drawn(tokens: int, count: int, bound: int) -> UniformDraws:
    users = torch.randint(0, 1 << 32, (tokens,), generator=torch.Generator().manual_seed(5))
    return UniformDraws(Key((5 << 40) | 77, 9, Purpose.NEGATIVES), users, torch.arange(tokens), count, bound)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [9, 700])
@pytest.mark.parametrize("log_q", [False, True])
def test_drawn_inside_or_before_the_loss_and_every_gradient_are_the_same(backend: str, rows: int, log_q: bool) -> None:
    """Catches: another draw, a row that is given its neighbour's gradient, ids out of order or without an entry."""
    x, draws = inputs(23, rows, 1), drawn(23, 30, rows)
    options = {"log_q": torch.randn(rows).double() if log_q else None}
    given = {**x, "negatives": draws.ids()}
    losses, dquery, drows = run({**x, "negatives": draws}, backend, **options)  # type: ignore[dict-item]
    assert drows.is_coalesced()
    touched = torch.cat((given["positive"], given["negatives"].flatten())).unique()
    assert torch.equal(drows.indices()[0], touched)
    wanted = run(given, backend, **options)
    assert_same([losses, dquery, drows.to_dense()], wanted, 1e-12)
    assert_same(wanted, run(given, "reference", **options), PRECISION[backend])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_touches_no_row(backend: str) -> None:
    """Catches: the last batch of a run, or a rank without users, that reads what was never written."""
    losses, dquery, drows = run({**inputs(0, 70, 1), "negatives": drawn(0, 4, 70)}, backend)  # type: ignore[dict-item]
    assert losses.shape == (0,) and dquery.shape == (0, 6) and drows.indices().shape == (1, 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("are_drawn", [False, True])
def test_without_negatives_every_loss_and_every_gradient_is_zero(backend: str, are_drawn: bool) -> None:
    """Catches: the null address of no negatives taken for negatives to be drawn, which read the draws at null, too."""
    x = inputs(5, 6, 0)
    if are_drawn:
        x["negatives"] = drawn(5, 0, 6)  # type: ignore[assignment]
    losses, dquery, drows = run(x, backend)
    assert losses.shape == (5,) and drows.shape == (6, 6)
    assert all(float(part.to_dense().abs().max()) == 0.0 for part in (losses, dquery, drows))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_without_rows_does_for_no_token(backend: str) -> None:
    """Catches: a refusal of the empty batch of a rank without users."""
    x = {**inputs(0, 6, 3), "rows": torch.zeros(0, 6, dtype=torch.float64, requires_grad=True)}
    losses, dquery, drows = run(x, backend)
    assert losses.shape == (0,) and dquery.shape == drows.shape == (0, 6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_draws_told_by_strided_numbers_are_the_same_negatives(backend: str) -> None:
    """Catches: users and positions read as if they lay one after the other, which gives other negatives silently."""
    x, draws = inputs(23, 40, 1), drawn(23, 30, 40)
    strided = replace(
        draws, **{name: torch.stack((getattr(draws, name),) * 2, dim=1)[:, 0] for name in ("users", "positions")}
    )
    wanted = run({**x, "negatives": draws}, backend)  # type: ignore[dict-item]
    got = run({**x, "negatives": strided}, backend)  # type: ignore[dict-item]
    assert all(torch.equal(one.to_dense(), other.to_dense()) for one, other in zip(got, wanted, strict=True))


WAYS = {"eager": nullcontext, "watched": lambda: FlopCounterMode(display=False)}
"""As it is called, and as a graph of torch.compile or a dispatch mode calls it."""


def without(**changed: Any) -> dict[str, Any]:
    """Draws with other fields."""
    return {"negatives": replace(drawn(4, 3, 6), **changed)}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "query of one dimension": ({"query": torch.zeros(6)}, r"query is float32 \[6\], wanted floating-point \[T, D\]"),
    "query without columns": (
        {"query": torch.zeros(4, 0)},
        r"query is float32 \[4, 0\], wanted floating-point \[T, D\]",
    ),
    "query of integers": ({"query": torch.zeros(4, 6).int()}, r"query is int32 \[4, 6\], wanted floating-point"),
    "rows of another width": ({"rows": torch.zeros(6, 5)}, r"rows is float32 \[6, 5\], wanted floating-point \[U, 6\]"),
    "rows of one dimension": ({"rows": torch.zeros(6)}, r"rows is float32 \[6\], wanted floating-point \[U, 6\]"),
    "rows of integers": ({"rows": torch.zeros(6, 6).long()}, r"rows is int64 \[6, 6\], wanted floating-point"),
    "no rows": ({"rows": torch.zeros(0, 6)}, r"rows is float32 \[0, 6\], wanted at least one row for 4 tokens"),
    "no rows to draw from": (
        {"rows": torch.zeros(0, 6), **without(bound=0)},
        r"rows is float32 \[0, 6\], wanted at least one row for 4 tokens",
    ),
    "a positive missing": ({"positive": torch.zeros(3).long()}, r"positive is int64 \[3\], wanted int64 \[4\]"),
    "positives of two dimensions": (
        {"positive": torch.zeros(4, 1).long()},
        r"positive is int64 \[4, 1\], wanted int64 \[4\]",
    ),
    "short positives": ({"positive": torch.zeros(4).int()}, r"positive is int32 \[4\], wanted int64 \[4\]"),
    "short negatives": ({"negatives": torch.zeros(4, 3).int()}, r"negatives is int32 \[4, 3\], wanted int64 \[4, R\]"),
    "negatives of one dimension": (
        {"negatives": torch.zeros(4).long()},
        r"negatives is int64 \[4\], wanted int64 \[4, R\]",
    ),
    "negatives of other tokens": (
        {"negatives": torch.zeros(5, 3).long()},
        r"negatives is int64 \[5, 3\], wanted int64 \[4, R\]",
    ),
    "a user missing": (without(users=torch.zeros(3).long()), r"negatives.users is int64 \[3\], wanted int64 \[4\]"),
    "short users": (without(users=torch.zeros(4).int()), r"negatives.users is int32 \[4\], wanted int64 \[4\]"),
    "short positions": (
        without(positions=torch.zeros(4).int()),
        r"negatives.positions is int32 \[4\], wanted int64 \[4\]",
    ),
    "a position missing": (
        without(positions=torch.zeros(3).long()),
        r"negatives.positions is int64 \[3\], wanted int64 \[4\]",
    ),
    "fewer draws than none": (without(count=-1), "negatives.count is -1, wanted 0 to 262144"),
    "more draws than there are": (without(count=2**18 + 1), "negatives.count is 262145, wanted 0 to 262144"),
    "draws from more items": (without(bound=7), "drawn from 7 items, the table has 6 rows"),
    "draws from fewer items": (without(bound=5), "drawn from 5 items, the table has 6 rows"),
    "a short correction": ({"log_q": torch.zeros(5)}, r"log_q is float32 \[5\], wanted floating-point \[6\]"),
    "a correction of integers": (
        {"log_q": torch.zeros(6).long()},
        r"log_q is int64 \[6\], wanted floating-point \[6\]",
    ),
    **{
        f"{name} {number}": ({name: number}, f"{name} is {number}, wanted a number above 0")
        for name in ("temperature", "eps")
        for number in (0.0, -0.5, math.nan, math.inf)
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_its_name(case: str, way: str) -> None:
    """Catches: memory beside an argument read or written (a table without rows, a short correction, integers of 32 bits
    read as such of 64), and losses of a temperature or an eps that make none."""
    changed, message = REFUSED[case]
    x: dict[str, Any] = {"temperature": 0.5} | inputs(4, 6, 3) | changed
    call: AbstractContextManager[Any] = WAYS[way]()
    with call, pytest.raises(ValueError, match=message):
        sampled_softmax(**x)


def test_what_does_not_fit_is_refused_in_a_compiled_graph() -> None:
    """Catches: checks that torch.compile passes by."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: sampled_softmax(**x, temperature=0.5)[0], backend="eager")
    compiled(inputs(4, 6, 3))
    with pytest.raises(ValueError, match=r"positive is int32 \[4\], wanted int64 \[4\]"):
        compiled({**inputs(4, 6, 3), "positive": torch.zeros(4, dtype=torch.int32)})
