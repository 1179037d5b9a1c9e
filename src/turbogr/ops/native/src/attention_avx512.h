// What the attention tiles take from AVX-512 beyond vector extensions; attention_plain.h says what each function does.
#pragma once
// GCC 12 warns of its own intrinsics, which leave registers undefined on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

constexpr int ROWS = 12;
constexpr int TABLE_PARTS = 8;

INLINE Vec load_part(const float* p, int count) {
  return (Vec)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p);
}
INLINE void store_part(float* p, Vec x, int count) {
  _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), (__m512)x);
}

INLINE Vec quick_sigmoid(Vec s) {
  __m512 x = _mm512_min_ps(_mm512_mul_ps((__m512)s, _mm512_set1_ps(-1.44269504088896f)), _mm512_set1_ps(126.0f));
  Vec f = (Vec)_mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x); scalef takes the floor
  Vec p = splat(1.877576608e-03f);
  p = p * f + 8.989340253e-03f;
  p = p * f + 5.582631792e-02f;
  p = p * f + 2.401536171e-01f;
  p = p * f + 6.931530732e-01f;
  p = p * f + 9.999999251e-01f;
  __m512 y = _mm512_add_ps(_mm512_scalef_ps((__m512)p, x), _mm512_set1_ps(1.0f));
  __m512 r = _mm512_rcp14_ps(y);  // one Newton step makes its 14 bits 24
  return (Vec)_mm512_mul_ps(r, _mm512_fnmadd_ps(y, r, _mm512_set1_ps(2.0f)));
}

INLINE unsigned different(VecI a, VecI b) { return _mm512_cmpneq_epi32_mask((__m512i)a, (__m512i)b); }

INLINE int append(float* to, Vec x, unsigned lanes) {
  store(to, (Vec)_mm512_maskz_compress_ps(__mmask16(lanes), (__m512)x));
  return __builtin_popcount(lanes);
}

INLINE Vec gather(const float* table, VecI index) { return (Vec)_mm512_i32gather_ps((__m512i)index, table, 4); }

// Of 32 entries, chosen by the five low bits.
INLINE __m512 of_two(const Vec* parts, __m512i at) {
  return _mm512_permutex2var_ps((__m512)parts[0], at, (__m512)parts[1]);
}

template <int PARTS>
INLINE Vec pick(const Vec* parts, VecI index) {
  static_assert(PARTS == 2 || PARTS == 4 || PARTS == 8);
  __m512i at = (__m512i)index;
  __m512 low = of_two(parts, at);
  if constexpr (PARTS > 2) {
    __mmask16 bit5 = _mm512_test_epi32_mask(at, _mm512_set1_epi32(32));
    low = _mm512_mask_mov_ps(low, bit5, of_two(parts + 2, at));
    if constexpr (PARTS > 4) {
      __m512 high = _mm512_mask_mov_ps(of_two(parts + 4, at), bit5, of_two(parts + 6, at));
      low = _mm512_mask_mov_ps(low, _mm512_test_epi32_mask(at, _mm512_set1_epi32(64)), high);
    }
  }
  return (Vec)low;
}

INLINE void transpose(Vec (&r)[VW]) {
  __m512 t[16];
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_ps((__m512)r[2 * i], (__m512)r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_ps((__m512)r[2 * i], (__m512)r[2 * i + 1]);
  }
  __m512 u[16];
  for (int i = 0; i < 4; i++) {
    __m512d a = _mm512_castps_pd(t[4 * i]), b = _mm512_castps_pd(t[4 * i + 1]);
    __m512d c = _mm512_castps_pd(t[4 * i + 2]), d = _mm512_castps_pd(t[4 * i + 3]);
    u[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
    u[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    u[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
    u[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(u[i], u[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(u[i], u[4 + i], 0xdd);
    t[8 + i] = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(u[8 + i], u[12 + i], 0xdd);
  }
  for (int i = 0; i < 4; i++) {
    r[i] = (Vec)_mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
    r[8 + i] = (Vec)_mm512_shuffle_f32x4(t[i], t[8 + i], 0xdd);
    r[4 + i] = (Vec)_mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
    r[12 + i] = (Vec)_mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xdd);
  }
}
