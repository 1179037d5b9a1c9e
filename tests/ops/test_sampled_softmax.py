"""Sampled softmax: both backends, the public formulation, and its degenerate tokens."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.support.close import assert_close
from turbogr.ops.sampled_softmax import sampled_softmax

BACKENDS = ("sparse", "reference")
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
    total, losses = sampled_softmax(**x, **({"temperature": 0.5} | options), backend=backend)
    assert not losses.requires_grad
    assert float(total.detach()) == pytest.approx(float(losses.sum()), rel=1e-6, abs=1e-12)
    return [losses, *torch.autograd.grad(3 * total, [x["query"], x["rows"]])]


def assert_same(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other, what in zip(got, wanted, ("losses", "query gradient", "row gradient"), strict=True):
        assert_close(one, other, tolerance, what)


@given(
    tokens=st.integers(0, 9),
    rows=st.integers(1, 12),
    negatives=st.integers(1, 8),
    log_q=st.booleans(),
    temperature=st.sampled_from((0.05, 1.0)),
    seed=st.integers(0, 99),
)
def test_sparse_agrees_with_the_reference_in_values_and_every_gradient(
    tokens: int, rows: int, negatives: int, log_q: bool, temperature: float, seed: int
) -> None:
    """Catches: repeated candidates counted once, a gradient that misses the norm, entries sorted to the wrong row."""
    x = inputs(tokens, rows, negatives, seed=seed)
    options = {"temperature": temperature, "log_q": torch.randn(rows).double() if log_q else None}
    wanted = run(x, "reference", **options)
    assert_same(run(x, "sparse", **options), wanted, 1e-10)


def test_single_precision_stays_near_double() -> None:
    """Catches: sums in an order or a type that loses digits."""
    x = inputs(200, 300, 64, dim=32)
    single = dict(x)
    for name in ("query", "rows"):
        single[name] = x[name].detach().float().requires_grad_()
    assert_same(run(single, "sparse", temperature=0.05), run(x, "reference", temperature=0.05), 1e-5)


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
    assert_same(run(x, backend, temperature=0.05), wanted, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_whose_negatives_all_are_its_positive_has_loss_zero(backend: str) -> None:
    """Catches: -inf - -inf, or a division by an empty sum."""
    x = inputs(3, 5, 4)
    x["negatives"][1] = x["positive"][1]
    losses, dquery, drows = run(x, backend)
    assert losses[1] == 0 and not dquery[1].any()
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
    assert_close(dquery[0], 3 * (slopes / 0.5) @ unit_rows[candidates] / 1e-6, 1e-9)


def test_vectors_just_shorter_than_eps_have_the_gradient_of_a_plain_division() -> None:
    """Catches: the projection of the norm's gradient kept where the norm was replaced by eps."""
    x = inputs(6, 8, 4)
    with torch.no_grad():
        for name in ("query", "rows"):
            x[name][::2] *= 0.7e-6 / x[name][::2].norm(dim=1, keepdim=True)
    assert_same(run(x, "sparse"), run(x, "reference"), 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_correction_changes_nothing_for_a_uniform_sampler(backend: str) -> None:
    """Catches: a correction of the negatives alone."""
    x = inputs(20, 50, 8)
    assert_same(run(x, backend, log_q=torch.full((50,), -math.log(50))), run(x, backend), 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_correction_is_subtracted_from_every_score(backend: str) -> None:
    """Catches: a correction with the wrong sign, or one divided by the temperature."""
    x = inputs(1, 3, 2)
    x["positive"][:], x["negatives"][:] = 0, torch.tensor([1, 2])
    log_q = torch.tensor([0.2, 0.5, 0.3]).double().log()
    scores = (F.normalize(x["query"], dim=1) @ F.normalize(x["rows"], dim=1).T)[0].detach() / 0.5 - log_q
    losses, *_ = run(x, backend, log_q=log_q)
    assert float(losses) == pytest.approx(float(torch.logsumexp(scores, 0) - scores[0]), rel=1e-12)


def test_two_runs_add_in_the_same_order() -> None:
    """Catches: sums whose order depends on chance, so that a resumed run would not repeat."""
    x = inputs(300, 20, 40, dim=16)
    for one, other in zip(run(x, "sparse"), run(x, "sparse"), strict=True):
        assert torch.equal(one, other)


def test_half_precision_queries_are_scored_in_single() -> None:
    """Catches: a loss in bf16, and a gradient of another type than its tensor's."""
    x = inputs(50, 60, 16, dim=16)
    half = dict(x)
    for name, kind in (("query", torch.bfloat16), ("rows", torch.float32)):
        half[name] = x[name].detach().to(kind).requires_grad_()
    losses, dquery, drows = run(half, "sparse", temperature=0.05)
    assert losses.dtype == torch.float32 and dquery.dtype == torch.bfloat16 and drows.dtype == torch.float32
    exact = {**x, "query": half["query"].detach().double().requires_grad_()}  # what bf16 could hold
    assert_close(losses, run(exact, "reference", temperature=0.05)[0], 1e-5)


def test_shapes_that_do_not_fit_are_named() -> None:
    x = inputs(4, 6, 3)
    with pytest.raises(ValueError, match=r"must be \[T, D\], \[U, D\], \[T\] and \[T, R\]"):
        sampled_softmax(**{**x, "positive": x["positive"][:3]}, temperature=1.0)


def test_a_token_alone_whose_negatives_repeat_is_taken() -> None:
    """Catches: torch's refusal of a pattern with more entries than cells, at the end of an epoch or on few items."""
    x = inputs(1, 3, 128)
    assert_same(run(x, "sparse"), run(x, "reference"), 1e-10)
