"""FuXi attention: both backends against each other, against a padded second implementation, and at the edges."""

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import fuxi_padded, padded
from tests.support.fuxi_cases import TIMES, assert_same, make_inputs
from tests.support.jagged_cases import Case, row_lengths
from turbogr.ops import tiles as grouping
from turbogr.ops.fuxi_attention import fuxi_attention
from turbogr.ops.fuxi_attention.reference import time_decay

BACKENDS = ("tiles", "reference")
MAX_LEN = 80


@given(
    lengths=row_lengths(),
    heads=st.integers(1, 3),
    dims=st.sampled_from(((4, 4), (3, 5), (8, 2))),
    span=st.sampled_from((1, 10**6, 2**45)),
    in_order=st.booleans(),
    time=st.sampled_from(TIMES),
    position=st.booleans(),
    seed=st.integers(0, 99),
)
# a gradient of 1e-120, which fp32 answers with 0
@example(lengths=[1], heads=1, dims=(4, 4), span=2**45, in_order=False, time="decay", position=False, seed=0)
def test_tiles_agree_with_the_reference_in_values_and_every_gradient(lengths: list[int], **facts: Any) -> None:
    """Catches: padding that leaks into a gradient, a head, a channel or a row mixed up, a map off by one."""
    inputs = make_inputs(lengths, **facts)
    wanted = inputs.results(inputs.attend("reference"))
    assert_same(inputs.results(inputs.attend("tiles")), wanted, 1e-10)
    single = inputs.to(torch.float32)
    assert_same(single.results(single.attend("tiles")), wanted, 1e-5)


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [1, 1, 0, 1], [70], [0, 70, 1, 0, 2]], ids=str)
def test_the_smallest_and_the_most_uneven_batches_agree(lengths: list[int], time: str) -> None:
    """Catches: a batch without tokens, or rows without any, that a backend cannot take."""
    inputs = make_inputs(lengths, heads=3, dims=(4, 2), time=time)
    wanted = inputs.results(inputs.attend("reference"))
    assert wanted[0].shape == (sum(lengths), 2 if time == "none" else 3, 3, 2)
    assert_same(inputs.results(inputs.attend("tiles")), wanted, 1e-10)


def test_tiles_of_any_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: rows lost or doubled where the cell budget cuts a group."""
    inputs = make_inputs([9, 8, 8, 7, 9, 1, 0, 5])
    wanted = inputs.results(inputs.attend("reference"))
    for cells in (1, 200, 400):
        monkeypatch.setattr(grouping, "CELLS", cells)
        assert_same(inputs.results(inputs.attend("tiles")), wanted, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    lengths=row_lengths().filter(len),
    heads=st.integers(1, 2),
    dims=st.sampled_from(((4, 4), (3, 5))),
    time=st.sampled_from(TIMES),
    position=st.booleans(),
)
def test_a_padded_implementation_of_the_formula_gives_the_same(backend: str, lengths: list[int], **facts: Any) -> None:
    """Catches: a map in the SiLU or divided by N, another order of channels or sign of i - j, a wrong time."""
    inputs = make_inputs(lengths, **facts)
    case = inputs.case
    q, k, v = (padded.pad(part, case.offsets, MAX_LEN, junk=3.0) for part in case.parts)
    # rows of times that follow one another, as the padded form knows them
    differences = fuxi_padded.time_differences(padded.extended(case.times, next_in_row(case), case.offsets, MAX_LEN))
    maps = [] if case.position is None else [fuxi_padded.position_map(case.position)]
    if case.time is not None:
        maps.append(case.time[padded.bucketed(differences)])
    if inputs.decay is not None:
        maps.append(fuxi_padded.decayed(differences, *inputs.decay))
    wanted = padded.unpad(fuxi_padded.attention(q, k, v, maps), case.offsets)
    got = inputs.attend(backend, next_times=next_in_row(case))
    assert_same(inputs.results(got), inputs.results(wanted), 1e-10)


def next_in_row(case: Case) -> Tensor:
    """The time of the next event, and of the target behind the last one."""
    following = case.next_times.clone()
    following[:-1] = case.times[1:]
    last = case.offsets[1:][case.offsets.diff() > 0] - 1
    following[last] = case.next_times[last]
    return following


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("time", TIMES)
def test_a_later_token_changes_no_earlier_output(backend: str, time: str) -> None:
    """Catches: a mask on the wrong side of one channel, or a neighbour row read through padding."""
    inputs = make_inputs([5, 9, 6], time=time)
    before = inputs.attend(backend).detach()
    with torch.no_grad():
        inputs.case.fused[8] += 100.0  # the fourth token of the second row
    inputs.case.times[8] += 10**7
    inputs.case.next_times[8] += 10**7
    same = (before == inputs.attend(backend).detach()).flatten(1).all(1)
    assert same.tolist() == [True] * 8 + [False] * 6 + [True] * 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_that_overflows_leaves_the_others_finite(backend: str) -> None:
    """Catches: padding read from another row (0 * inf is NaN), which would blame innocent users."""
    inputs = make_inputs([3, 5, 2])
    with torch.no_grad():
        inputs.case.fused[3:8] = torch.inf
    y, dfused, *_ = inputs.results(inputs.attend(backend))
    rows = torch.tensor([True] * 3 + [False] * 5 + [True] * 2)
    assert torch.isfinite(y[rows]).all() and torch.isfinite(dfused[rows]).all()
    assert not torch.isfinite(y[~rows]).all()


@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_inputs_stay_near_double_ones(backend: str, time: str) -> None:
    """Catches: scores, maps or gradients of the tables added up in bf16; autocast that rounds them on its own."""
    inputs = make_inputs([30, 17, 0, 64], dims=(16, 16), time=time)
    half = inputs.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        y = half.attend(backend)
    assert y.dtype == torch.bfloat16
    assert_same(half.results(y), inputs.results(inputs.attend("reference")), 2e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_leaves_single_precision_as_it_is(backend: str) -> None:
    """Catches: maps rounded to bf16 although everything that was given is single precision."""
    single = make_inputs([12, 30]).to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = single.attend(backend)
    assert torch.equal(y, single.attend(backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "decay", [(0.5, 0.25, 0.9), (-2.0, 3.0, 0.999), (1.0, 1e-3, 1e-6), (1.0, 9.0, 1 - 1e-7)], ids=str
)
def test_a_decay_and_its_gradients_are_finite_for_any_difference(
    decay: tuple[float, float, float], dtype: torch.dtype
) -> None:
    """Catches: 0 ** beta, whose gradient is 0 * log 0; a power that overflows and then meets a 0."""
    seconds = torch.tensor([0, 1, -1, 2, 86_400, 10**9, -(2**45), 2**62])
    leaf = torch.tensor(decay, dtype=dtype, requires_grad=True)
    values = time_decay(seconds, leaf)
    (gradient,) = torch.autograd.grad(values.sum(), leaf)
    assert torch.isfinite(values).all() and torch.isfinite(gradient).all()
    alpha, beta, gamma = decay
    values = values.detach()
    assert float(values[0]) == pytest.approx(alpha)
    assert values[1].item() == values[2].item() == pytest.approx(alpha * gamma, rel=1e-5)
    assert float(values[3]) == pytest.approx(alpha * gamma ** (2**beta), rel=1e-3)


def test_a_decays_gradients_are_those_of_its_formula() -> None:
    """Catches: a derivative cut off with the power at T = 0, or a factor lost in the logarithms."""
    seconds = torch.tensor([0, 1, 7, 3600, 10**6])
    leaf = torch.tensor([0.5, 0.3, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda decay: time_decay(seconds, decay), leaf)


def test_a_row_longer_than_the_model_is_an_error() -> None:
    """Catches: a position table read past its end, or another divisor than the model's."""
    inputs = make_inputs([3, 12, 5], time="none", position=False)
    with pytest.raises(ValueError, match="row 1, .*, has 12 tokens, more than max_len 11: cut its history"):
        inputs.attend("tiles", max_len=11)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_len": 90}, r"position_table has shape \[80\], max_len 90 wants \[90\]"),
        ({"times": None}, "a map over times needs times and next_times"),
        ({"next_times": None}, "a map over times needs times and next_times"),
        ({"time_decay": torch.ones(3)}, "two forms of one map: give one of them"),
        ({"time_table": None, "time_decay": torch.ones(2)}, r"time_decay has shape \[2\], wanted \[3\]"),
        ({"time_table": None, "time_decay": torch.ones(3), "times": None}, "needs times and next_times"),
        ({"time_table": torch.ones(2, 3)}, r"time_table has shape \[2, 3\], wanted \[buckets \+ 1\]"),
        ({"next_times": torch.zeros(3)}, r"next_times is float32 \[3\], wanted int64 \[3\]"),
        ({"bucket_width": -1.0}, "bucket_width -1.0 must be above 0"),
    ],
    ids=str,
)
def test_arguments_that_do_not_fit_are_named(changed: dict[str, Any], said: str) -> None:
    """Catches: one of two time maps that is silently left out, times that a kernel reads beyond their end."""
    with pytest.raises(ValueError, match=said):
        make_inputs([3]).attend("tiles", **changed)


def test_shapes_that_do_not_fit_are_named() -> None:
    """Catches: offsets of another batch, which would leave tokens without an output."""
    q, v = torch.zeros(5, 2, 4), torch.zeros(5, 1, 4)
    for values in (v, torch.zeros(5, 2)):
        with pytest.raises(ValueError, match=r"must be \[T, H, d\] of the same T and H"):
            fuxi_attention(q, q, values, torch.tensor([0, 5]), max_len=8)
    with pytest.raises(ValueError, match="offsets go from 0 to 4: 5 tokens want 0 to 5"):
        fuxi_attention(q, q, q, torch.tensor([0, 4]), max_len=8)


def test_memory_between_forward_and_backward_is_not_quadratic() -> None:
    """Catches: scores or maps of every tile that are kept for the backward."""
    inputs = make_inputs([70, 70], heads=3)
    kept: list[int] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        inputs.attend("tiles")
    assert max(kept) < 70 * 70
