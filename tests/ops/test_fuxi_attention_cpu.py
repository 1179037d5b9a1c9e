"""The compiled FuXi attention, under every instruction set of this processor, against the float64 reference."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import instruction_sets
from tests.support.fuxi_cases import TIMES, Inputs, assert_same, make_inputs
from tests.support.jagged_cases import row_lengths
from turbogr.ops.fuxi_attention import cpu, tiles
from turbogr.ops.hstu_attention.reference import Mask

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LONGEST = 8192
UNEVEN = [17, 0, 1, 64, 131, 33, 200, 65, 0]
TARGETS = torch.tensor([3, 0, 1, 5, 70, 0, 9, 1, 0])


@pytest.fixture(params=instruction_sets.runnable(), autouse=True, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with instruction_sets.forced(request.param, "fuxi_attention", cpu._symbol):
        yield request.param


def assert_agrees(inputs: Inputs, dtype: torch.dtype, slack: float = 1, **mask: Any) -> None:
    low = inputs.narrowed(dtype)
    double = low.narrowed(torch.float64).to(torch.float64)
    wanted = double.results(double.attend("reference", **mask))
    assert_same(low.results(low.attend("cpu", **mask)), wanted, slack * TOLERANCE[dtype])


CASES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    "uneven rows": (UNEVEN, {}, {}),
    "no row": ([], {}, {}),
    "all rows empty": ([0, 0, 0], {}, {}),
    "one token": ([1], {}, {}),
    "one token a row": ([1, 1, 0, 1], {}, {}),
    "a row cut into key blocks": ([3, 700, 0, 515], {"dims": (16, 16)}, {}),
    "unsorted times": (UNEVEN, {"in_order": False}, {}),
    "equal times": (UNEVEN, {"span": 1}, {}),
    "spans beyond 2^31": (UNEVEN, {"span": 2**40, "in_order": False}, {}),
    "spans just below 2^31": (UNEVEN, {"span": 2**31 - 2000, "in_order": False}, {}),
    "no position map": (UNEVEN, {"position": False}, {}),
    "one head of 50": (UNEVEN, {"heads": 1, "dims": (50, 50)}, {}),
    "two heads of 25": (UNEVEN, {"dims": (25, 25)}, {}),
    "parts of several heads": (UNEVEN, {"heads": 5, "dims": (8, 40)}, {}),
    "narrow values": (UNEVEN, {"dims": (33, 3)}, {}),
    "wide values": (UNEVEN, {"heads": 1, "dims": (1, 150)}, {}),
    "targets": (UNEVEN, {}, {"num_targets": TARGETS}),
    "context": ([17, 0, 3, 64, 131, 500], {}, {"num_context": 3}),
    "context that sees history": ([17, 0, 80, 64, 131], {}, {"num_context": 3, "context_sees_history": True}),
    "a long context": ([170, 0, 80, 131], {}, {"num_context": 70, "context_sees_history": True}),
    "window": (UNEVEN, {}, {"window": 9}),
    "window of tiles": ([400, 65, 700], {}, {"window": 130}),
    "everything": (
        [90, 0, 200, 600],
        {"in_order": False},
        {"num_targets": torch.tensor([9, 0, 70, 3]), "num_context": 5, "window": 70, "context_sees_history": True},
    ),
}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("name", CASES)
def test_values_and_every_gradient_agree_with_the_reference(name: str, time: str, dtype: torch.dtype) -> None:
    """Catches: a channel, a part of the columns, a mask's edge, a tail of lanes, rows or columns that is wrong."""
    lengths, facts, mask = CASES[name]
    assert_agrees(make_inputs(lengths, time=time, **({"max_len": max([1, *lengths])} | facts)), dtype, **mask)


@given(
    lengths=row_lengths(),
    heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 9), st.integers(1, 36)),
    span=st.sampled_from((1, 10**6, 2**45)),
    in_order=st.booleans(),
    time=st.sampled_from(TIMES),
    position=st.booleans(),
    context=st.integers(0, 2),
    window=st.sampled_from((None, 1, 5, 66)),
    context_sees_history=st.booleans(),
    targets=st.lists(st.integers(0, 5), min_size=8, max_size=8),
)
def test_any_shape_agrees_with_the_reference(
    lengths: list[int],
    context: int,
    window: int | None,
    context_sees_history: bool,
    targets: list[int],
    **facts: Any,
) -> None:
    """Catches: a width, a length or a mask that nobody thought of."""
    counts = [min(n, target) for n, target in zip(lengths, targets, strict=False)]
    mask = {
        "num_targets": torch.tensor(counts, dtype=torch.int64) if any(targets) else None,
        "num_context": context,
        "window": window,
        "context_sees_history": context_sees_history,
    }
    lengths = [n if n == 0 else n + context for n in lengths]
    # a window of 1 leaves one entry of the position table, whose few terms may nearly cancel, as a decay's may
    assert_agrees(make_inputs(lengths, **facts), torch.float32, slack=20, **mask)


@functools.cache
def long_row(time: str) -> tuple[Inputs, list[Tensor]]:
    """A row of 8192 tokens whose numbers bf16 holds exactly, and what the reference answers."""
    inputs = make_inputs([LONGEST], heads=1, dims=(16, 16), max_len=LONGEST, span=60 * 86400, time=time)
    double = inputs.narrowed(torch.bfloat16).narrowed(torch.float64).to(torch.float64)
    return double, double.results(double.attend("reference"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("time", TIMES[:2])
def test_a_row_of_8192_tokens_agrees(time: str, dtype: torch.dtype) -> None:
    """Catches: sums in single precision over too many cells, a diagonal that runs out of its memory."""
    inputs, wanted = long_row(time)
    low = inputs.narrowed(dtype)
    assert_same(low.results(low.attend("cpu")), wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("time", TIMES[:2])
@pytest.mark.parametrize("threads", [(2, 2), (1, 2), (1, 5)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(time: str, dtype: torch.dtype, threads: tuple[int, int]) -> None:
    """Catches: sums that are added in the order in which threads happen to finish."""
    lengths = [900, 3, 0, 64, 700, 130, 20, 20, 90]
    inputs = make_inputs(lengths, dims=(24, 16), max_len=900, time=time).narrowed(dtype)
    mask = {"num_context": 2, "window": 700, "num_targets": torch.tensor([3, 0, 0, 5, 80, 0, 0, 2, 1])}
    outcomes = []
    for count in threads:
        torch.set_num_threads(count)
        outcomes.append(inputs.results(inputs.attend("cpu", **mask)))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("apart", [0, 2], ids=["dense heads", "heads apart"])
def test_dv_is_added_to_by_strides_and_nothing_beside_it(dtype: torch.dtype, apart: int) -> None:
    """Catches: what the semantic channel left in dv lost, or a vector's tail written over the neighbour."""
    lengths, heads, dv = [5, 0, 70, 600], 3, 19
    inputs = make_inputs(lengths, heads=heads, dims=(4, dv), max_len=600).narrowed(dtype)
    maps, mask, values = inputs.maps, Mask(), inputs.case.parts[2].detach()
    room = torch.full((sum(lengths), heads, dv + apart), 7.0, dtype=dtype)
    gradient = room[..., :dv]
    dy = torch.full((*inputs.weights.shape[:3], dv + apart), 7.0, dtype=dtype)[..., :dv].copy_(inputs.weights)
    cpu.backward(dy, values, inputs.case.offsets, 600, maps, mask, gradient)
    zero = torch.zeros(values.shape, dtype=torch.float32)
    wide = inputs.narrowed(torch.float32).maps
    cpu.backward(dy.float(), values.float(), inputs.case.offsets, 600, wide, mask, zero)
    assert_same([gradient], [zero + 7], TOLERANCE[dtype])
    assert (room[..., dv:] == 7).all()


def test_gradients_of_an_expanded_output_gradient_are_taken() -> None:
    """Catches: a backward that takes a gradient of stride 0 (a sum's) for a dense one."""
    inputs = make_inputs([4, 70]).narrowed(torch.float32)
    y = inputs.attend("cpu")
    summed = torch.autograd.grad(y.sum(), inputs.case.fused, retain_graph=True)[0]
    assert torch.equal(summed, torch.autograd.grad(y, inputs.case.fused, torch.ones_like(y))[0])


def test_other_types_go_to_the_torch_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: float64 read as fp32, or tables in bf16."""
    inputs = make_inputs([5, 3])
    assert_same([inputs.attend("cpu")], [inputs.attend("reference")], 1e-12)
    taken: list[torch.dtype] = []
    true = tiles.attend_tiles
    monkeypatch.setattr(
        "turbogr.ops.fuxi_attention.autograd.attend_tiles", lambda q, *rest: taken.append(q.dtype) or true(q, *rest)
    )
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        inputs.to(dtype).attend("cpu")
    assert taken == [torch.float64, torch.bfloat16]


def test_memory_above_the_answers_is_a_few_tiles() -> None:
    """Catches: cells of a whole row that are kept, forward or for the backward."""
    inputs = make_inputs([700, 300], max_len=700).narrowed(torch.float32)
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        inputs.attend("cpu")
    assert max(kept) <= inputs.case.fused.numel()
