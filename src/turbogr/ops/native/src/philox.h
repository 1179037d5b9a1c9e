// Philox4x32-10 (Salmon et al. 2011): 128 random bits as a pure function of (key, counter).
//
// Counter words are (step; purpose << 24 | layer; user number; position << 16 | draw / 4), see turbogr.ops.philox.
#pragma once
#include "common.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

struct Words {
  uint32_t w[4];
};

INLINE Words philox(uint64_t seed, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

typedef uint32_t VecW __attribute__((vector_size(VW * 4)));

// Both halves of the 64-bit products of every lane with `factor`.
INLINE void multiply_wide(VecW x, uint32_t factor, VecW& low, VecW& high) {
#if defined(__AVX512F__)
  __m512i f = _mm512_set1_epi32(int(factor)), even = _mm512_mul_epu32((__m512i)x, f);
  __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), f);
  low = (VecW)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
  high = (VecW)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
  __m256i f = _mm256_set1_epi32(int(factor)), even = _mm256_mul_epu32((__m256i)x, f);
  __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64((__m256i)x, 32), f);
  low = (VecW)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  high = (VecW)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
  typedef uint64_t Wide __attribute__((vector_size(VW * 8)));
  Wide product = __builtin_convertvector(x, Wide) * uint64_t(factor);
  low = __builtin_convertvector(product, VecW);
  high = __builtin_convertvector(product >> 32, VecW);
#endif
}

struct VecWords {
  VecW w[4];
};

// Philox of VW counters (c0, c1, c2[lane], c3[lane]).
INLINE VecWords philox(uint64_t seed, uint32_t c0, uint32_t c1, VecW c2, VecW c3) {
  VecW x0 = c0 - VecW{}, x1 = c1 - VecW{}, x2 = c2, x3 = c3;
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    VecW low0, high0, low1, high1;
    multiply_wide(x0, 0xD2511F53u, low0, high0);
    multiply_wide(x2, 0xCD9E8D57u, low1, high1);
    x0 = high1 ^ x1 ^ k0;
    x2 = high0 ^ x3 ^ k1;
    x1 = low1;
    x3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{x0, x1, x2, x3}};
}
