"""HSTU attention: both backends against each other, against the padded public formulation, and at the edges."""

import gc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support import padded
from tests.support.close import assert_close
from tests.support.jagged_cases import Case, make_case, row_lengths, values_and_gradients
from turbogr.ops import tiles as grouping
from turbogr.ops.hstu_attention import hstu_attention, kernels, tiles
from turbogr.ops.hstu_attention.reference import Bias, Mask

BACKENDS = ("tiles", "reference")


def attend(case: Case, backend: str, **changed: Any) -> Tensor:
    arguments = {
        "max_len": 80 if case.position is None else len(case.position),
        "position_bias": case.position,
        "time_bias": case.time,
        "times": case.times,
        "next_times": case.next_times,
    }
    return hstu_attention(*case.parts, case.offsets, **(arguments | changed), backend=backend)


def assert_same(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for number, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert_close(one, other, tolerance, "output" if number == 0 else f"gradient {number}")


@given(
    lengths=row_lengths(),
    heads=st.integers(1, 3),
    dims=st.sampled_from(((4, 4), (3, 5), (8, 2))),
    span=st.sampled_from((1, 10**6, 2**45)),
    in_order=st.booleans(),
    biases=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_tiles_agree_with_the_reference_in_values_and_every_gradient(lengths: list[int], **facts: Any) -> None:
    """Catches: padding that leaks into a gradient, a head or a row mixed up, a bias off by one, a missed row."""
    case = make_case(lengths, **facts)
    wanted = values_and_gradients(lambda c: attend(c, "reference"), case)
    assert_same(values_and_gradients(lambda c: attend(c, "tiles"), case), wanted, 1e-10)
    single = case.to(torch.float32)
    assert_same(values_and_gradients(lambda c: attend(c, "tiles"), single), wanted, 1e-5)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [1, 1, 0, 1], [70], [0, 70, 1, 0, 2]])
def test_the_smallest_and_the_most_uneven_batches_agree(lengths: list[int]) -> None:
    """Catches: a batch without tokens, or rows without any, that a backend cannot take."""
    case = make_case(lengths, heads=3, dims=(4, 2))
    wanted = values_and_gradients(lambda c: attend(c, "reference"), case)
    assert wanted[0].shape == (sum(lengths), 3, 2)
    assert_same(values_and_gradients(lambda c: attend(c, "tiles"), case), wanted, 1e-10)


def test_tiles_of_any_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: rows lost or doubled where the cell budget cuts a group."""
    case = make_case([9, 8, 8, 7, 9, 1, 0, 5])
    wanted = values_and_gradients(lambda c: attend(c, "reference"), case)
    for cells in (1, 200, 400):
        monkeypatch.setattr(grouping, "CELLS", cells)
        assert_same(values_and_gradients(lambda c: attend(c, "tiles"), case), wanted, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@given(lengths=row_lengths(), heads=st.integers(1, 2), dims=st.sampled_from(((4, 4), (3, 5))), in_order=st.booleans())
def test_the_padded_public_formulation_gives_the_same(backend: str, lengths: list[int], **facts: Any) -> None:
    """Catches: another divisor, mask, sign of i - j, event whose time counts, or bucket rule than the published one."""
    case = make_case(lengths, **facts)
    if not lengths:
        return

    def public(c: Case) -> Tensor:
        q, k, v = (padded.pad(part, c.offsets, 80, junk=3.0) for part in c.parts)
        ext = padded.extended(c.times, c.next_times, c.offsets, 80)
        return padded.unpad(
            padded.hstu_attention_padded(q, k, v, padded.hstu_scores_bias(c.position, c.time, ext)), c.offsets
        )

    if not facts["in_order"]:  # the public code knows no next time but the next event's
        own = case.next_times.clone()
        own[:-1] = case.times[1:]
        own[case.offsets[1:][case.offsets.diff() > 0] - 1] = case.next_times[
            case.offsets[1:][case.offsets.diff() > 0] - 1
        ]
        case.next_times.copy_(own)
    assert_same(values_and_gradients(lambda c: attend(c, backend), case), values_and_gradients(public, case), 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_token_changes_no_earlier_output(backend: str) -> None:
    """Catches: a mask on the wrong side, or a neighbour row read through padding."""
    case = make_case([5, 9, 6])
    before = attend(case, backend).detach()
    with torch.no_grad():
        case.fused[8] += 100.0  # the fourth token of the second row
    case.times[8] += 10**7
    case.next_times[8] += 10**7
    after = attend(case, backend).detach()
    same = (before == after).flatten(1).all(1)
    assert same.tolist() == [True] * 8 + [False] * 6 + [True] * 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_that_overflows_leaves_the_others_finite(backend: str) -> None:
    """Catches: padding read from another row (0 * inf is NaN), which would blame innocent users."""
    case = make_case([3, 5, 2])
    with torch.no_grad():
        case.fused[3:8] = torch.inf
    y, dfused, *_ = values_and_gradients(lambda c: attend(c, backend), case)
    rows = torch.tensor([True] * 3 + [False] * 5 + [True] * 2)
    assert torch.isfinite(y[rows]).all() and torch.isfinite(dfused[rows]).all()
    assert not torch.isfinite(y[~rows]).all()


def test_half_precision_inputs_stay_near_double_ones() -> None:
    """Catches: scores or bias gradients added up in bf16."""
    case = make_case([30, 17, 0, 64], dims=(16, 16))
    got = values_and_gradients(lambda c: attend(c, "tiles"), case.to(torch.bfloat16))
    assert got[0].dtype == torch.bfloat16
    assert_same(got, values_and_gradients(lambda c: attend(c, "reference"), case), 3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_expanded_or_strided_are_taken(backend: str) -> None:
    """Catches: a backward that assumes a contiguous gradient (a sum's is one number, expanded)."""
    case = make_case([4, 7])
    y = attend(case, backend)
    summed = torch.autograd.grad(y.sum(), case.fused, retain_graph=True)[0]
    ones = torch.autograd.grad(y, case.fused, torch.ones_like(y))[0]
    assert torch.equal(summed, ones)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [{}, {"window": 3}], ids=str)
def test_the_kernels_write_every_cell_of_strided_gradients(backend: str, mask: dict[str, Any]) -> None:
    """Catches: a fused layer's buffer that keeps what was in it, or gets one part's gradient in another's place."""
    case = make_case([4, 0, 7], dims=(3, 5))
    wanted = values_and_gradients(lambda c: attend(c, backend, **mask), case)
    bias = Bias(case.position, case.time, case.times, case.next_times, 0.301)
    given = (*(part.detach() for part in case.parts), case.offsets, 80, bias, Mask(**mask))
    chosen = kernels(torch.device("cpu"), backend)
    y, dfused = chosen.forward(*given), torch.full_like(case.fused, torch.nan).detach()
    tables = chosen.backward(case.weights, *given, *torch.split(dfused, [3, 3, 5], dim=2))
    assert y.is_contiguous() and not y.requires_grad
    assert_same([y, dfused, *(x for x in tables if x is not None)], wanted, 1e-12)


def count_buckets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    true = tiles.time_bucket
    monkeypatch.setattr(tiles, "time_bucket", lambda *args: calls.append(1) or true(*args))
    return calls


def test_buckets_of_a_batch_are_computed_once_for_all_layers_and_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a cache that never hits (buckets cost as much as the scores)."""
    calls = count_buckets(monkeypatch)
    case = make_case([6, 6])
    (attend(case, "tiles") + attend(case, "tiles")).sum().backward()
    assert len(calls) == 1


@pytest.mark.parametrize("changed", ["times", "next_times"])
def test_times_changed_in_place_give_new_buckets(changed: str) -> None:
    """Catches: a cache that knows tensors by identity only."""
    case = make_case([6, 9, 3])
    attend(case, "tiles")
    getattr(case, changed).mul_(3).add_(10**5)
    assert_close(attend(case, "tiles"), attend(case, "reference"), 1e-12)


@pytest.mark.parametrize("fresh", ["times", "next_times"])
def test_new_times_where_old_ones_were_freed_give_new_buckets(fresh: str) -> None:
    """Catches: a cache by id() that outlives its tensor; Python hands the id of a freed object to the next one."""
    case = make_case([6, 9, 3])
    for seed in range(20):
        times = torch.randint(0, 10**8, (18,), generator=torch.Generator().manual_seed(seed))
        got, wanted = (attend(case, backend, **{fresh: times}) for backend in BACKENDS)
        assert_close(got, wanted, 1e-12)
        del times


def test_other_rows_widths_and_bucket_counts_over_the_same_times_give_their_own_buckets() -> None:
    """Catches: a cache key that forgets what else the buckets depend on."""
    case = make_case([9, 9])
    assert case.time is not None
    other = torch.tensor([0, 4, 18])
    for changed in ({}, {"bucket_width": 0.7}, {"time_bias": case.time[:10]}):
        for offsets in (case.offsets, other):
            got, wanted = (
                hstu_attention(
                    *case.parts,
                    offsets,
                    **({"max_len": 80, "time_bias": case.time, "times": case.times} | changed),
                    next_times=case.next_times,
                    backend=backend,
                )
                for backend in BACKENDS
            )
            assert_close(got, wanted, 1e-12)


@pytest.mark.parametrize("same", [True, False])
def test_kept_buckets_go_with_their_batch(same: bool) -> None:
    """Catches: a cache that keeps every batch of a run alive, or one whose tensor serves as both times."""
    tiles._kept_buckets.clear()
    case = make_case([6, 6])
    times = torch.arange(12)
    attend(case, "tiles", times=times, next_times=times if same else times + 1)
    del times
    gc.collect()
    assert len(tiles._kept_buckets) == 0


def test_the_cache_stops_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: buckets of a huge batch that fill the memory which the tiles were made to save."""
    monkeypatch.setattr(tiles, "KEPT_CELLS", 40)
    case = make_case([6, 6])
    attend(case, "tiles")
    assert tiles._kept_buckets[case.next_times] == {}


def test_a_row_longer_than_the_model_is_an_error() -> None:
    """Catches: a position bias read past its end, or another divisor than the model's."""
    case = make_case([3, 12, 5], biases=(False, False))
    with pytest.raises(ValueError, match="row 1, the user .* has 12 tokens, more than max_len 11: cut its history"):
        attend(case, "tiles", max_len=11)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_len": 90}, r"position_bias has shape \[80\], max_len 90 wants \[90\]"),
        ({"times": None}, "time_bias needs times and next_times"),
        ({"next_times": None}, "time_bias needs times and next_times"),
        ({"times": torch.zeros(3, dtype=torch.int32)}, r"times is int32 \[3\], wanted int64 \[3\]"),
        ({"next_times": torch.zeros(3)}, r"next_times is float32 \[3\], wanted int64 \[3\]"),
        ({"times": torch.zeros(2, dtype=torch.int64)}, r"times is int64 \[2\], wanted int64 \[3\]"),
        ({"time_bias": torch.zeros(129, 1)}, r"time_bias has shape \[129, 1\], wanted \[buckets \+ 1\]"),
        ({"time_bias": torch.zeros(0)}, r"time_bias has shape \[0\]"),
        ({"bucket_width": 0.0}, "bucket_width 0.0 must be above 0"),
        ({"bucket_width": -1.0}, "bucket_width -1.0 must be above 0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changed: dict[str, Any], said: str) -> None:
    """Catches: a kernel that reads whole numbers of another size, or past the end of what it was given."""
    with pytest.raises(ValueError, match=said):
        attend(make_case([3]), None, **changed)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        (torch.tensor([0, 5], dtype=torch.int32), r"offsets is int32 \[2\], wanted int64 \[B\+1\]"),
        (torch.tensor([0.0, 5.0]), r"offsets is float32 \[2\]"),
        (torch.tensor([], dtype=torch.int64), r"offsets is int64 \[0\]"),
        (torch.tensor([2, 5]), "offsets go from 2 to 5: 5 tokens want 0 to 5"),
        (torch.tensor([0, 4]), "offsets go from 0 to 4: 5 tokens want 0 to 5"),
        (torch.tensor([0, 4, 2, 5]), "offsets fall from 4 to 2 at row 1"),
        (torch.tensor([0, -3, 5]), "offsets fall from 0 to -3 at row 0"),
    ],
    ids=str,
)
def test_offsets_that_are_none_are_refused(offsets: torch.Tensor, said: str) -> None:
    """Catches: rows of another batch or of another type, which compiled code would read as lengths of gigabytes."""
    q = torch.zeros(5, 2, 4)
    with pytest.raises(ValueError, match=said):
        hstu_attention(q, q, q, offsets, max_len=8)


def test_shapes_that_do_not_fit_are_named() -> None:
    """Catches: heads or tokens of one input that another does not have, and bits read as another type's."""
    q, v = torch.zeros(5, 2, 4), torch.zeros(5, 1, 4)
    for k, values in ((q, v), (q, torch.zeros(5, 2)), (v, q)):
        with pytest.raises(ValueError, match=r"must be \[T, H, d\] of the same T and H"):
            hstu_attention(q, k, values, torch.tensor([0, 5]), max_len=8)
    with pytest.raises(ValueError, match="q, k and v must be of one floating type"):
        hstu_attention(q, q.double(), q, torch.tensor([0, 5]), max_len=8)
