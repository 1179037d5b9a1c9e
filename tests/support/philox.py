"""Philox4x32-10 in plain Python integers, one counter at a time, and the counter layout of the design."""

LOW = 0xFFFFFFFF


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    k0, k1 = key
    x0, x1, x2, x3 = counter
    for _ in range(10):
        left, right = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        x0, x1, x2, x3 = (right >> 32) ^ x1 ^ k0, right & LOW, (left >> 32) ^ x3 ^ k1, left & LOW
        k0, k1 = (k0 + 0x9E3779B9) & LOW, (k1 + 0xBB67AE85) & LOW
    return x0, x1, x2, x3


def draw(seed: int, step: int, purpose: int, layer: int, user: int, position: int, number: int) -> int:
    """The word that (seed, step, purpose, layer, user, position, draw) names."""
    counter = (step, purpose << 24 | layer, user, position << 16 | number // 4)
    return philox((seed & LOW, seed >> 32), counter)[number % 4]
