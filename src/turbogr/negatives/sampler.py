"""Negative samplers: which items a token is compared with. The ids are a pure function of (seed, step, token, draw).

T tokens, R negatives per token, N items
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from turbogr.config import NegativesConfig
from turbogr.errors import ConfigError
from turbogr.ops.dropout import Noise
from turbogr.ops.philox import Purpose, random_words
from turbogr.ops.sampled_softmax import UniformDraws


class Sampler(Protocol):
    def negative_ids(self, noise: Noise, count: int) -> Tensor:
        """int64 [T, count] for the tokens of `noise`, drawn with replacement."""
        ...

    def draws(self, noise: Noise, count: int) -> UniformDraws | None:
        """The same negatives for a loss that draws them itself; None where it cannot."""
        ...

    def log_q(self, ids: Tensor) -> Tensor:
        """log of the probability that one draw is the item, fp32, shaped like ids."""
        ...


class UniformSampler:
    """Every item of the catalogue alike."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items

    def negative_ids(self, noise: Noise, count: int) -> Tensor:
        return self.draws(noise, count).ids()

    def draws(self, noise: Noise, count: int) -> UniformDraws:
        return UniformDraws(noise.key(Purpose.NEGATIVES, 0), noise.users, noise.positions, count, self.num_items)

    def log_q(self, ids: Tensor) -> Tensor:
        return torch.full(ids.shape, -float(np.log(self.num_items)), device=ids.device)


class PopularitySampler:
    """Proportional to (training count + 1) ** power, in units of 2^-32; no item has less than one unit."""

    def __init__(self, counts: np.ndarray, power: float) -> None:
        weights = (counts.astype(np.float64) + 1.0) ** power
        room = 2**32 - len(counts)
        edges = np.floor(np.cumsum(weights) / weights.sum() * room).astype(np.int64) + np.arange(1, len(counts) + 1)
        edges[-1] = 2**32
        self.edges = torch.from_numpy(edges)  # int64 [N] ascending: item i owns the words edges[i-1] .. edges[i]

    def negative_ids(self, noise: Noise, count: int) -> Tensor:
        words = random_words(noise.key(Purpose.NEGATIVES, 0), noise.users, noise.positions, count)
        return torch.searchsorted(self.edges, words.contiguous(), right=True)

    def draws(self, noise: Noise, count: int) -> None:
        return None

    def log_q(self, ids: Tensor) -> Tensor:
        below = torch.where(ids > 0, self.edges[(ids - 1).clamp(min=0)], 0)
        return ((self.edges[ids] - below).double() / 2.0**32).log().float()


def ensure_enough_items(config: NegativesConfig, num_items: int) -> None:
    if config.count >= num_items:
        raise ConfigError(
            f"negatives.count {config.count} is not below the catalogue's {num_items} items: take fewer negatives."
        )


def build_sampler(config: NegativesConfig, num_items: int, counts: np.ndarray) -> Sampler:
    """The sampler that the config names; `counts` int64 [N] are those of the training region."""
    ensure_enough_items(config, num_items)
    return UniformSampler(num_items) if config.sampler == "uniform" else PopularitySampler(counts, config.power)
