"""The sampled softmax's Triton kernels against the reference in double precision."""

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.close import assert_close
from tests.support.triton_device import DEVICE, DTYPES, TOLERANCES
from turbogr.ops.dropout import Noise
from turbogr.ops.philox import Purpose, random_below
from turbogr.ops.philox.triton import key_words
from turbogr.ops.sampled_softmax import UniformDraws, sampled_softmax
from turbogr.ops.sampled_softmax import triton as kernels
from turbogr.ops.sampled_softmax.reference import loss_reference

Inputs = dict[str, Tensor]
SHAPES = {
    "one token": (1, 3, 1, 5),
    "no token": (0, 3, 4, 5),
    "few rows": (7, 2, 9, 16),
    "rows without an entry": (5, 90, 6, 6),
    "many entries of a row": (41, 3, 17, 10),
}
"""Tokens, rows, negatives, width."""


@pytest.fixture(params=[True, False], ids=["deterministic", "atomic"])
def _each_way(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(True)


def inputs(tokens: int, rows: int, negatives: int, width: int, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    made = {
        "query": torch.randn(tokens, width, generator=generator).to(dtype).requires_grad_(),
        "rows": torch.randn(rows, width, generator=generator).to(dtype).requires_grad_(),
        "positive": torch.randint(0, rows, (tokens,), generator=generator),
        "negatives": torch.randint(0, rows, (tokens, negatives), generator=generator),
    }
    return {name: x.detach().to(DEVICE).requires_grad_(x.requires_grad) for name, x in made.items()}


def doubled(x: Inputs) -> Inputs:
    return {name: y.detach().double().requires_grad_() if y.is_floating_point() else y for name, y in x.items()}


def run(loss, x: Inputs, log_q: Tensor | None = None, temperature: float = 0.2) -> list[Tensor]:
    total, losses = loss(x["query"], x["rows"], x["positive"], x["negatives"], temperature, log_q, 1e-6)
    assert not losses.requires_grad
    return [losses, *torch.autograd.grad(3 * total, [x["query"], x["rows"]])]


def sampled_softmax_triton(query, rows, positive, negatives, temperature, log_q, eps):
    """By the public function, as the trainer calls it."""
    return sampled_softmax(
        query, rows, positive, negatives, temperature=temperature, log_q=log_q, eps=eps, backend="triton"
    )


def assert_same(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for one, other, what in zip(got, wanted, ("losses", "query gradient", "row gradient"), strict=True):
        assert_close(one, other, tolerance, what)


@pytest.mark.usefixtures("_each_way")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_are_the_references(shape: str, dtype: torch.dtype, monkeypatch) -> None:
    """Catches: an entry counted twice or not at all, a piece added to the wrong row, a hit that counts."""
    monkeypatch.setattr(kernels, "PIECE", 16)
    x = inputs(*SHAPES[shape], dtype)
    log_q = torch.randn(SHAPES[shape][1], generator=torch.Generator().manual_seed(4)).to(DEVICE)
    for correction in (None, log_q):
        got = run(kernels.loss_triton, x, correction)
        assert got[0].dtype == torch.float32 and got[1].dtype == got[2].dtype == dtype
        assert_same(got, run(loss_reference, doubled(x), correction), TOLERANCES[dtype])


@pytest.mark.usefixtures("_each_way")
def test_vectors_shorter_than_eps_are_divided_by_eps() -> None:
    x = inputs(4, 6, 3, 6)
    with torch.no_grad():
        x["query"][0], x["rows"][2] = 0.0, 0.0
        x["query"][1] *= 1e-9
        x["rows"][3] *= 1e-9
    assert_same(run(kernels.loss_triton, x), run(loss_reference, doubled(x)), 1e-5)


@triton.jit
def _drawn_kernel(users, positions, out, low, high, step, purpose, bound, BLOCK_R: tl.constexpr):
    t = tl.program_id(0)
    index = kernels._draw(low, high, step, purpose, tl.load(users + t), tl.load(positions + t), 8, bound, BLOCK_R)
    tl.store(out + t * BLOCK_R + tl.arange(0, BLOCK_R), index)


def noise(tokens: int) -> Noise:
    generator = torch.Generator().manual_seed(5)
    users = torch.randint(0, 1 << 32, (tokens,), generator=generator).to(DEVICE)
    return Noise((5 << 40) | 77, 9, users, torch.randint(0, 1 << 16, (tokens,), generator=generator).to(DEVICE))


def test_negatives_are_drawn_as_the_sampler_draws_them() -> None:
    """Catches: another counter layout, groups in another order, a product's half taken signed."""
    where = noise(6)
    key = where.key(Purpose.NEGATIVES, 0)
    for bound in (1, 7, 2_000_000_011):
        out = torch.empty(6, 16, dtype=torch.int32, device=DEVICE)
        _drawn_kernel[(6,)](where.users, where.positions, out, *key_words(key), bound, 16)
        assert torch.equal(out.long(), random_below(key, where.users, where.positions, 24, bound)[:, 8:])


def test_drawn_negatives_and_given_ones_have_one_result() -> None:
    where = noise(6)
    key = where.key(Purpose.NEGATIVES, 0)
    x = inputs(6, 50, 22, 8)
    both = []
    for negatives in (
        UniformDraws(key, where.users, where.positions, 22, 50),
        random_below(key, where.users, where.positions, 22, 50),
    ):
        known = kernels.forward(x["query"], x["rows"], x["positive"], negatives, 0.2, None, 1e-6, True)
        both.append((known.losses, known.dquery, known.normaliser, known.entries))
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@pytest.mark.usefixtures("_each_way")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [9, 300])
def test_drawn_inside_or_before_the_loss_and_every_gradient_are_the_same(rows: int, dtype: torch.dtype) -> None:
    """Catches: the distinct ids taken for places in the table, a row without an entry in the gradient."""
    x, where = inputs(6, rows, 1, 12, dtype), noise(6)
    draws = UniformDraws(where.key(Purpose.NEGATIVES, 0), where.users, where.positions, 22, rows)
    given = {**x, "negatives": draws.ids()}
    losses, dquery, drows = run(sampled_softmax_triton, {**x, "negatives": draws})  # type: ignore[dict-item]
    wanted = run(sampled_softmax_triton, given)
    touched = torch.cat((given["positive"], given["negatives"].flatten())).unique()
    assert drows.is_coalesced() and torch.equal(drows.indices()[0], touched)
    exact = torch.are_deterministic_algorithms_enabled()
    assert_same([losses, dquery, drows.to_dense()], wanted, 0.0 if exact else TOLERANCES[dtype])


def test_two_runs_add_in_the_same_order() -> None:
    x = inputs(60, 5, 20, 16)
    for one, other in zip(run(kernels.loss_triton, x), run(kernels.loss_triton, x), strict=True):
        assert torch.equal(one, other)
