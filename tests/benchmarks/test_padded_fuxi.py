"""FuXi's baseline computes the public formula: values and gradients agree with a second padded form of our own."""

import pytest
import torch

from benchmarks.baselines import padded_fuxi
from tests.support import fuxi_padded, padded
from tests.support.close import assert_close
from tests.support.jagged_cases import make_case

MAX_LEN = 40


@pytest.mark.parametrize("lengths", [[7], [1, 30, 12], [40, 3]], ids=str)
def test_padded_channels_are_the_formula(lengths: list[int]) -> None:
    """Catches: a baseline that is fast because it computes something else (mask, divisor, bucket, channel)."""
    case = make_case(lengths, max_len=MAX_LEN)
    assert case.position is not None and case.time is not None
    ends = case.offsets[1:] - 1
    following = torch.cat((case.times[1:], case.times[-1:]))
    following[ends] = case.next_times[ends]
    differences = fuxi_padded.time_differences(padded.extended(case.times, following, case.offsets, MAX_LEN))
    maps = [fuxi_padded.position_map(case.position), case.time[padded.bucketed(differences)]]
    q, k, v = (padded.pad(part, case.offsets, MAX_LEN) for part in case.parts)
    wanted = padded.unpad(fuxi_padded.attention(q, k, v, maps), case.offsets)
    got = padded_fuxi.jagged_attention(
        *case.parts,
        case.offsets,
        max_len=MAX_LEN,
        position=torch.cat((case.position.flip(0), case.position[1:])),
        time=case.time,
        times=case.times,
        next_times=following,
    )
    assert_close(got, wanted, 1e-12)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad((got * weights).sum(), case.leaves())
    for one, other in zip(gradients, torch.autograd.grad((wanted * weights).sum(), case.leaves()), strict=True):
        assert_close(one, other, 1e-11)
