"""Dropout by the formula, in torch."""

from torch import Tensor

from turbogr.ops.philox import Key, random_words


def drop(x: Tensor, rate: float, key: Key, users: Tensor, positions: Tensor) -> Tensor:
    return x * keep_mask(key, rate, users, positions, x.shape[1]).to(x.dtype) / (1.0 - rate)


def keep_mask(key: Key, rate: float, users: Tensor, positions: Tensor, draws: int) -> Tensor:
    """[T, draws] bool: True with probability 1 - rate."""
    return random_words(key, users, positions, draws) >= round(rate * 2**32)
