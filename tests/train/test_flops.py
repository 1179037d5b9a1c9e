"""The two FLOP counts, against products counted one by one and against the paper's printed sizes."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.support import padded
from turbogr.config import ModelConfig, SasrecConfig
from turbogr.models import build_encoder
from turbogr.train.flops import causal_pairs, paper_flops, training_flops


def config(name: str = "hstu", **changed: Any) -> ModelConfig:
    return ModelConfig(name=name, **({"dim": 64, "heads": 2, "blocks": 3, "max_history": 100} | changed))


def test_the_causal_count_is_the_design_formula() -> None:
    """Catches: L^2 in place of the causal half, padding counted, a factor of forward or backward missing."""
    lengths, dim = [1, 7, 100], 64
    gemm = sum(2 * n * dim * 4 * dim + 2 * n * dim * dim for n in lengths)
    attention = sum(4 * dim * n * (n + 1) // 2 for n in lengths)
    assert training_flops(config(), sum(lengths), causal_pairs(np.array(lengths))) == 3 * (3 * gemm + 3.5 * attention)


def test_sasrec_counts_its_feed_forward_part() -> None:
    """Catches: the hidden width taken for the model's."""
    dim, hidden, length = 64, 200, 50
    gemm = 2 * length * dim * 4 * dim + 2 * 2 * length * dim * hidden
    attention = 4 * dim * length * (length + 1) // 2
    got = training_flops(config("sasrec", sasrec=SasrecConfig(ffn_dim=hidden)), length, length * (length + 1) / 2)
    assert got == 3 * (3 * gemm + 3.5 * attention)


@pytest.mark.parametrize("name", ["hstu", "sasrec"])
def test_the_forward_products_are_those_that_torch_counts(name: str) -> None:
    """Catches: a product that the formula forgot. Torch counts the full L x L of a padded implementation."""
    model, length = config(name, max_history=30, length_margin=0), 30
    state = {key: value.detach() for key, value in build_encoder(model, 0).named_parameters()}
    x = torch.randn(1, length, 64)
    with FlopCounterMode(display=False) as counter:
        if name == "hstu":
            padded.hstu_encoder(state, x, torch.zeros(1, length + 1, dtype=torch.int64), 2)
        else:
            padded.sasrec_encoder(state, x, 2)
    wanted = paper_flops(model, users=1)
    assert wanted is not None and counter.get_total_flops() == wanted / 3


@pytest.mark.parametrize(("dim", "blocks", "share"), [(1024, 16, 83.97e6), (512, 8, 10.52e6), (256, 4, 1.33e6)])
def test_the_papers_count_has_the_papers_parameters(dim: int, blocks: int, share: float) -> None:
    """Catches: another parameter count P than the one behind the published MFU figures."""
    length = 2048
    model = config(dim=dim, blocks=blocks, heads=8, max_history=length)
    attention = blocks * 2 * 2 * length**2 * dim
    got = paper_flops(model, users=3)
    assert got is not None
    assert got / 9 == pytest.approx(2 * share * length + attention, rel=0.01)


def test_an_encoder_without_a_formula_has_no_count() -> None:
    """Catches: a made-up MFU for a model that a package brought."""
    assert training_flops(config("theirs"), 3, 6) is None and paper_flops(config("theirs"), 1) is None
