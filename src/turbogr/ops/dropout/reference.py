"""Dropout by the formula, in torch."""

from dataclasses import dataclass

from torch import Tensor

from turbogr.ops.philox import Key, random_words


@dataclass(frozen=True)
class Mask:
    """Which channels of which tokens are dropped."""

    key: Key
    rate: float
    users: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]

    @property
    def least(self) -> int:
        """The smallest word that keeps its channel."""
        return least_kept(self.rate)

    @property
    def scale(self) -> float:
        """Of what is kept."""
        return 1.0 / (1.0 - self.rate)

    def kept(self, draws: int) -> Tensor:
        """[T, draws] bool: True with probability 1 - rate."""
        return keep_mask(self.key, self.rate, self.users, self.positions, draws)


def drop(x: Tensor, mask: Mask) -> Tensor:
    return x * mask.kept(x.shape[1]).to(x.dtype) * mask.scale


def keep_mask(key: Key, rate: float, users: Tensor, positions: Tensor, draws: int) -> Tensor:
    """[T, draws] bool: True with probability 1 - rate."""
    return random_words(key, users, positions, draws) >= least_kept(rate)


def least_kept(rate: float) -> int:
    return round(rate * 2**32)
