// Rows of fp32 or bf16 numbers, worked on as fp32 vectors; the last vector of a row may be a part of one.
#pragma once
#include "common.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

struct Bf16 {
  uint16_t bits;
};
typedef uint16_t VecH __attribute__((vector_size(VW * 2)));
typedef uint32_t VecB __attribute__((vector_size(VW * 4)));

INLINE Vec widen(VecH x) { return (Vec)(__builtin_convertvector(x, VecB) << 16); }

// To the nearest, ties to even; not a number stays one.
INLINE VecH narrow(Vec x) {
#if defined(__AVX512BF16__)
  return (VecH)_mm512_cvtneps_pbh((__m512)x);
#else
  VecB bits = (VecB)x;
  VecB rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector(x == x ? rounded : VecB{} + 0x7FC0, VecH);
#endif
}

// `n` lanes from p, the others 0; all of them where n >= VW.
INLINE Vec read(const float* p, int64_t n) {
  if (n >= VW) return load(p);
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
#else
  Vec x{};
  for (int64_t i = 0; i < n; i++) x[i] = p[i];
  return x;
#endif
}

INLINE Vec read(const Bf16* p, int64_t n) {
  VecH x{};
  if (n >= VW) {
    std::memcpy(&x, p, sizeof x);
    return widen(x);
  }
#if defined(__AVX512F__)
  return widen((VecH)_mm256_maskz_loadu_epi16(__mmask16((1u << n) - 1), p));
#else
  for (int64_t i = 0; i < n; i++) x[i] = p[i].bits;
  return widen(x);
#endif
}

INLINE void write(float* p, Vec x, int64_t n) {
  if (n >= VW) return store(p, x);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(p, __mmask16((1u << n) - 1), (__m512)x);
#else
  for (int64_t i = 0; i < n; i++) p[i] = x[i];
#endif
}

INLINE void write(Bf16* p, Vec x, int64_t n) {
  VecH half = narrow(x);
  if (n >= VW) {
    std::memcpy(p, &half, sizeof half);
    return;
  }
#if defined(__AVX512F__)
  _mm256_mask_storeu_epi16(p, __mmask16((1u << n) - 1), (__m256i)half);
#else
  for (int64_t i = 0; i < n; i++) p[i].bits = half[i];
#endif
}

// The sum of all lanes, added pairwise.
INLINE float fold(Vec x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  for (int half = VW / 2; half; half /= 2)
    for (int i = 0; i < half; i++) x[i] += x[i + half];
  return x[0];
#endif
}

// x with the lanes from `n` on set to `fill`.
INLINE Vec only_first(Vec x, int64_t n, float fill = 0.0f) {
  if (n >= VW) return x;
#if defined(__AVX512F__)
  return (Vec)_mm512_mask_mov_ps((__m512)splat(fill), __mmask16((1u << n) - 1), (__m512)x);
#else
  for (int64_t i = n; i < VW; i++) x[i] = fill;
  return x;
#endif
}

// LayerNorm of one row without affine parameters: xhat = (x - mean) * inverse.
struct Moments {
  float mean, inverse;
};

template <class E>
INLINE Moments moments(const E* x, int64_t width, float eps) {
  Vec total{}, squares{};
  for (int64_t c = 0; c < width; c += VW) total += read(x + c, width - c);
  float mean = fold(total) / float(width);
  for (int64_t c = 0; c < width; c += VW) {
    Vec off = only_first(read(x + c, width - c) - mean, width - c);
    squares += off * off;
  }
  return {mean, 1.0f / __builtin_sqrtf(fold(squares) / float(width) + eps)};
}
