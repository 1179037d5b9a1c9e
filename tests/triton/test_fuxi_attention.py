"""FuXi's kernels of the position and the time channel against the float64 reference: output and every gradient."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.close import relative_rmse
from tests.support.fuxi_cases import TIMES, Inputs, make_inputs
from tests.support.triton_device import DEVICE, DTYPES, TOLERANCES
from turbogr.ops.fuxi_attention import triton
from turbogr.ops.fuxi_attention.autograd import attend
from turbogr.ops.fuxi_attention.reference import attend_reference
from turbogr.ops.hstu_attention.reference import Mask

MAX_LEN = 160
ROWS = [17, 0, 1, 64, 131, 33, 0, 2]
TARGETS = [3, 0, 1, 5, 40, 2, 0, 1]
DECAY_TOLERANCE = 1e-5
"""Of a decay's gradient: what its exponents lose by rounding grows with them."""


def on_device(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The numbers, rounded to dtype, as leaves on the device; tables stay in fp32."""

    def leaf(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().to(DEVICE).requires_grad_()

    low = inputs.narrowed(dtype)
    fused = leaf(low.case.fused)
    assert fused is not None
    case = replace(
        low.case,
        fused=fused,
        position=leaf(low.case.position),
        time=leaf(low.case.time),
        offsets=low.case.offsets.to(DEVICE),
        times=low.case.times.to(DEVICE),
        next_times=low.case.next_times.to(DEVICE),
    )
    return Inputs(case, leaf(low.decay), low.weights.to(DEVICE), low.max_len)


def results(inputs: Inputs, mask: Mask, reference: bool = False) -> list[Tensor]:
    given = (*inputs.case.parts, inputs.case.offsets, inputs.max_len, inputs.maps, mask)
    return inputs.results(attend_reference(*given) if reference else attend(triton, *given))


def check(inputs: Inputs, dtype: torch.dtype, **mask: Any) -> None:
    targets = mask.pop("num_targets", None)
    rounded = inputs.narrowed(dtype).narrowed(torch.float64).to(torch.float64)
    wanted_mask = Mask(None if targets is None else torch.tensor(targets), **mask)
    given_mask = Mask(None if targets is None else torch.tensor(targets, device=DEVICE), **mask)
    wanted = results(rounded, wanted_mask, reference=True)
    for number, (one, other) in enumerate(zip(results(on_device(inputs, dtype), given_mask), wanted, strict=True)):
        error = relative_rmse(one.cpu(), other)
        of_decay = inputs.decay is not None and number == len(wanted) - 1
        assert error < max(TOLERANCES[dtype], DECAY_TOLERANCE * of_decay), (number, error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("position", "time"), [(True, "none"), (False, "buckets"), (True, "buckets"), (True, "decay")])
def test_values_and_gradients_agree_with_the_reference(dtype: torch.dtype, position: bool, time: str) -> None:
    """Catches: a channel, a tile's edge or a block of columns that is wrong, sums in half precision."""
    check(make_inputs(ROWS, dims=(24, 16), max_len=MAX_LEN, position=position, time=time), dtype)


@pytest.mark.parametrize("time", TIMES[:2])
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
    ids=str,
)
def test_masks_agree_with_the_reference(mask: dict[str, Any], time: str) -> None:
    """Catches: a target, a window or a context token counted in one kernel and not in another."""
    context = mask.get("num_context", 0)
    rows = [n if n == 0 else max(n, context + 5) for n in ROWS] if context else ROWS
    check(make_inputs(rows, dims=(16, 16), max_len=MAX_LEN, time=time), torch.float32, **mask)


@pytest.mark.parametrize("span", [50, 10**4, 10**8, 2**31 - 2, 2**31, 2**40])
@pytest.mark.parametrize("in_order", [True, False])
def test_every_span_of_time_in_any_order_falls_into_the_right_buckets(span: int, in_order: bool) -> None:
    """Catches: a difference cut to 32 bits, an order taken for granted."""
    check(make_inputs([70, 1, 45], dims=(16, 16), max_len=MAX_LEN, span=span, in_order=in_order), torch.float32)


@pytest.mark.parametrize("time", TIMES[:2])
@pytest.mark.parametrize(
    ("heads", "dims"), [(1, (16, 50)), (5, (16, 40)), (3, (16, 7)), (1, (16, 1))], ids=["50", "200", "21", "1"]
)
def test_blocks_of_columns_end_with_the_width(heads: int, dims: tuple[int, int], time: str) -> None:
    """Catches: columns of a neighbour that are read or written where the width is no multiple of a block."""
    check(make_inputs([40, 3], heads=heads, dims=dims, max_len=MAX_LEN, time=time), torch.float32)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("lengths", [[150], [1], [0, 0]], ids=str)
def test_one_row_and_rows_that_are_all_empty(lengths: list[int], time: str) -> None:
    """Catches: a launch without programs, a row that fills no tile."""
    check(make_inputs(lengths, heads=1, dims=(16, 16), max_len=MAX_LEN, time=time), torch.float32)


def test_heads_that_lie_apart_are_taken() -> None:
    """Catches: v or dv read as one dense row of columns where they are not."""
    inputs = on_device(make_inputs([40, 3], heads=3, dims=(8, 16), max_len=MAX_LEN), torch.float32)
    values = inputs.case.parts[2].detach()
    assert values.stride(1) != values.shape[2]
    room = torch.full((43, 3, 20), 7.0, device=DEVICE)
    dv, dense = room[..., :16], torch.full((43, 3, 16), 7.0, device=DEVICE)
    triton.backward(inputs.weights, values, inputs.case.offsets, MAX_LEN, inputs.maps, Mask(), dv)
    triton.backward(inputs.weights, values.contiguous(), inputs.case.offsets, MAX_LEN, inputs.maps, Mask(), dense)
    assert torch.equal(dv, dense)
    assert (room[..., 16:] == 7).all()


@pytest.mark.parametrize("time", TIMES[:2])
def test_two_calls_give_the_same_bits(time: str) -> None:
    """Catches: sums in the order in which programs happen to finish."""
    inputs = make_inputs(ROWS, dims=(16, 16), max_len=MAX_LEN, time=time)
    runs = [results(on_device(inputs, torch.float32), Mask()) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
