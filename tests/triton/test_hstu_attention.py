"""HSTU attention's kernels against the float64 reference: output and every gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.close import relative_rmse
from tests.support.jagged_cases import Case, make_case, values_and_gradients
from tests.support.triton_device import DEVICE, DTYPES, TOLERANCES
from turbogr.ops.hstu_attention import OPERATOR, hstu_attention, kernels, triton
from turbogr.ops.hstu_attention.autograd import attend
from turbogr.ops.hstu_attention.reference import Bias, Mask, attend_reference, bucket_edges, time_bucket
from turbogr.ops.hstu_attention.triton_plan import edge_tables
from turbogr.ops.triton_support import TARGETS as GPUS

MAX_LEN = 160
ROWS = [17, 0, 1, 64, 131, 33, 0, 2]
TARGETS = [3, 0, 1, 5, 40, 2, 0, 1]


def on_device(case: Case, dtype: torch.dtype) -> Case:
    """The case's numbers, rounded to dtype, as leaves on the device; tables stay in fp32."""

    def leaf(x: torch.Tensor | None, kind: torch.dtype) -> torch.Tensor | None:
        return None if x is None else x.detach().to(DEVICE, kind).requires_grad_()

    fused = leaf(case.fused, dtype)
    assert fused is not None
    return replace(
        case,
        fused=fused,
        position=leaf(case.position, torch.float32),
        time=leaf(case.time, torch.float32),
        offsets=case.offsets.to(DEVICE),
        times=case.times.to(DEVICE),
        next_times=case.next_times.to(DEVICE),
        weights=case.weights.to(DEVICE, dtype),
    )


def test_the_public_operator_runs_them_where_triton_runs() -> None:
    """Catches: kernels that are tested and shipped, and that no call ever reaches."""
    assert OPERATOR.pick(DEVICE)[0].name == "triton" and kernels(DEVICE) is triton
    case = on_device(make_case([9, 0, 30], dims=(16, 16), max_len=MAX_LEN), torch.float32)
    facts = {"max_len": MAX_LEN, "position_bias": case.position, "time_bias": case.time}
    facts |= {"times": case.times, "next_times": case.next_times}
    got = values_and_gradients(lambda x: hstu_attention(*x.parts, x.offsets, **facts), case)
    bias = Bias(case.position, case.time, case.times, case.next_times, 0.301)
    direct = values_and_gradients(lambda x: attend(triton, *x.parts, x.offsets, MAX_LEN, bias, Mask()), case)
    assert all(map(torch.equal, got, direct))


def check(case: Case, dtype: torch.dtype, **mask: Any) -> None:
    targets = mask.pop("num_targets", None)
    rounded = case.to(dtype).to(torch.float64)
    rounded = replace(
        rounded,
        position=None if case.position is None else case.position.detach().clone().requires_grad_(),
        time=None if case.time is None else case.time.detach().clone().requires_grad_(),
    )

    def bias_of(x: Case) -> Bias:
        times = (None, None) if x.time is None else (x.times, x.next_times)
        return Bias(x.position, x.time, *times, 0.301)

    wanted_mask = Mask(None if targets is None else torch.tensor(targets), **mask)
    given_mask = Mask(None if targets is None else torch.tensor(targets, device=DEVICE), **mask)
    wanted = values_and_gradients(
        lambda x: attend_reference(*x.parts, x.offsets, MAX_LEN, bias_of(x), wanted_mask), rounded
    )
    given = values_and_gradients(
        lambda x: attend(triton, *x.parts, x.offsets, MAX_LEN, bias_of(x), given_mask), on_device(case, dtype)
    )
    for name, one, other in zip(("y", "fused", "tables", "tables"), given, wanted, strict=False):
        error = relative_rmse(one.cpu(), other)
        assert error < TOLERANCES[dtype], (name, error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True), (True, True)])
def test_values_and_gradients_agree_with_the_reference(dtype: torch.dtype, biases: tuple[bool, bool]) -> None:
    check(make_case(ROWS, dims=(24, 16), max_len=MAX_LEN, biases=biases), dtype)


@pytest.mark.parametrize(
    "mask",
    [
        {"num_targets": TARGETS},
        {"window": 9},
        {"window": 40, "num_targets": TARGETS},
        {"num_context": 3},
        {"num_context": 3, "context_sees_history": True, "window": 20, "num_targets": [3, 0, 0, 5, 20, 2, 0, 0]},
        {"num_context": 37, "num_targets": [3, 0, 0, 5, 20, 2, 0, 0]},
    ],
)
def test_masks_agree_with_the_reference(mask: dict[str, Any]) -> None:
    context = mask.get("num_context", 0)
    rows = [n if n == 0 else max(n, context + 5) for n in ROWS] if context else ROWS
    check(make_case(rows, dims=(16, 16), max_len=MAX_LEN), torch.float32, **mask)


@pytest.mark.parametrize("row", [("sm_90, no bias", 128), ("sm_90", 256), ("sm, fp32", 256)])
def test_tiles_of_other_targets_give_the_same(row: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a kernel that is right for the interpreter's own tile alone."""
    chosen = triton.TILES["sm_90", 128] | triton.TILES[row]
    monkeypatch.setattr(triton, "tile_of", lambda kernel, *_, **__: chosen[kernel])
    check(make_case([150, 1], dims=(16, 16), max_len=MAX_LEN), torch.float32)
    targets = {"num_context": 3, "context_sees_history": True, "window": 40, "num_targets": [9, 0]}
    check(make_case([150, 5], dims=(16, 16), max_len=MAX_LEN), torch.float32, **targets)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_that_may_be_picked_is_compiled_ahead_of_time(gpu: str, dtype: torch.dtype) -> None:
    half = dtype in triton.HALF
    compiled = {
        (one.kernel, one.constants["BLOCK_I"], one.constants["BLOCK_J"], one.num_warps, one.num_stages, block)
        for one in triton.configurations()
        if gpu in one.targets and one.tensor == half
        for block in (16, 32, 64, 128, 256)
        if block <= one.constants["BLOCK_DQK"]
    }
    for dim in (16, 32, 64, 128, 256):
        for kernel, plain in [(name, plain) for name in triton.KERNELS for plain in (True, False)]:
            if kernel != "bias" or not plain:
                tile = triton.tile_of(kernel, gpu, dtype, dim, plain=plain)
                picked = (triton.KERNELS[kernel], tile.queries, tile.keys, tile.warps, tile.stages, dim)
                assert picked in compiled, (kernel, tile, dim)


@pytest.mark.parametrize("span", [50, 10**4, 10**8, 2**31 - 2, 2**31, 2**40])
@pytest.mark.parametrize("in_order", [True, False])
def test_every_span_of_time_in_any_order_falls_into_the_right_buckets(span: int, in_order: bool) -> None:
    check(make_case([70, 1, 45], dims=(16, 16), max_len=MAX_LEN, span=span, in_order=in_order), torch.float32)


def test_one_row_and_rows_that_are_all_empty() -> None:
    check(make_case([150], heads=1, dims=(16, 16), max_len=MAX_LEN), torch.float32)
    check(make_case([1], heads=1, dims=(16, 16), max_len=MAX_LEN), torch.float32)
    check(make_case([0, 0], dims=(16, 16), max_len=MAX_LEN), torch.float32)


def test_far_edges_lie_in_their_cells() -> None:
    """Numbers next to every bucket edge: rounding to a float may carry one into the next cell."""
    tables = edge_tables(0.301, 128, torch.device("cpu"))
    near = torch.tensor([edge + step for edge in bucket_edges(0.301, 128) for step in (-1, 0, 1) if edge < 2**31 - 2])
    near = near.clamp(min=1)
    cell = (near.to(torch.float32).view(torch.int32).long() >> (23 - tables.shift)) - (127 << tables.shift)
    edge, before, after, _ = tables.cells[cell].long().unbind(1)
    bucket = torch.where(near >= edge, after, before)
    assert torch.equal(bucket, time_bucket(near, 0.301, 128))


def test_two_calls_give_the_same_bits() -> None:
    case = make_case(ROWS, dims=(16, 16), max_len=MAX_LEN)
    bias = lambda x: Bias(x.position, x.time, x.times, x.next_times, 0.301)  # noqa: E731
    runs = [
        values_and_gradients(
            lambda x: attend(triton, *x.parts, x.offsets, MAX_LEN, bias(x), Mask()), on_device(case, torch.float32)
        )
        for _ in range(2)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
