"""The compiled HSTU attention, under every instruction set of this processor, against the float64 reference."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import instruction_sets
from tests.support.close import assert_close
from tests.support.jagged_cases import Case, make_case, row_lengths, values_and_gradients
from turbogr.ops.hstu_attention import cpu, hstu_attention, kernels, reference, tiles
from turbogr.ops.hstu_attention.reference import Bias, Mask

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
LONGEST = 8192
WEEK = 7 * 86400
UNEVEN = [17, 0, 1, 64, 131, 33, 200, 65, 0]
TARGETS = torch.tensor([3, 0, 1, 5, 70, 0, 9, 1, 0])


@pytest.fixture(params=instruction_sets.runnable(), autouse=True, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with instruction_sets.forced(request.param, "hstu_attention", cpu._symbol):
        yield request.param


def narrowed(case: Case, dtype: torch.dtype) -> Case:
    """q, k, v and the output's gradient in `dtype`, both tables in fp32."""
    single = case.to(torch.float32)
    return replace(single, fused=single.fused.detach().to(dtype).requires_grad_(), weights=single.weights.to(dtype))


def attend(case: Case, backend: str, **mask: Any) -> Tensor:
    return hstu_attention(
        *case.parts,
        case.offsets,
        max_len=LONGEST if case.position is None else len(case.position),
        position_bias=case.position,
        time_bias=case.time,
        times=case.times,
        next_times=case.next_times,
        backend=backend,
        **mask,
    )


def assert_agrees(case: Case, dtype: torch.dtype, slack: float = 1, **mask: Any) -> None:
    low = narrowed(case, dtype)
    got = values_and_gradients(lambda c: attend(c, "cpu", **mask), low)
    wanted = values_and_gradients(lambda c: attend(c, "reference", **mask), low.to(torch.float64))
    names = ["output", "gradient of q, k and v"] + [
        f"gradient of the {name} table"
        for name, table in (("position", case.position), ("time", case.time))
        if table is not None
    ]
    for name, one, other in zip(names, got, wanted, strict=True):
        assert_close(one, other, slack * TOLERANCE[dtype], name)


CASES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    "uneven rows": (UNEVEN, {}, {}),
    "no row": ([], {}, {}),
    "all rows empty": ([0, 0, 0], {}, {}),
    "one token": ([1], {}, {}),
    "one token a row": ([1, 1, 0, 1], {}, {}),
    "a row cut into key blocks": ([3, 700, 0, 515], {"dims": (16, 16)}, {}),
    "unsorted times": (UNEVEN, {"in_order": False}, {}),
    "equal times": (UNEVEN, {"span": 1}, {}),
    "times of a week": (UNEVEN, {"span": WEEK}, {}),
    "spans beyond 2^31": (UNEVEN, {"span": 2**45, "in_order": False}, {}),
    "spans just below 2^31": (UNEVEN, {"span": 2**31 - 2000, "in_order": False}, {}),
    "no position bias": (UNEVEN, {"biases": (False, True)}, {}),
    "no time bias": (UNEVEN, {"biases": (True, False)}, {}),
    "no bias": (UNEVEN, {"biases": (False, False)}, {}),
    "one head of 50": (UNEVEN, {"heads": 1, "dims": (50, 50)}, {}),
    "two heads of 25": (UNEVEN, {"dims": (25, 25)}, {}),
    "heads of 64": (UNEVEN, {"dims": (64, 64)}, {}),
    "wider keys": (UNEVEN, {"dims": (33, 7)}, {}),
    "wider values": (UNEVEN, {"dims": (1, 40)}, {}),
    "three heads": (UNEVEN, {"heads": 3, "dims": (17, 18)}, {}),
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
@pytest.mark.parametrize("name", CASES)
def test_values_and_every_gradient_agree_with_the_reference(name: str, dtype: torch.dtype) -> None:
    """Catches: a bucket off by one, a mask's edge, a head, a tail of lanes, of rows or of columns that is wrong."""
    lengths, facts, mask = CASES[name]
    assert_agrees(make_case(lengths, **({"max_len": max([1, *lengths])} | facts)), dtype, **mask)


@given(
    lengths=row_lengths(),
    heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 36), st.integers(1, 36)),
    span=st.sampled_from((1, 10**6, 2**45)),
    in_order=st.booleans(),
    biases=st.tuples(st.booleans(), st.booleans()),
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
    # a window of 1 leaves one entry of the position table, whose few terms may nearly cancel
    assert_agrees(make_case(lengths, **facts), torch.float32, slack=10, **mask)


@functools.cache
def long_row() -> tuple[Case, list[Tensor]]:
    """A row of 8192 tokens whose numbers bf16 holds exactly, and what the reference answers."""
    case = make_case([LONGEST], heads=1, dims=(16, 16), max_len=LONGEST, span=60 * 86400)
    case = narrowed(case, torch.bfloat16)
    return case, values_and_gradients(lambda c: attend(c, "reference"), case.to(torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_of_8192_tokens_agrees(dtype: torch.dtype) -> None:
    """Catches: sums in single precision over too many cells, a diagonal that runs out of its memory."""
    case, wanted = long_row()
    for one, other in zip(values_and_gradients(lambda c: attend(c, "cpu"), narrowed(case, dtype)), wanted, strict=True):
        assert_close(one, other, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("width", "buckets"), [(0.301, 128), (0.07, 400), (0.01, 3000), (0.7, 9), (3.0, 40), (0.301, 2)]
)
def test_every_edge_of_every_bucket_is_kept(width: float, buckets: int) -> None:
    """Catches: a guessed bucket that one comparison does not mend, or a table longer than the registers hold."""
    edges = [edge for edge in reference.bucket_edges(width, buckets) if edge < 2**31 - 3]
    seconds = sorted({max(edge + step, 0) for edge in edges for step in (-1, 0, 1)} | {0, 2**31 - 3})
    count = len(seconds)
    table = torch.randn(buckets + 1, generator=torch.Generator().manual_seed(0))
    # one query per difference: row b is one token, whose own time is that far from its next one
    for past in (1, -1):
        y = hstu_attention(
            torch.ones(count, 1, 1),
            torch.zeros(count, 1, 1),
            torch.ones(count, 1, 1),
            torch.arange(count + 1),
            max_len=1,
            time_bias=table,
            times=torch.zeros(count, dtype=torch.int64),
            next_times=past * torch.tensor(seconds),
            bucket_width=width,
            backend="cpu",
        )
        wanted = table[reference.time_bucket(torch.tensor(seconds), width, buckets)]
        assert_close(y.flatten(), torch.nn.functional.silu(wanted), 1e-6)


def run_twice(dtype: torch.dtype, threads: tuple[int, int], **mask: Any) -> None:
    case = narrowed(make_case([900, 3, 0, 64, 700, 130, 20, 20, 90], dims=(24, 16), max_len=900), dtype)
    outcomes = []
    for count in threads:
        torch.set_num_threads(count)
        outcomes.append(values_and_gradients(lambda c: attend(c, "cpu", **mask), case))
    for one, other in zip(*outcomes, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("threads", [(2, 2), (1, 2), (1, 5)], ids=str)
@pytest.mark.parametrize("mask", [{}, {"num_context": 2, "window": 100, "context_sees_history": True}], ids=str)
def test_any_number_of_threads_gives_the_same_bits(
    dtype: torch.dtype, threads: tuple[int, int], mask: dict[str, Any]
) -> None:
    """Catches: sums that are added in the order in which threads happen to finish."""
    if mask:
        mask = mask | {"num_targets": torch.tensor([3, 0, 0, 5, 80, 0, 0, 2, 1])}
    run_twice(dtype, threads, **mask)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lengths", [[5, 0, 70], [600, 3]], ids=str)
def test_every_cell_of_strided_gradients_is_written_and_none_beside(dtype: torch.dtype, lengths: list[int]) -> None:
    """Catches: a fused layer's buffer that keeps what was in it, or a vector's tail written over the neighbour."""
    case = narrowed(make_case(lengths, heads=3, dims=(19, 5), max_len=600), dtype)
    wanted = values_and_gradients(lambda c: attend(c, "cpu"), case)
    bias = Bias(case.position.detach(), case.time.detach(), case.times, case.next_times, 0.301)  # type: ignore[union-attr]
    given_ = (*(part.detach() for part in case.parts), case.offsets, 600, bias, Mask())
    # heads and parts lie apart: between them a value that must stay
    room = torch.full((sum(lengths), 4, 19 + 19 + 5 + 3), 7.0, dtype=dtype)
    dq, dk, dv = room[:, :3, 0:19], room[:, :3, 20:39], room[:, :3, 40:45]
    for part in (dq, dk, dv):
        part.fill_(torch.nan)
    dy = torch.full((sum(lengths), 3, 9), 7.0, dtype=dtype)[..., 2:7].copy_(case.weights)
    tables = kernels(torch.device("cpu"), "cpu").backward(dy, *given_, dq, dk, dv)
    got = [torch.cat((dq, dk, dv), dim=2), *tables]
    for one, other in zip(got, wanted[1:], strict=True):
        assert one is not None and torch.equal(one, other)
    between = torch.cat((room[:, 3].flatten(), room[:, :3, 19].flatten(), room[:, :3, 39].flatten()))
    assert (between == 7).all() and (room[:, :, 45] == 7).all()


def test_gradients_of_an_expanded_output_gradient_are_taken() -> None:
    """Catches: a backward that takes a gradient of stride 0 (a sum's) for a dense one."""
    case = narrowed(make_case([4, 70]), torch.float32)
    y = attend(case, "cpu")
    summed = torch.autograd.grad(y.sum(), case.fused, retain_graph=True)[0]
    assert torch.equal(summed, torch.autograd.grad(y, case.fused, torch.ones_like(y))[0])


def test_a_key_that_overflows_leaves_other_rows_and_its_own_past_alone() -> None:
    """Catches: 0 * inf through lanes that belong to another row, or through a masked pair."""
    case = narrowed(make_case([70, 70, 5]), torch.float32)
    before = attend(case, "cpu").detach()
    with torch.no_grad():
        case.fused[130, :, 4:8] = torch.inf
    after = attend(case, "cpu").detach()
    same = (before == after).flatten(1).all(1)
    assert same.tolist() == [True] * 130 + [False] * 10 + [True] * 5
    assert not torch.isfinite(after[130:140]).any()


def test_other_types_go_to_the_torch_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: float64 read as fp32, or bias tables in bf16."""
    case = make_case([5, 3])
    assert_close(attend(case, "cpu"), attend(case, "reference"), 1e-12)
    taken: list[torch.dtype] = []
    true = tiles.forward
    monkeypatch.setattr(tiles, "forward", lambda q, *rest: taken.append(q.dtype) or true(q, *rest))
    for dtype in (torch.float64, torch.bfloat16, torch.float32):
        attend(case.to(dtype), "cpu")
    assert taken == [torch.float64, torch.bfloat16]
