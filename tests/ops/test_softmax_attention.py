"""Softmax attention: both backends, torch's own attention row by row, and masks that do not depend on the batch."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from tests.support.close import assert_close
from tests.support.jagged_cases import Case, make_case, noise_of, row_lengths, values_and_gradients
from turbogr.ops.dropout import Noise
from turbogr.ops.softmax_attention import softmax_attention

BACKENDS = ("tiles", "reference")


def attend(case: Case, backend: str, rate: float, **noise: Any) -> Tensor:
    drawn = noise_of(case.offsets, **noise) if rate else None
    return softmax_attention(*case.parts, case.offsets, dropout_rate=rate, noise=drawn, layer=3, backend=backend)


def case_of(lengths: list[int], heads: int = 2, seed: int = 0) -> Case:
    return make_case(lengths, heads=heads, seed=seed, biases=(False, False))


@given(lengths=row_lengths(), heads=st.integers(1, 3), rate=st.sampled_from((0.0, 0.3)), seed=st.integers(0, 99))
def test_tiles_agree_with_the_reference_in_values_and_gradients(
    lengths: list[int], heads: int, rate: float, seed: int
) -> None:
    """Catches: rows put back in the wrong order, padding inside the softmax, a mask of another head."""
    case = case_of(lengths, heads, seed)
    wanted = values_and_gradients(lambda c: attend(c, "reference", rate), case)
    got = values_and_gradients(lambda c: attend(c, "tiles", rate), case)
    single = values_and_gradients(lambda c: attend(c, "tiles", rate), case.to(torch.float32))
    for one, half, other in zip(got, single, wanted, strict=True):
        assert_close(one, other, 1e-10)
        assert_close(half, other, 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_torchs_own_attention_gives_the_same_row_by_row(backend: str) -> None:
    """Catches: another scale than 1 / sqrt(d), a mask off by one."""
    case = case_of([5, 0, 1, 30])

    def torchs(c: Case) -> Tensor:
        bounds = c.offsets.tolist()
        rows = [
            F.scaled_dot_product_attention(*(part[a:b].transpose(0, 1) for part in c.parts), is_causal=True)
            for a, b in zip(bounds, bounds[1:], strict=False)
            if b > a
        ]
        return torch.cat([row.transpose(0, 1) for row in rows])

    got, wanted = values_and_gradients(lambda c: attend(c, backend, 0.0), case), values_and_gradients(torchs, case)
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_users_mask_does_not_depend_on_who_else_is_in_the_batch(backend: str) -> None:
    """Catches: masks drawn by place in the batch or by padded length: any balance would change the training."""
    together = case_of([4, 40, 9])
    y = attend(together, backend, 0.5)
    alone = case_of([9])
    alone.fused.data.copy_(together.fused[44:])
    got = attend(alone, backend, 0.5, numbers=torch.tensor([2]))
    assert_close(got, y[44:], 1e-12)


def test_each_head_layer_and_step_has_a_mask_of_its_own_with_the_right_rate() -> None:
    """Catches: heads that share a mask, a keep rate in place of the drop rate, a forgotten 1 / (1 - rate)."""
    length, rate = 60, 0.3
    q = torch.zeros(length, 2, length)
    v = torch.eye(length).unsqueeze(1).expand(length, 2, length)  # the output is the weights
    offsets = torch.tensor([0, length])

    def weights(layer: int, step: int) -> Tensor:
        return softmax_attention(q, q, v, offsets, dropout_rate=rate, noise=noise_of(offsets, step=step), layer=layer)

    one = weights(1, 0)
    assert not torch.equal(one[:, 0], one[:, 1])
    assert not torch.equal(one, weights(2, 0)) and not torch.equal(one, weights(1, 1))
    assert torch.equal(one, weights(1, 0))
    seen = torch.ones(length, length).tril().bool().unsqueeze(1).expand(length, 2, length)
    share = 1 / torch.arange(1, length + 1)[:, None, None].expand_as(one)[seen]
    kept = one[seen] > 0
    assert abs(float(kept.double().mean()) - 0.7) < 4 * (0.21 / kept.numel()) ** 0.5
    assert_close(one[seen][kept], share[kept] / 0.7, 1e-6)
    assert not one[~seen].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_later_token_changes_no_earlier_output(backend: str) -> None:
    """Catches: a mask on the wrong side."""
    case = case_of([5, 9])
    before = attend(case, backend, 0.0).detach()
    with torch.no_grad():
        case.fused[8] += 10.0
    same = (before == attend(case, backend, 0.0)).flatten(1).all(1)
    assert same.tolist() == [True] * 8 + [False] * 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_row_that_overflows_leaves_the_others_finite(backend: str) -> None:
    """Catches: padding read from another row (0 * inf is NaN), which would blame innocent users."""
    case = case_of([3, 5, 2])
    with torch.no_grad():
        case.fused[3:8] = torch.inf
    y, dfused = values_and_gradients(lambda c: attend(c, backend, 0.2), case)
    rows = torch.tensor([True] * 3 + [False] * 5 + [True] * 2)
    assert torch.isfinite(y[rows]).all() and torch.isfinite(dfused[rows]).all()


def test_shapes_that_do_not_fit_are_named() -> None:
    q = torch.zeros(5, 2, 4)
    with pytest.raises(ValueError, match=r"must all be the same \[T, H, d\]"):
        softmax_attention(q, q, q[:, :, :3], torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="offsets go from 0 to 4: 5 tokens want 0 to 5"):
        softmax_attention(q, q, q, torch.tensor([0, 4]))


@pytest.mark.parametrize(
    ("rate", "users", "message"),
    [
        (1.0, torch.arange(5), "dropout rate is 1.0, wanted at least 0 and less than 1"),
        (0.5, torch.arange(9), r"noise.users is int64 \[9\], wanted int64 \[5\]"),
        (0.5, torch.arange(5).int(), r"noise.users is int32 \[5\], wanted int64 \[5\]"),
    ],
)
def test_noise_of_other_tokens_and_rates_that_keep_nothing_are_refused(
    rate: float, users: Tensor, message: str
) -> None:
    """Catches: a division by 0, and masks of other users than the tokens'."""
    q = torch.zeros(5, 2, 4)
    with pytest.raises(ValueError, match=message):
        softmax_attention(q, q, q, torch.tensor([0, 5]), dropout_rate=rate, noise=Noise(1, 2, users, torch.arange(5)))
