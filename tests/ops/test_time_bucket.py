"""Buckets of time differences, against the formula in float64."""

import math

import pytest
import torch

from turbogr.ops.hstu_attention.reference import time_bucket

WIDTH = 0.301


def exact(seconds: int, buckets: int = 128) -> int:
    return min(math.floor(math.log(max(abs(seconds), 1)) / WIDTH), buckets)


def near_edges(first: int, last: int) -> list[int]:
    """The whole seconds on either side of the edges exp(k * width), first <= k < last."""
    edges = [math.exp(WIDTH * k) for k in range(first, last)]
    return sorted({max(1, int(edge) + step) for edge in edges for step in (-2, -1, 0, 1, 2)})


def test_edges_are_exact() -> None:
    """Catches: an edge found in single precision, a rounding up, a difference narrowed to 32 bits."""
    seconds = near_edges(0, 140)
    assert time_bucket(torch.tensor(seconds), WIDTH, 128).tolist() == [exact(s) for s in seconds]


@pytest.mark.parametrize(("seconds", "bucket"), [(0, 0), (1, 0), (2, 2), (-2, 2), (-(10**9), 68), (2**62, 128)])
def test_sign_does_not_count_and_the_last_bucket_takes_the_rest(seconds: int, bucket: int) -> None:
    """Catches: negative differences (unsorted times) in bucket 0, an index past the table."""
    assert int(time_bucket(torch.tensor([seconds]), WIDTH, 128)) == bucket


def test_differences_are_left_as_they_were() -> None:
    """Catches: the in-place operations of the bucket working on the caller's tensor."""
    seconds = torch.tensor([-5, 0, 7])
    time_bucket(seconds, WIDTH, 128)
    assert seconds.tolist() == [-5, 0, 7]
