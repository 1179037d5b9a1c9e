// Hashing of 64-bit ids: neighbours spread, and every bit of the id counts.
#pragma once
#include <cstdint>

// The finaliser of MurmurHash3; the leading bits are the best mixed. turbogr/ops/id_map/reference.py computes the same.
static inline uint64_t id_hash(int64_t id) {
  uint64_t x = uint64_t(id);
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDu;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53u;
  return x ^ x >> 33;
}
