"""Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") in int64 arithmetic."""

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
LOW = 0xFFFFFFFF
CHUNK = 1 << 16
"""Counters worked on at a time, so that the intermediate values stay in the cache."""


def philox4x32(seed: int, word0: int, word1: int, word2: Tensor, word3: Tensor) -> Tensor:
    """[n, 4] int64 in [0, 2^32): the block function of counters (word0, word1, word2[i], word3[i]) under key `seed`."""
    out = torch.empty(len(word2), 4, dtype=torch.int64, device=word2.device)
    for begin in range(0, len(word2), CHUNK):
        c2, c3 = word2[begin : begin + CHUNK] & LOW, word3[begin : begin + CHUNK] & LOW
        c0, c1 = torch.full_like(c2, word0), torch.full_like(c2, word1)
        k0, k1 = seed & LOW, (seed >> 32) & LOW
        for _ in range(ROUNDS):
            # products wrap modulo 2^64; the shift is arithmetic, so the high half needs the mask
            product0, product1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
            c0, c2 = (product1 >> 32 & LOW) ^ c1 ^ k0, (product0 >> 32 & LOW) ^ c3 ^ k1
            c1, c3 = product1 & LOW, product0 & LOW
            k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
        torch.stack((c0, c1, c2, c3), dim=1, out=out[begin : begin + CHUNK])
    return out
