// The number formats of q, k, v: how they are read, laid out for the products of a tile, and written.
//
//   Single     fp32
//   HalfWide   bf16, widened to fp32 when a tile is laid out
//   HalfPairs  bf16, multiplied two by two where the processor can (AVX512-BF16)
//   HalfTiles  these pairs, 16 x 16 x 16 at once (AMX; attention_amx.h)
//
// An operand is made of 32-bit units: one float, or a pair of bf16 that lie next to each other along the summed side.
//   depth(d)                    units of d columns
//   rows                        a broadcast operand summed over its columns  [n][depth(d)]
//   columns                     a broadcast operand summed over its tokens   [depth(n)][d]
//   copied_columns              the same where whole vectors are read: always a copy, up(d) wide, 0 behind d
//   columns_too                 the columns of what `rows` has answered
//   sum_rows(d)                 rows of sums that d columns take
//   load(row, unit, d)          VW units of a token from `unit` on, 0 behind d
//   write(to, x, count)         the first `count` numbers of x, rounded to the format
#pragma once
#include <algorithm>

#include "attention_tile.h"

typedef uint16_t Bf16;
typedef uint16_t VecHalf __attribute__((vector_size(VW * 2)));
typedef uint32_t VecW __attribute__((vector_size(VW * 4)));

INLINE Vec widen_bf16(const Bf16* p, int count) {
  VecHalf x{};
  if (count >= VW)
    std::memcpy(&x, p, sizeof x);
  else
    std::memcpy(&x, p, size_t(count) * 2);
  return (Vec)(__builtin_convertvector(x, VecW) << 16);
}

// Rounded to nearest, ties to even.
INLINE VecHalf narrow_bf16(Vec x) {
  VecW bits = (VecW)x, rounded = bits + 0x7fff + ((bits >> 16) & 1);
  VecW quiet = bits | 0x400000;  // rounding could carry a NaN over into 0
  return __builtin_convertvector((x == x ? rounded : quiet) >> 16, VecHalf);
}

INLINE void store_bf16(Bf16* p, Vec x, int count) {
  VecHalf half = narrow_bf16(x);
  std::memcpy(p, &half, size_t(count < VW ? count : VW) * 2);
}

struct Unpaired {  // a unit is one number
  static constexpr int STEP = 1;
  static constexpr bool TILES = false;
  struct Registers {
    Registers() {}  // nothing to set up
  };
  INLINE int depth(int d) { return d; }
  INLINE int sum_rows(int d) { return d; }
  INLINE Vec madd(Vec sum, float a, Vec b) { return sum + a * b; }

  template <int M, int V>
  INLINE void store_stacked(float* to, Vec (&x)[M][V]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int n = 0; n < V; n++) store(to + m * BLOCK + VW * n, x[m][n]);
  }
  // stacked they are rows already
  template <int M, int V>
  INLINE void store_rows(float*, Vec (&)[M][V]) {}
  template <class In>
  INLINE Operand columns_too(const Operand& rows, float*, const In*, int64_t, int, int) {
    return rows;
  }
};

INLINE int up(int64_t n) { return int((n + VW - 1) / VW * VW); }

// Tokens as rows of units, up(depth) wide.
template <class N>
INLINE Operand copied(float* scratch, const typename N::In* from, int64_t stride, int n, int d) {
  int width = up(N::depth(d));
  for (int t = 0; t < n; t++)
    for (int c = 0; c < width; c += VW) store(scratch + t * width + c, N::load(from + t * stride, c, d));
  return {scratch, width};
}

struct Single : Unpaired {
  typedef float In;
  static constexpr bool IN_FLOATS = true;
  INLINE Vec load(const In* row, int unit, int d) {
    return d - unit >= VW ? ::load(row + unit) : load_part(row + unit, d - unit);
  }
  // Tokens a multiple of 1 KB apart share few sets of the first-level cache: they are laid out anew.
  INLINE Operand rows(float* scratch, const In* from, int64_t stride, int n, int d) {
    return stride % 256 ? Operand{from, stride} : copied<Single>(scratch, from, stride, n, d);
  }
  INLINE Operand columns(float* scratch, const In* from, int64_t stride, int n, int d) {
    return rows(scratch, from, stride, n, d);
  }
  INLINE Operand copied_columns(float* scratch, const In* from, int64_t stride, int n, int d) {
    return copied<Single>(scratch, from, stride, n, d);
  }
  INLINE void write(In* to, Vec x, int count) {
    if (count >= VW)
      store(to, x);
    else
      store_part(to, x, count);
  }
};

struct HalfWide : Unpaired {
  typedef Bf16 In;
  static constexpr bool IN_FLOATS = false;
  INLINE Vec load(const In* row, int unit, int d) { return widen_bf16(row + unit, d - unit); }
  INLINE Operand rows(float* scratch, const In* from, int64_t stride, int n, int d) {
    return copied<HalfWide>(scratch, from, stride, n, d);
  }
  INLINE Operand columns(float* scratch, const In* from, int64_t stride, int n, int d) {
    return copied<HalfWide>(scratch, from, stride, n, d);
  }
  INLINE Operand copied_columns(float* scratch, const In* from, int64_t stride, int n, int d) {
    return copied<HalfWide>(scratch, from, stride, n, d);
  }
  INLINE void write(In* to, Vec x, int count) { store_bf16(to, x, count); }
};

#if defined(__AVX512BF16__)
struct HalfPairs {
  typedef Bf16 In;
  static constexpr bool IN_FLOATS = false;
  static constexpr int STEP = 2;
  static constexpr bool TILES = false;
  struct Registers {
    Registers() {}  // nothing to set up
  };
  INLINE int depth(int d) { return (d + 1) / 2; }
  INLINE int sum_rows(int d) { return d; }
  INLINE Vec madd(Vec sum, float a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
  }
  // Two rows of floats as one row of pairs.
  INLINE Vec pair(Vec first, Vec second) {
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)first));
    __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)second));
    return (Vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }

  template <int M, int V>
  INLINE void store_stacked(float* to, Vec (&x)[M][V]) {
#pragma GCC unroll 8
    for (int m = 0; m < M; m += 2)
#pragma GCC unroll 2
      for (int n = 0; n < V; n++)
        store(to + m / 2 * BLOCK + VW * n, pair(x[m][n], m + 1 < M ? x[m + 1 < M ? m + 1 : 0][n] : Vec{}));
  }
  template <int M, int V>
  INLINE void store_rows(float* to, Vec (&x)[M][V]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++)
#pragma GCC unroll 2
      for (int n = 0; n < V; n++)
        _mm256_storeu_si256((__m256i*)(to + m * (BLOCK / 2) + VW / 2 * n),
                            (__m256i)_mm512_cvtneps_pbh((__m512)x[m][n]));
  }

  INLINE Vec load(const In* row, int unit, int d) {
    int left = d - 2 * unit;
    __mmask32 mask = left >= 2 * VW ? ~0u : (1u << left) - 1;
    return (Vec)_mm512_maskz_loadu_epi16(mask, row + 2 * unit);
  }
  INLINE Operand rows(float* scratch, const In* from, int64_t stride, int n, int d) {
    if (d % 2 == 0 && stride % 2 == 0) return {(const float*)from, stride / 2};
    return copied<HalfPairs>(scratch, from, stride, n, d);
  }
  INLINE Operand copied_columns(float* scratch, const In* from, int64_t stride, int n, int d) {
    return columns(scratch, from, stride, n, d);
  }
  INLINE Operand columns_too(const Operand&, float* scratch, const In* from, int64_t stride, int n, int d) {
    return columns(scratch, from, stride, n, d);
  }
  INLINE Operand columns(float* scratch, const In* from, int64_t stride, int n, int d) {
    int width = up(d);
    for (int t = 0; t < n; t += 2)
      for (int c = 0; c < d; c += VW) {
        __mmask16 mask = d - c >= VW ? 0xffff : (1u << (d - c)) - 1;
        __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + t * stride + c));
        __m512i high = _mm512_cvtepu16_epi32(
            _mm256_maskz_loadu_epi16(t + 1 < n ? mask : __mmask16(0), from + (t + 1) * stride + c));
        store(scratch + t / 2 * width + c, (Vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
      }
    return {scratch, width};
  }
  INLINE void write(In* to, Vec x, int count) {
    __mmask16 mask = count >= VW ? 0xffff : (1u << count) - 1;
    _mm256_mask_storeu_epi16(to, mask, (__m256i)_mm512_cvtneps_pbh((__m512)x));
  }
};
typedef HalfPairs Half;
#else
typedef HalfWide Half;
#endif

// VW units of `n` tokens from `unit` on as a square of lanes; ALL: n is VW.
template <class N, bool ALL>
INLINE void load_square(Vec (&r)[VW], const typename N::In* from, int64_t stride, int n, int unit, int d) {
#pragma GCC unroll 16
  for (int i = 0; i < VW; i++) r[i] = ALL || i < n ? N::load(from + i * stride, unit, d) : Vec{};
  transpose(r);
}

// The squares of VW tokens; the last whole one ends with the width, over the one before it.
template <class N, bool ALL>
INLINE void pack_square_lanes(float* lanes, const typename N::In* from, int64_t stride, int n, int d) {
  const int depth = N::depth(d), whole = d / N::STEP;
  Vec r[VW];
  for (int c = 0; c < depth; c += VW) {
    const int unit = std::min(c, depth - VW);
    if (unit >= 0 && whole == depth) {
      load_square<N, ALL>(r, from, stride, n, unit, (unit + VW) * N::STEP);
#pragma GCC unroll 16
      for (int i = 0; i < VW; i++) store(lanes + (unit + i) * BLOCK, r[i]);
    } else {
      load_square<N, ALL>(r, from, stride, n, c, d);
#pragma GCC unroll 16
      for (int i = 0; i < VW; i++)
        if (c + i < depth) store(lanes + (c + i) * BLOCK, r[i]);
    }
  }
}

// lanes [depth(d)][BLOCK] of n tokens, 0 up to the next multiple of VW.
template <class N>
static void pack_lanes(float* lanes, const typename N::In* from, int64_t stride, int n, int d) {
  int t = 0;
  for (; t + VW <= n; t += VW) pack_square_lanes<N, true>(lanes + t, from + t * stride, stride, VW, d);
  if (t < n) pack_square_lanes<N, false>(lanes + t, from + t * stride, stride, n - t, d);
}

template <class N, bool ALL>
INLINE void unpack_square_lanes(typename N::In* to, int64_t stride, const float* sums, int n, int d, float scale) {
  Vec r[VW];
  if (d < VW) {
    for (int i = 0; i < VW; i++) r[i] = i < d ? load(sums + i * BLOCK) * scale : Vec{};
    transpose(r);
    for (int i = 0; i < n; i++) N::write(to + i * stride, r[i], d);
    return;
  }
  for (int c = 0; c < d; c += VW) {
    const int first = std::min(c, d - VW);
#pragma GCC unroll 16
    for (int i = 0; i < VW; i++) r[i] = load(sums + (first + i) * BLOCK) * scale;
    transpose(r);
#pragma GCC unroll 16
    for (int i = 0; i < VW; i++)
      if (ALL || i < n) N::write(to + i * stride + first, r[i], VW);
  }
}

// The way back: sums [d][BLOCK] * scale to n tokens.
template <class N>
static void unpack_lanes(typename N::In* to, int64_t stride, const float* sums, int n, int d, float scale) {
  int t = 0;
  for (; t + VW <= n; t += VW) unpack_square_lanes<N, true>(to + t * stride, stride, sums + t, VW, d, scale);
  if (t < n) unpack_square_lanes<N, false>(to + t * stride, stride, sums + t, n - t, d, scale);
}
