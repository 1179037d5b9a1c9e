"""Rows handed out by place: values and dense gradients against torch's index_select."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.close import assert_close
from turbogr.ops.embedding import OPERATOR, take_rows

COMPILED = next(one for one in OPERATOR.backends if one.name == "cpu").rejects(torch.device("cpu")) is None
BACKENDS = [pytest.param("cpu", marks=pytest.mark.skipif(not COMPILED, reason="nothing is compiled")), "reference"]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    places=st.lists(st.integers(0, 11), max_size=60),
    width=st.sampled_from((1, 7, 16, 50, 64, 130)),
    transposed=st.booleans(),
)
def test_taken_rows_and_their_gradient_are_those_of_index_select(
    backend: str, places: list[int], width: int, transposed: bool
) -> None:
    """Catches: repeats counted once, rows nobody asked for without a zero gradient, a strided gradient misread."""
    own = torch.tensor(places, dtype=torch.int64)
    rows = torch.randn(12, width, requires_grad=True)
    weights = torch.randn(width, len(own)).T if transposed else torch.randn(len(own), width)
    got = take_rows(rows, own, backend=backend)
    assert torch.equal(got, rows[own])
    (gradient,) = torch.autograd.grad(got, [rows], weights)
    wanted = torch.zeros(12, width).double().index_add_(0, own, weights.double())
    assert (gradient - wanted).abs().max() <= 1e-6 * (1 + weights.abs().sum())
    assert not gradient.is_sparse and not gradient[wanted.eq(0).all(1)].any()


def test_two_uses_of_one_leaf_add_up_and_a_graph_takes_them_too() -> None:
    """Catches: a second part of a batch that overwrites the first one's gradient, a graph without a backward."""
    rows = torch.randn(5, 8, requires_grad=True)
    places = torch.tensor([4, 0, 4])
    (take_rows(rows, places[:2]).sum() + 2 * take_rows(rows, places).sum()).backward()
    assert rows.grad is not None and rows.grad[:, 0].tolist() == [3, 0, 0, 0, 5]
    compiled = torch.compile(lambda x, at: take_rows(x, at).square().sum(), backend="aot_eager", fullgraph=True)
    again = rows.detach().clone().requires_grad_()
    compiled(again, places).backward()
    assert again.grad is not None
    assert_close(again.grad, 2 * rows.detach() * torch.tensor([1.0, 0, 0, 0, 2]).unsqueeze(1), 1e-6)


@pytest.mark.skipif(not COMPILED, reason="nothing is compiled")
def test_any_number_of_threads_sums_to_the_same_bits(threads: Callable[[int], None]) -> None:
    """Catches: sums cut at the edges of what a thread works on."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(900, 64, generator=generator, requires_grad=True)
    places = torch.randint(0, 900, (30_000,), generator=generator).square() // 900
    weights = torch.randn(30_000, 64, generator=generator)
    answers = []
    for count in (1, 2, 5):
        threads(count)
        answers.append(torch.autograd.grad(take_rows(rows, places), [rows], weights)[0])
    assert all(torch.equal(answers[0], other) for other in answers[1:])


def test_what_does_not_fit_is_refused() -> None:
    """Catches: a place beside the rows, which would be memory of something else."""
    with pytest.raises(IndexError):
        take_rows(torch.randn(3, 2), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"places is int32 \[1\]"):
        take_rows(torch.randn(3, 2), torch.tensor([0], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"rows is int64 \[3\]"):
        take_rows(torch.arange(3), torch.tensor([0]))
