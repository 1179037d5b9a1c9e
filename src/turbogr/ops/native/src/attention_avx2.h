// What the attention tiles take from AVX2 beyond vector extensions; attention_plain.h says what each function does.
#pragma once
#include <immintrin.h>

constexpr int ROWS = 6;  // 16 registers: 12 sums, 2 vectors, 1 broadcast
constexpr int TABLE_PARTS = 0;

INLINE __m256i first_lanes(int count) { return (__m256i)((VecI){0, 1, 2, 3, 4, 5, 6, 7} < count); }
INLINE Vec load_part(const float* p, int count) { return (Vec)_mm256_maskload_ps(p, first_lanes(count)); }
INLINE void store_part(float* p, Vec x, int count) { _mm256_maskstore_ps(p, first_lanes(count), (__m256)x); }

INLINE Vec quick_sigmoid(Vec s) {
  __m256 x = _mm256_min_ps(_mm256_mul_ps((__m256)s, _mm256_set1_ps(-1.44269504088896f)), _mm256_set1_ps(126.0f));
  x = _mm256_max_ps(_mm256_set1_ps(-126.0f), x);  // in this order a NaN stays one
  __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Vec f = (Vec)_mm256_sub_ps(x, whole);
  Vec p = splat(1.327647196e-3f);
  p = p * f + 9.675541503e-3f;
  p = p * f + 5.550713275e-2f;
  p = p * f + 2.402211972e-1f;
  p = p * f + 6.931469671e-1f;
  p = p * f + 1.0f;
  p = (Vec)((VecI)p + ((VecI)_mm256_cvtps_epi32(whole) << 23));
  __m256 y = _mm256_add_ps((__m256)p, _mm256_set1_ps(1.0f));
  __m256 r = _mm256_rcp_ps(y);  // one Newton step makes its 12 bits 23
  return (Vec)_mm256_mul_ps(r, _mm256_fnmadd_ps(y, r, _mm256_set1_ps(2.0f)));
}

INLINE unsigned different(VecI a, VecI b) { return unsigned(_mm256_movemask_ps((__m256)(a != b))); }

INLINE int append(float* to, Vec x, unsigned lanes) {
  float all[VW];
  if (lanes) store(all, x);
  int count = 0;
  for (; lanes; lanes &= lanes - 1) to[count++] = all[__builtin_ctz(lanes)];
  return count;
}

INLINE Vec gather(const float* table, VecI index) { return (Vec)_mm256_i32gather_ps(table, (__m256i)index, 4); }

template <int PARTS>
INLINE Vec pick(const Vec*, VecI) {
  return Vec{};  // never taken: TABLE_PARTS is 0
}

INLINE void transpose(Vec (&r)[VW]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_ps((__m256)r[2 * i], (__m256)r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_ps((__m256)r[2 * i], (__m256)r[2 * i + 1]);
  }
  for (int i = 0; i < 2; i++) {
    u[4 * i] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0x44);
    u[4 * i + 1] = _mm256_shuffle_ps(t[4 * i], t[4 * i + 2], 0xee);
    u[4 * i + 2] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0x44);
    u[4 * i + 3] = _mm256_shuffle_ps(t[4 * i + 1], t[4 * i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = (Vec)_mm256_permute2f128_ps(u[i], u[4 + i], 0x20);
    r[4 + i] = (Vec)_mm256_permute2f128_ps(u[i], u[4 + i], 0x31);
  }
}
