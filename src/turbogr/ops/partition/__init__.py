"""Users of one global batch onto ranks so that every rank has the same work; see reference.py for the steps.

n users, costliest first; costs and tokens are int64, so that every backend gives the same answer to the last bit.
"""

from dataclasses import dataclass

import numpy as np
import torch

from turbogr.ops import native
from turbogr.ops.partition.cpu import partition_cpu
from turbogr.ops.partition.reference import partition_reference
from turbogr.ops.registry import Backend, register

OPERATOR = register(
    "partition",
    Backend("cpu", partition_cpu, native.rejects("partition")),
    Backend("reference", partition_reference),
)


@dataclass(frozen=True)
class Goal:
    """When a partition is good enough, and how much may be tried until then."""

    load: int
    """Cost by which two ranks may differ; for tokens' sake a rank may then be this far from the mean."""
    tokens: int
    """Tokens by which two ranks may differ."""
    load_work: int
    """Combinations of users that may be looked at for the cost."""
    token_work: int
    """And for the tokens."""


def partition_users(
    cost: np.ndarray,
    tokens: np.ndarray,
    ranks: int,
    limit: int,
    goal: Goal,
    start: np.ndarray | None = None,
    backend: str | None = None,
) -> np.ndarray:
    """int64 [n]: the rank of every user; `start` is improved, without it every user in turn joins the lightest rank.

    No rank gets above `limit` tokens (0: none) that is not above it in `start`. Where that cannot be, a user is -1.

    Example:
        >>> cost = np.array([5, 4, 3, 2])
        >>> partition_users(cost, cost, 2, 0, Goal(0, 0, 1000, 1000)).tolist()
        [0, 1, 1, 0]
    """
    assert len(cost) < 1 << 31 and (np.diff(cost) <= 0).all() and ranks > 0
    chosen, _ = OPERATOR.pick(torch.device("cpu"), backend)
    part: np.ndarray = chosen.run(cost, tokens, ranks, limit, goal, start)
    return part
