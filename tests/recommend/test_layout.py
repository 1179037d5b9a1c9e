"""The plain layout: one matrix per projection, and back without loss."""

import pytest
import torch

from turbogr.config import ModelConfig
from turbogr.models import build_encoder
from turbogr.recommend.layout import from_plain, to_plain


@pytest.mark.parametrize("name", ["hstu", "sasrec"])
def test_plain_and_back_is_the_same(name: str) -> None:
    state = build_encoder(ModelConfig(name=name, dim=12, heads=3), seed=1).state_dict()
    plain = to_plain(name, state)
    assert not any("qkv" in key or "uvqk" in key for key in plain)
    assert all(tensor.is_contiguous() for tensor in plain.values())
    back = from_plain(name, plain)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], state[key]) for key in state)


def test_hstu_projections_stand_as_linear_holds_them() -> None:
    state = build_encoder(ModelConfig(dim=8, heads=2), seed=1).state_dict()
    plain = to_plain("hstu", state)
    x = torch.randn(5, 8)
    fused = x @ state["blocks.1.uvqk"]
    for place, part in enumerate("uvqk"):
        apart = torch.nn.functional.linear(x, plain[f"blocks.1.{part}.weight"])
        torch.testing.assert_close(apart, fused[:, 8 * place : 8 * place + 8])


def test_sasrec_projections_stand_as_linear_holds_them() -> None:
    state = build_encoder(ModelConfig(name="sasrec", dim=8, heads=2), seed=1).state_dict()
    state["blocks.0.qkv_bias"] = torch.randn(24)
    plain = to_plain("sasrec", state)
    x = torch.randn(5, 8)
    fused = torch.nn.functional.linear(x, state["blocks.0.qkv_weight"], state["blocks.0.qkv_bias"])
    for place, part in enumerate("qkv"):
        apart = torch.nn.functional.linear(x, plain[f"blocks.0.{part}.weight"], plain[f"blocks.0.{part}.bias"])
        torch.testing.assert_close(apart, fused[:, 8 * place : 8 * place + 8])


def test_an_encoder_from_elsewhere_keeps_its_names() -> None:
    state = {"uvqk": torch.ones(2, 8), "head.weight": torch.ones(3)}
    assert to_plain("mine", state).keys() == state.keys()
    assert from_plain("mine", state) == state
