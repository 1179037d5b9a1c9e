"""Philox in Triton gives the reference's words, bit for bit."""

import torch

from tests.support.triton_device import DEVICE
from turbogr.ops.philox import OPERATOR, reference
from turbogr.ops.philox.triton import BLOCK, philox_triton


def test_words_are_those_of_the_reference_for_any_bits() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (0, 1, BLOCK - 1, BLOCK + 1):
        seed, word0, word1 = (9 << 61) | 0xF234_5678_9ABC, 0xFFFF_FFFF, 0x8000_0003
        word2, word3 = torch.randint(0, 1 << 32, (2, count), generator=generator)
        wanted = reference.philox4x32(seed, word0, word1, word2, word3)
        got = philox_triton(seed, word0, word1, word2.to(DEVICE), word3.to(DEVICE))
        assert torch.equal(got.cpu(), wanted), count


def test_it_is_picked_where_triton_runs() -> None:
    assert OPERATOR.pick(DEVICE)[0].name == "triton"
