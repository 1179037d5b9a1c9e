"""Negative samplers: their distributions, their probabilities, and that the batch does not matter."""

import math

import numpy as np
import pytest
import torch

from tests.support.jagged_cases import noise_of
from turbogr.config import NegativesConfig
from turbogr.errors import ConfigError
from turbogr.negatives.sampler import PopularitySampler, Sampler, UniformSampler, build_sampler
from turbogr.ops.dropout import Noise

COUNTS = np.array([0, 1, 5, 100, 1000, 0, 20])
SAMPLERS: list[Sampler] = [UniformSampler(7), PopularitySampler(COUNTS, 0.75)]


def drawn(sampler: Sampler, draws: int = 200_000) -> np.ndarray:
    """How often each of 7 items is drawn."""
    noise = noise_of(torch.arange(0, draws // 100 + 1, 10))
    return np.bincount(sampler.negative_ids(noise, 100).flatten().numpy(), minlength=7)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
def test_items_are_drawn_with_the_probability_that_log_q_says(sampler: Sampler) -> None:
    """Catches: a bin off by one, a correction for another distribution than the one drawn from."""
    counts = drawn(sampler)
    expected = sampler.log_q(torch.arange(7)).double().exp().numpy() * counts.sum()
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 22.5  # 6 degrees of freedom: p = 0.001


def test_popularity_is_the_power_of_counts_plus_one() -> None:
    """Catches: the power put on the wrong side of the addition, items without events that cannot be drawn."""
    for power in (0.0, 0.75, 1.0):
        weights = (COUNTS + 1.0) ** power
        got = PopularitySampler(COUNTS, power).log_q(torch.arange(7)).double().exp().numpy()
        np.testing.assert_allclose(got, weights / weights.sum(), rtol=1e-6)


def test_the_probabilities_sum_to_one_and_no_item_has_none() -> None:
    """Catches: words that fall past the last item, items in the tail with an empty bin and log q = -inf."""
    counts = np.arange(50_000) % 2
    counts[:3] = 10**12
    assert all(int(PopularitySampler(counts[:n] % 7919, 0.75).edges[-1]) == 2**32 for n in range(1000, 1100))
    sampler = PopularitySampler(counts, 1.0)
    widths = sampler.edges.diff(prepend=torch.zeros(1, dtype=torch.int64))
    assert int(widths.min()) >= 1 and int(widths.sum()) == 2**32
    q = sampler.log_q(torch.arange(50_000)).double().exp()
    assert float(q.sum()) == pytest.approx(1.0, abs=1e-6)


def test_the_edges_of_the_words_belong_to_the_first_and_last_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: an index past the catalogue for the largest word, or the wrong item on an edge."""
    sampler = PopularitySampler(COUNTS, 0.75)
    edge = int(sampler.edges[2])
    words = torch.tensor([[0, 2**32 - 1, edge - 1, edge]])
    monkeypatch.setattr("turbogr.negatives.sampler.random_words", lambda *args: words)
    assert sampler.negative_ids(noise_of(torch.tensor([0, 1])), 4).tolist() == [[0, 6, 2, 3]]


def test_the_uniform_log_q_is_that_of_the_catalogue() -> None:
    assert UniformSampler(7).log_q(torch.arange(3)).tolist() == pytest.approx([-math.log(7)] * 3)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
def test_a_token_has_the_same_negatives_however_the_batch_is_cut(sampler: Sampler) -> None:
    """Catches: negatives drawn by place in the batch: accumulation or other ranks would train another model."""
    offsets = torch.tensor([0, 3, 4, 9, 11])
    whole = sampler.negative_ids(noise_of(offsets), 9)
    first = sampler.negative_ids(noise_of(torch.tensor([0, 3, 4])), 9)
    second = sampler.negative_ids(noise_of(torch.tensor([0, 5, 7]), numbers=torch.tensor([2, 3])), 9)
    assert torch.equal(torch.cat((first, second)), whole)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda s: type(s).__name__)
def test_steps_seeds_and_tokens_have_negatives_of_their_own(sampler: Sampler) -> None:
    """Catches: the same negatives every step, which is training on a small catalogue."""
    offsets = torch.tensor([0, 2])
    one = sampler.negative_ids(noise_of(offsets), 64)
    assert not torch.equal(one[0], one[1])
    for other in (noise_of(offsets, step=4), noise_of(offsets, seed=8)):
        assert not torch.equal(sampler.negative_ids(other, 64), one)


def test_the_config_names_the_sampler() -> None:
    assert isinstance(build_sampler(NegativesConfig(count=3), 7, COUNTS), UniformSampler)
    sampler = build_sampler(NegativesConfig(count=3, sampler="popularity", power=0.5), 7, COUNTS)
    assert isinstance(sampler, PopularitySampler)
    assert torch.equal(sampler.edges, PopularitySampler(COUNTS, 0.5).edges)


def test_more_negatives_than_items_are_refused() -> None:
    with pytest.raises(ConfigError, match="negatives.count 7 is not below the catalogue's 7 items"):
        build_sampler(NegativesConfig(count=7), 7, COUNTS)


def test_no_token_gives_no_negatives() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    for sampler in SAMPLERS:
        assert sampler.negative_ids(Noise(0, 0, empty, empty), 5).shape == (0, 5)
