"""Random numbers as a pure function of where they are used: Philox4x32-10.

A draw is keyed by (seed, step, purpose, layer, number of the user in the global step, position, draw), never by rank,
thread or local index, so that any number of ranks, any balance and any schedule draws the same numbers.

    key      seed, 64 bits
    counter  (step; purpose << 24 | layer; user number; position << 16 | draw / 4)

The four outputs of one counter are the draws 4n .. 4n+3.
"""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from turbogr.ops import native
from turbogr.ops.philox.cpu import philox_cpu
from turbogr.ops.philox.reference import philox4x32
from turbogr.ops.registry import Backend, register
from turbogr.ops.triton_support import late, rejects_triton

OPERATOR = register(
    "philox",
    Backend("triton", late("turbogr.ops.philox.triton", "philox_triton"), rejects_triton),
    Backend("cpu", philox_cpu, native.rejects("philox")),
    Backend("reference", philox4x32),
)


class Purpose(IntEnum):
    """What a draw is for; numbers never change, results depend on them."""

    ORDER = 1
    NEGATIVES = 2
    DROPOUT = 3
    ATTENTION_DROPOUT = 4
    TABLE_ROWS = 5
    PARAMETERS = 6
    SAMPLE_USERS = 7
    ROUNDING = 8


@dataclass(frozen=True)
class Key:
    """The part of a draw's address that is the same for a whole tensor."""

    seed: int
    step: int
    purpose: Purpose
    layer: int = 0


def random_words(key: Key, user: Tensor, position: Tensor, draws: int) -> Tensor:
    """[T, draws] int64 in [0, 2^32) for tokens at (user [T], position [T]).

    Example:
        >>> key = Key(seed=0, step=0, purpose=Purpose.NEGATIVES)
        >>> random_words(key, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 2).shape
        torch.Size([1, 2])
    """
    assert draws <= 1 << 18 and 0 <= key.step < 1 << 32 and 0 <= key.layer < 1 << 24
    groups = -(-draws // 4)
    group = torch.arange(groups, device=user.device)
    low = ((position.unsqueeze(1) << 16) | group).flatten()  # [T * groups]
    users = user.unsqueeze(1).expand(-1, groups).flatten()
    backend, _ = OPERATOR.pick(user.device)
    words: Tensor = backend.run(key.seed, key.step, int(key.purpose) << 24 | key.layer, users, low)
    return words.view(len(user), groups * 4)[:, :draws]


def random_below(key: Key, user: Tensor, position: Tensor, draws: int, bound: int) -> Tensor:
    """[T, draws] integers in [0, bound): the high half of word * bound."""
    assert 0 < bound < 1 << 31
    return (random_words(key, user, position, draws) * bound) >> 32


def random_order(seed: int, step: int, count: int) -> Tensor:
    """[count] a permutation of 0 .. count-1: the order of 64-bit random numbers (ties by index)."""
    index = torch.arange(count)
    words = random_words(Key(seed, step, Purpose.ORDER), index, torch.zeros_like(index), 2)
    return torch.argsort((words[:, 0] << 31) | (words[:, 1] >> 1), stable=True)


def row_words(key: Key, ids: Tensor, dim: int) -> Tensor:
    """[n, dim] int64 in [0, 2^32) for the rows of any int64 ids [n].

    The lower half of an id is the counter's user; the upper half, folded to 16 bits, its position. So ids below 2^32
    never share their numbers, and of others two in 2^48.
    """
    upper = ids >> 32 & 0xFFFFFFFF
    return random_words(key, ids & 0xFFFFFFFF, (upper ^ upper >> 16) & 0xFFFF, dim)


def normal_rows(key: Key, ids: Tensor, dim: int, std: float, bound: float = 0.0) -> Tensor:
    """[n, dim] rows of a normal distribution, cut at +-bound deviations if bound > 0; a pure function of the id."""
    # the inverse distribution function of uniform numbers in the middle of 2^-32 wide cells
    uniform = (row_words(key, ids, dim).double() + 0.5) / 2.0**32
    if bound > 0:
        edge = torch.special.ndtr(torch.tensor(-bound, dtype=torch.float64, device="cpu")).item()
        uniform = edge + uniform * (1 - 2 * edge)
    normal: Tensor = torch.special.ndtri(uniform) * std
    return normal.float()


def uniform_rows(key: Key, ids: Tensor, dim: int, edge: float) -> Tensor:
    """[n, dim] rows uniform in (-edge, edge); a pure function of the id."""
    uniform = (row_words(key, ids, dim).double() + 0.5) / 2.0**32
    return ((2 * uniform - 1) * edge).float()
