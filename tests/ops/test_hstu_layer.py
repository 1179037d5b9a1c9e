"""The HSTU layer: every backend against the reference in float64, forward and every gradient."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.close import assert_close
from tests.support.jagged_cases import noise_of, row_lengths
from turbogr.jagged import offsets_of
from turbogr.ops import hstu_attention
from turbogr.ops.hstu_layer import OPERATOR, hstu_layer

CPU = torch.device("cpu")
BACKENDS = [one.name for one in OPERATOR.backends if one.name != "reference" and one.rejects(CPU) is None]
NAMES = ("out", "x", "uvqk", "out weight", "out bias", "position", "time")


@dataclass(frozen=True)
class Case:
    leaves: tuple[Tensor, ...]  # x, uvqk, out weight, out bias, position, time
    weights: Tensor  # [T, D]: the loss is sum(weights * out)
    given: dict[str, Any]

    def to(self, dtype: torch.dtype) -> "Case":
        leaves = tuple(leaf.detach().to(dtype).requires_grad_() for leaf in self.leaves)
        return replace(self, leaves=leaves, weights=self.weights.to(dtype))


def make(lengths: list[int], dim: int = 24, heads: int = 2, dropout: float = 0.3, max_len: int = 80) -> Case:
    """Values that fp32 holds exactly, so that every type sees the same."""
    generator = torch.Generator().manual_seed(dim)
    tokens, offsets = sum(lengths), offsets_of(torch.tensor(lengths, dtype=torch.int64))

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    shapes: list[tuple[tuple[int, ...], float]] = [((dim, 4 * dim), dim**-0.5), ((dim, dim), dim**-0.5), ((dim,), 1)]
    leaves = (
        normal(tokens, dim) + 1,
        *(normal(*shape, std=std) for shape, std in shapes),
        normal(max_len),
        normal(129),
    )
    times = torch.randint(0, 10**8, (tokens,), generator=generator).sort().values
    given = {
        "offsets": offsets,
        "heads": heads,
        "max_len": max_len,
        "times": times,
        "next_times": times + 1000,
        "dropout": dropout,
        "noise": noise_of(offsets),
        "layer": 3,
    }
    return Case(tuple(leaf.requires_grad_() for leaf in leaves), normal(tokens, dim), given)


def run(case: Case, backend: str | None, bf16: bool = False, **changed: Any) -> list[Tensor]:
    """The output and the gradient of every leaf."""
    x, *weights, position, time = case.leaves
    given = {**case.given, "position_bias": position, "time_bias": time, "backend": backend, **changed}
    offsets = given.pop("offsets")
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        out = hstu_layer(x, offsets, *weights, **given)
    found = torch.autograd.grad((out * case.weights).sum(), case.leaves, materialize_grads=True)
    return [out.detach(), *found]


def agree(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for name, one, other in zip(NAMES, got, wanted, strict=True):
        if name in ("position", "time"):
            # the norm behind the attention takes a row's scale away: of one token alone they are next to nothing
            one, other = (torch.cat((x, x.new_ones(1))) for x in (one, other))
        assert_close(one, other, tolerance, name)


@pytest.mark.parametrize("backend", BACKENDS)
@given(lengths=row_lengths(), dim=st.sampled_from((6, 16, 24, 50, 66)), dropout=st.sampled_from((0.0, 0.3)))
@example([], 16, 0.3)
@example([0, 0], 16, 0.3)
@example([1], 50, 0.0)
def test_single_precision_agrees_with_the_reference(backend: str, lengths: list[int], dim: int, dropout: float) -> None:
    """Catches: a lane beyond the row's end, a mask of the wrong channel, a part of z that keeps its old gradient."""
    case = make(lengths, dim, dropout=dropout)
    agree(run(case, backend), run(case.to(torch.float64), "reference"), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [24, 50])
def test_bf16_autocast_agrees_with_the_reference(backend: str, dim: int) -> None:
    """Catches: sums in bf16, a residual stream that loses its fp32."""
    case = make([17, 0, 1, 64, 33], dim)
    got = run(case, backend, bf16=True)
    agree(got, run(case.to(torch.float64), "reference"), 2e-2)
    assert all(one.dtype == torch.float32 for one in got)


def test_double_precision_stays_double() -> None:
    """Catches: a compiled pass that takes float64 for something else."""
    case = make([5, 9]).to(torch.float64)
    agree(run(case, None), run(case, "reference"), 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_recomputation_changes_no_bit_and_keeps_x_alone(backend: str) -> None:
    """Catches: a recomputed forward with another mask, and one that keeps what it would recompute."""
    case, kept = make([30, 41]), {}
    for recompute in (False, True):
        sizes: list[int] = []

        def note(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            kept[recompute] = run(case, backend, recompute=recompute), sizes
    assert all(map(torch.equal, kept[False][0], kept[True][0]))
    assert sum(kept[False][1]) - sum(kept[True][1]) == 71 * 24 * 5


MASKS = {
    "targets": {"num_targets": torch.tensor([3, 0, 1, 0, 20])},
    "context": {"num_context": 1},
    "context that sees the history": {"num_context": 1, "context_sees_history": True},
    "window": {"window": 5},
    "all": {"num_targets": torch.tensor([3, 0, 0, 0, 20]), "num_context": 1, "window": 7, "context_sees_history": True},
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_with_a_mask_agrees_with_the_reference(backend: str, mask: str, recompute: bool) -> None:
    """Catches: an option that stops short of the attention's forward, its backward, or the forward that runs again."""
    case = make([12, 0, 2, 1, 40])
    wanted = run(case.to(torch.float64), "reference", **MASKS[mask])
    agree(run(case, backend, recompute=recompute, **MASKS[mask]), wanted, 1e-5)
    assert not torch.allclose(wanted[0], run(case.to(torch.float64), "reference")[0])


@pytest.mark.parametrize(("backend", "attention"), [("cpu", "cpu"), ("fused", "tiles"), (None, None)])
def test_the_backend_that_is_asked_for_is_the_attentions_too(
    backend: str | None, attention: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a backend that is forced upon the layer, while its attention still takes the fastest."""
    if backend not in (None, *BACKENDS):
        pytest.skip("the CPU operators are not compiled here")
    pick, taken = hstu_attention.kernels, []

    def note(*asked: Any) -> Any:
        taken.append(pick(*asked))
        return taken[-1]

    monkeypatch.setattr(hstu_attention, "kernels", note)
    run(make([5, 9]), backend)
    name = attention or hstu_attention.OPERATOR.pick(CPU)[0].name
    assert taken and all(one is hstu_attention.KERNELS[name] for one in taken)


@pytest.mark.parametrize("bf16", [False, True])
def test_threads_change_no_bit(bf16: bool) -> None:
    """Catches: sums whose order depends on how the rows were shared."""
    case = make([700, 3, 250], 50, heads=1, max_len=700)
    once = run(case, None, bf16)
    torch.set_num_threads(2)
    assert all(map(torch.equal, once, run(case, None, bf16)))


def test_a_second_backward_gives_the_same_gradients() -> None:
    """Catches: a backward that works in the memory it was given to keep."""
    case = make([9, 14])
    x, *weights, position, time = case.leaves
    given = {**case.given}
    out = hstu_layer(x, given.pop("offsets"), *weights, position_bias=position, time_bias=time, **given)
    loss = (out * case.weights).sum()
    first = torch.autograd.grad(loss, case.leaves, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, case.leaves)))


def test_a_layer_without_biases_and_without_noise_runs() -> None:
    case = make([6, 2])
    x, uvqk, out_weight, out_bias, *_ = case.leaves
    given = {"heads": 2, "max_len": 80}
    offsets = case.given["offsets"]
    got = hstu_layer(x, offsets, uvqk, out_weight, out_bias, **given)
    assert_close(got, hstu_layer(x, offsets, uvqk, out_weight, out_bias, **given, backend="reference"), 1e-5)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"heads": 5}, "width 24 is not a multiple of heads 5"),
        ({"heads": 0}, "width 24 is not a multiple of heads 0"),
        ({"heads": -2}, "width 24 is not a multiple of heads -2"),
        ({"max_len": 8, "position_bias": None}, "row 1, .*, has 9 tokens, more than max_len 8"),
        ({"times": None}, "time_bias needs times and next_times"),
        ({"times": torch.zeros(14)}, r"times is float32 \[14\], wanted int64 \[14\]"),
        ({"next_times": torch.zeros(5, dtype=torch.int64)}, r"next_times is int64 \[5\], wanted int64 \[14\]"),
        ({"bucket_width": 0.0}, "bucket_width 0.0 must be above 0"),
        ({"max_len": 81}, r"position_bias has shape \[80\], max_len 81 wants \[81\]"),
        ({"num_targets": torch.tensor([1])}, r"num_targets is int64 \[1\], wanted int64 \[2\]"),
        ({"num_targets": torch.tensor([4, 0]), "num_context": 2}, "row 0 has 5 tokens for 2 of context and 4 targets"),
        ({"window": 0}, "window 0 at least 1"),
        ({"dropout": 1.0}, "rate is 1.0"),
        ({"noise": noise_of(torch.tensor([0, 5]))}, r"noise.users is int64 \[5\], wanted int64 \[14\]"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], sentence: str) -> None:
    """Catches: heads that no reshape takes, a table or a mask of another batch that a kernel reads beyond its end."""
    with pytest.raises(ValueError, match=sentence):
        run(make([5, 9]), None, **changed)


def test_weights_of_another_width_are_refused() -> None:
    case = make([5])
    x, uvqk, out_weight, out_bias, *_ = case.leaves
    with pytest.raises(ValueError, match=r"weights .* do not fit x \[T, 24\]"):
        hstu_layer(x, case.given["offsets"], uvqk.T, out_weight, out_bias, heads=2, max_len=80)
