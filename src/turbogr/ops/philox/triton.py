"""Philox4x32-10 in Triton: the same words as reference.py, and the functions that other kernels draw with."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from turbogr.ops.philox import Key
from turbogr.ops.triton_support import Configuration

BLOCK = 256


@triton.jit
def philox_words(key_low, key_high, c0, c1, c2, c3):
    """The four words of counters (c0, c1, c2, c3); whole numbers of 32 bits, shaped alike or scalar."""
    k0, k1 = key_low.to(tl.uint32), key_high.to(tl.uint32)
    # a sum with zeros gives all four the shape of the last two
    zero = (c2 ^ c2).to(tl.uint32) ^ (c3 ^ c3).to(tl.uint32)
    x0, x1 = zero + c0.to(tl.uint32), zero + c1.to(tl.uint32)
    x2, x3 = zero + c2.to(tl.uint32), zero + c3.to(tl.uint32)
    factor0 = tl.full([1], 0xD2511F53, tl.uint32)
    factor1 = tl.full([1], 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        low0, high0 = x0 * factor0, tl.umulhi(x0, factor0)
        low1, high1 = x2 * factor1, tl.umulhi(x2, factor1)
        x0, x1 = high1 ^ x1 ^ k0, low1
        x2, x3 = high0 ^ x3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return x0, x1, x2, x3


@triton.jit
def interleaved(x0, x1, x2, x3, ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """[ROWS, 4 * GROUPS] from four words [ROWS, GROUPS]: column 4 g + n is word n of group g."""
    pairs = tl.join(tl.join(x0, x2), tl.join(x1, x3))  # [ROWS, GROUPS, 2, 2]
    return tl.reshape(pairs, [ROWS, 4 * GROUPS])


@triton.jit(do_not_specialize=["key_low", "key_high", "word0", "word1", "count"])
def _words_kernel(word2, word3, out, key_low, key_high, word0, word1, count, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    c2, c3 = tl.load(word2 + place, mask=inside, other=0), tl.load(word3 + place, mask=inside, other=0)
    x0, x1, x2, x3 = philox_words(key_low, key_high, word0, word1, c2, c3)
    words = interleaved(x0[:, None], x1[:, None], x2[:, None], x3[:, None], BLOCK, 1)
    columns = place[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out + columns, words.to(tl.int64), mask=inside[:, None])


def signed(word: int) -> int:
    """The same 32 bits as a signed number: arguments of kernels are then always of one type."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >> 31 else word


def key_words(key: Key) -> tuple[int, int, int, int]:
    """(low and high half of the seed, step, purpose and layer), what the kernels take of a key."""
    return signed(key.seed), signed(key.seed >> 32), signed(key.step), signed(int(key.purpose) << 24 | key.layer)


def philox_triton(seed: int, word0: int, word1: int, word2: Tensor, word3: Tensor) -> Tensor:
    """[n, 4] int64, see `turbogr.ops.philox.reference.philox4x32`."""
    word2, word3 = word2.contiguous(), word3.contiguous()
    count = len(word2)
    out = torch.empty(count, 4, dtype=torch.int64, device=word2.device)
    if count:
        words = (signed(seed), signed(seed >> 32), signed(word0), signed(word1))
        _words_kernel[(triton.cdiv(count, BLOCK),)](word2, word3, out, *words, count, BLOCK=BLOCK)
    return out


def configurations() -> list[Configuration]:
    numbers = dict.fromkeys(("key_low", "key_high", "word0", "word1", "count"), "i32")
    return [
        Configuration(
            name="words",
            kernel=_words_kernel,
            signature={"word2": "*i64", "word3": "*i64", "out": "*i64", **numbers},
            constants={"BLOCK": BLOCK},
            num_warps=4,
        )
    ]
