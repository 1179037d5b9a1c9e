"""Encoders: against a padded second implementation, and what every encoder must keep."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import padded
from tests.support.close import assert_close
from tests.support.jagged_cases import noise_of
from tests.support.small_model import random_input, random_sequences, small_model
from turbogr.config import HstuConfig, ModelConfig, SasrecConfig
from turbogr.errors import ConfigError
from turbogr.models import ENCODERS, Sequences, build_encoder
from turbogr.ops.hstu_attention.reference import Mask

LENGTHS = [5, 1, 12, 7]
MAX_LEN = 15
NAMES = sorted(ENCODERS)


def spread(encoder: nn.Module) -> nn.Module:
    """In float64, with parameters large enough that every part of a block shows in the output."""
    generator = torch.Generator().manual_seed(3)
    encoder = encoder.double()
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator).double()
    return encoder


def oracle(config: ModelConfig, encoder: nn.Module, x: Tensor, sequences: Sequences) -> Tensor:
    state = dict(encoder.named_parameters())
    offsets = sequences.offsets
    rows = padded.pad(x, offsets, MAX_LEN)
    if config.name == "sasrec":
        out = padded.sasrec_encoder({name: value.detach() for name, value in state.items()}, rows, config.heads)
    else:
        ext = padded.extended(sequences.times, sequences.next_times, offsets, MAX_LEN)
        out = padded.hstu_encoder(state, rows, ext, config.heads)
    return padded.unpad(out, offsets)


@pytest.mark.parametrize(
    "config",
    [
        small_model("hstu"),
        small_model("hstu", heads=1, blocks=3),
        small_model("hstu", hstu=HstuConfig(time_bias=False)),
        small_model("hstu", hstu=HstuConfig(position_bias=False)),
        small_model("sasrec"),
        small_model("sasrec", heads=1, sasrec=SasrecConfig(ffn_dim=20)),
    ],
    ids=str,
)
def test_a_padded_implementation_of_the_formula_gives_the_same(config: ModelConfig) -> None:
    """Catches: u, v, q, k in another order, a residual or a norm in another place, a forgotten scale of the input."""
    encoder, sequences = spread(build_encoder(config, 0)), random_sequences(LENGTHS)
    x = random_input(sum(LENGTHS)).double()
    assert_close(encoder(x, sequences), oracle(config, encoder, x, sequences), 1e-10)


def test_hstu_gradients_are_those_of_the_padded_implementation() -> None:
    """Catches: a parameter that the operators' own backward forgets."""
    config = small_model("hstu")
    encoder, sequences = spread(build_encoder(config, 0)), random_sequences(LENGTHS)
    x = random_input(sum(LENGTHS)).double().requires_grad_()
    weights = torch.randn(sum(LENGTHS), 8, generator=torch.Generator().manual_seed(5)).double()
    leaves = [x, *encoder.parameters()]
    got = torch.autograd.grad((encoder(x, sequences) * weights).sum(), leaves)
    wanted = torch.autograd.grad((oracle(config, encoder, x, sequences) * weights).sum(), leaves)
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 1e-9)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        # positions + blocks * (W + W_o + bias + position bias + time bias)
        (small_model("hstu"), 15 * 8 + 2 * (8 * 32 + 64 + 8 + 15 + 129)),
        (small_model("hstu", hstu=HstuConfig(time_bias=False, position_bias=False)), 15 * 8 + 2 * (8 * 32 + 64 + 8)),
        # positions + blocks * (q, k, v, out with biases + two layers of the feed-forward part with biases)
        (small_model("sasrec"), 15 * 8 + 2 * (4 * 72 + 2 * 72)),
        (small_model("sasrec", sasrec=SasrecConfig(ffn_dim=20)), 15 * 8 + 2 * (4 * 72 + 8 * 20 + 20 + 20 * 8 + 8)),
    ],
    ids=str,
)
def test_an_encoder_has_the_parameters_of_its_formula(config: ModelConfig, count: int) -> None:
    """Catches: an affine norm, a bias that the formula does not have, a table shared between blocks."""
    assert sum(parameter.numel() for parameter in build_encoder(config, 0).parameters()) == count


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_alone_gives_the_parameters(name: str) -> None:
    """Catches: initial values from a global generator, or two tensors that share their draws."""
    torch.manual_seed(1)
    one = build_encoder(small_model(name), 5).state_dict()
    torch.manual_seed(2)
    same, other = build_encoder(small_model(name), 5).state_dict(), build_encoder(small_model(name), 6).state_dict()
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert not any(torch.equal(one[key], other[key]) for key in one if one[key].any())
    drawn = [value.flatten()[:8] / value.flatten()[0] for value in one.values() if value.any()]
    assert all(not torch.allclose(a, b) for i, a in enumerate(drawn) for b in drawn[:i])


def test_hstu_starts_as_the_public_recipe_does() -> None:
    """Catches: another initial distribution, which the published results depend on."""
    encoder = build_encoder(ModelConfig(name="hstu", dim=256, blocks=1, heads=1, max_history=1024), 0)
    state = encoder.state_dict()
    for name, std in (("input.table", (2 / (1035 + 256)) ** 0.5), ("blocks.0.uvqk", 0.02)):
        assert float(state[name].std()) == pytest.approx(std, rel=0.02)
    for name in ("blocks.0.position_bias", "blocks.0.time_bias"):
        assert float(state[name].std()) == pytest.approx(0.02, rel=0.2)
    edge = (6 / 512) ** 0.5
    assert 0.99 * edge < float(state["blocks.0.out_weight"].abs().max()) <= edge
    assert float(state["blocks.0.out_bias"].abs().max()) <= 256**-0.5


def test_sasrec_starts_as_the_public_recipe_does() -> None:
    """Catches: positions that are not truncated, or another scale of the attention's weights."""
    state = build_encoder(ModelConfig(name="sasrec", dim=64, blocks=1, heads=1, max_history=1024), 0).state_dict()
    assert 1.9 / 8 < float(state["input.table"].abs().max()) <= 2 / 8 * (1 + 1e-6)
    assert float(state["blocks.0.qkv_weight"].std()) == pytest.approx((2 / (4 * 64)) ** 0.5, rel=0.05)
    assert not state["blocks.0.qkv_bias"].any() and not state["blocks.0.out_bias"].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_later_token_changes_no_earlier_output_and_no_other_row(name: str) -> None:
    """Catches: a model that sees the future, which makes every metric too good."""
    encoder, sequences = spread(build_encoder(small_model(name), 0)), random_sequences(LENGTHS)
    x = random_input(sum(LENGTHS)).double()
    before = encoder(x, sequences)
    changed = x.clone()
    changed[10] += 1.0  # the fifth token of the third row
    times, next_times = sequences.times.clone(), sequences.next_times.clone()
    times[10], next_times[10] = times[10] + 10**6, next_times[10] + 10**6
    after = encoder(changed, replace(sequences, times=times, next_times=next_times))
    same = (before == after).all(1).tolist()
    assert same == [True] * 10 + [False] * 8 + [True] * 7


def masked(mask: Mask) -> Sequences:
    return replace(random_sequences(LENGTHS), mask=mask)


TARGETS = torch.tensor([1, 0, 4, 2])


@pytest.mark.parametrize(
    "mask",
    [Mask(TARGETS), Mask(num_context=1), Mask(window=3), Mask(TARGETS, 1, 3), Mask(TARGETS, 1, 3, True)],
    ids=lambda mask: f"{mask.num_targets is not None} {mask.num_context} {mask.window} {mask.context_sees_history}",
)
def test_an_encoder_with_context_targets_and_window_is_the_reference(
    mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a mask that some layer, backend or gradient of an assembled encoder does not hear of."""
    encoder, sequences = spread(build_encoder(small_model("hstu"), 0)), masked(mask)
    x = random_input(sum(LENGTHS)).double().requires_grad_()
    weights = torch.randn(sum(LENGTHS), 8, generator=torch.Generator().manual_seed(5)).double()

    def run(encoder: nn.Module, x: Tensor) -> list[Tensor]:
        out = encoder(x, sequences)
        loss = (out * weights.to(out.dtype)).sum()
        return [out.detach(), *torch.autograd.grad(loss, [x, *encoder.parameters()])]

    with monkeypatch.context() as forced:
        forced.setenv("TURBOGR_BACKEND", "reference")
        wanted = run(encoder, x)
    got = run(encoder.float(), x.detach().float().requires_grad_())
    for one, other in zip(got, wanted, strict=True):
        assert_close(one, other, 1e-5)
    assert not torch.allclose(wanted[0], encoder.double()(x, random_sequences(LENGTHS)).detach())


@pytest.mark.parametrize("context_sees_history", [False, True])
def test_two_layers_leak_the_future_only_where_context_sees_the_history(context_sees_history: bool) -> None:
    """Catches: a context token that carries a later event to an earlier one from the second layer on."""
    assert small_model("hstu").blocks == 2
    encoder = spread(build_encoder(small_model("hstu"), 0))
    sequences = masked(Mask(torch.tensor([0, 0, 2, 0]), 1, None, context_sees_history))
    x = random_input(sum(LENGTHS)).double()
    changed = x.clone()
    changed[12] += 1.0  # the seventh token of the third row, whose tokens are 6 .. 17: context, history, two targets
    same = (encoder(x, sequences) == encoder(changed, sequences)).all(1).tolist()
    assert all(same[:6]) and not any(same[12:18]) and all(same[18:])
    assert all(same[6:12]) is not context_sees_history


def test_sasrec_refuses_a_mask_that_it_does_not_have() -> None:
    """Catches: targets that see each other and the answers behind them, because nobody read the mask."""
    encoder, x = build_encoder(small_model("sasrec"), 0), random_input(sum(LENGTHS))
    for mask in (Mask(TARGETS), Mask(num_context=1), Mask(window=3)):
        with pytest.raises(ConfigError, match="model 'sasrec' is causal only, without targets, context or window"):
            encoder(x, masked(mask))


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_encoded_alike_alone_and_among_others(name: str) -> None:
    """Catches: an output, dropout included, that depends on who else is in the batch."""
    encoder = build_encoder(small_model(name), 0).double()
    offsets = torch.tensor([0, 5, 6, 18, 25])
    together = random_sequences(LENGTHS, noise=noise_of(offsets))
    x = random_input(25).double()
    alone = Sequences(
        torch.tensor([0, 12]),
        *(part[6:18] for part in (together.positions, together.times, together.next_times)),
        noise_of(torch.tensor([0, 12]), numbers=torch.tensor([2])),
    )
    assert_close(encoder(x[6:18], alone), encoder(x, together)[6:18], 1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_acts_in_training_and_differs_between_steps(name: str) -> None:
    """Catches: a model trained without dropout, or with one mask for all steps."""
    encoder, offsets = build_encoder(small_model(name), 0), torch.tensor([0, 9])
    x = random_input(9)
    noises = (None, noise_of(offsets, step=0), noise_of(offsets, step=1))
    outs = [encoder(x, random_sequences([9], noise=noise)) for noise in noises]
    assert not torch.allclose(outs[0], outs[1]) and not torch.allclose(outs[1], outs[2])


@pytest.mark.parametrize("name", NAMES)
def test_bf16_autocast_stays_near_single_precision(name: str) -> None:
    """Catches: an operator that autocast breaks, or one that computes in bf16 what needs more."""
    encoder, sequences = build_encoder(small_model(name, dim=32), 0), random_sequences(LENGTHS)
    x = random_input(sum(LENGTHS), 32).requires_grad_()

    def run(enabled: bool) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = encoder(x, sequences)
        return [out.float(), *torch.autograd.grad(out.float().square().sum(), [x, *encoder.parameters()])]

    single, half = run(False), run(True)
    assert_close(half[0], single[0], 1e-2)
    assert_close(half[1], single[1], 2e-2)
    assert not torch.equal(half[0], single[0])
    assert all(one.dtype == torch.float32 for one in half[1:])


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    """Catches: a parameter that is made and never used."""
    encoder, sequences = spread(build_encoder(small_model(name), 0)), random_sequences(LENGTHS)
    encoder(random_input(sum(LENGTHS)).double(), sequences).square().sum().backward()
    for key, parameter in encoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), key


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no model is named 'hsru' \(did you mean 'hstu'\?\); known: hstu, sasrec"):
        build_encoder(ModelConfig(name="hsru"), 0)


def test_a_package_can_bring_an_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an entry point that is looked up and not called."""

    class Point:
        name = "theirs"

        @staticmethod
        def load() -> Any:
            return lambda config, seed: nn.Linear(config.dim, seed)

    monkeypatch.setattr("turbogr.models.entry_points", lambda group: [Point] if group == "turbogr.encoders" else [])
    encoder = build_encoder(small_model("theirs"), 3)
    assert isinstance(encoder, nn.Linear) and (encoder.in_features, encoder.out_features) == (8, 3)
