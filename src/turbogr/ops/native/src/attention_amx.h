// Products of one tile of bf16 on AMX: 16 x 16 sums of 32 products at once.
//
//   a [16 s][depth]          rows of units (pairs of bf16 along the summed side)
//   b [depth][16 w]          the same side's units as rows, `HalfPairs` calls them lanes or columns
//   c [16 s][16 w]           fp32
// Depths are multiples of 16 units, and everything behind the tokens and columns that there are is 0.
#pragma once
#include "attention_numbers.h"

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
// A constant: GCC 12's _tile_loadconfig says of 8 bytes only that it reads them, so stores to the others may go missing.
static const TileShapes TILE_SHAPES;

// What was stored before is in memory: GCC 12's _tile_loadd does not say that it reads any.
INLINE void before_tile_loads() { asm volatile("" ::: "memory"); }

// The eight tile registers, each 16 rows of 64 bytes, for as long as this lives.
class TileRegisters {
 public:
  TileRegisters() { _tile_loadconfig(&TILE_SHAPES); }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

struct HalfTiles : HalfPairs {
  static constexpr bool TILES = true;
  typedef TileRegisters Registers;
  INLINE int depth(int d) { return up((d + 1) / 2); }
  INLINE int sum_rows(int d) { return up(d); }
};

// to [16][16 W] = from + a b, W <= 4; `from` may be `to`, null stands for zeros. `from` and `to` have one stride.
template <int W>
INLINE void multiply_strip(float* to, const float* from, int64_t ldc, const float* a, int64_t lda, const float* b,
                           int64_t ldb, int depth) {
  before_tile_loads();
  if (from) {
    _tile_loadd(0, from, ldc * 4);
    if (W > 1) _tile_loadd(1, from + 16, ldc * 4);
    if (W > 2) _tile_loadd(2, from + 32, ldc * 4);
    if (W > 3) _tile_loadd(3, from + 48, ldc * 4);
  } else {
    _tile_zero(0);
    if (W > 1) _tile_zero(1);
    if (W > 2) _tile_zero(2);
    if (W > 3) _tile_zero(3);
  }
  for (int k = 0; k < depth; k += 16) {
    const float* right = b + k * ldb;
    _tile_loadd(4, a + k, lda * 4);
    _tile_loadd(5, right, ldb * 4);
    _tile_dpbf16ps(0, 4, 5);
    if (W > 1) {
      _tile_loadd(6, right + 16, ldb * 4);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (W > 2) {
      _tile_loadd(5, right + 32, ldb * 4);
      _tile_dpbf16ps(2, 4, 5);
    }
    if (W > 3) {
      _tile_loadd(6, right + 48, ldb * 4);
      _tile_dpbf16ps(3, 4, 6);
    }
  }
  _tile_stored(0, to, ldc * 4);
  if (W > 1) _tile_stored(1, to + 16, ldc * 4);
  if (W > 2) _tile_stored(2, to + 32, ldc * 4);
  if (W > 3) _tile_stored(3, to + 48, ldc * 4);
}

// The same for any width, a multiple of 16.
INLINE void multiply_strips(float* to, const float* from, int64_t ldc, const float* a, int64_t lda, const float* b,
                            int64_t ldb, int depth, int width) {
  for (; width > 0; width -= 64, to += 64, b += 64, from = from ? from + 64 : nullptr)
    with_count<4>(std::min(width, 64) / 16,
                  [&](auto W) { multiply_strip<W.value>(to, from, ldc, a, lda, b, ldb, depth); });
}

// Rows [BLOCK][depth(d)] of n tokens, 0 behind them up to a multiple of 32 tokens.
INLINE void copy_rows(float* to, const Bf16* from, int64_t stride, int n, int d) {
  const int depth = HalfTiles::depth(d);
  copied<HalfTiles>(to, from, stride, n, d);
  std::memset(to + n * depth, 0, size_t(((n + 31) / 32 * 32 - n) * depth) * 4);
}

// Pairs of tokens t and t + 1 of 16 columns from c on, 0 behind the n tokens and d columns.
INLINE Vec token_pair(const Bf16* from, int64_t stride, int t, int c, int n, int d) {
  __mmask16 mask = d - c >= VW ? 0xffff : (1u << (d - c)) - 1;
  __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(t < n ? mask : __mmask16(0), from + t * stride + c));
  __m512i high =
      _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(t + 1 < n ? mask : __mmask16(0), from + (t + 1) * stride + c));
  return (Vec)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

// Columns [BLOCK / 2][up(d)] of n tokens, 0 behind them up to a multiple of 32 tokens.
static void copy_columns(float* to, const Bf16* from, int64_t stride, int n, int d) {
  for (int t = 0; t < (n + 31) / 32 * 32; t += 2)
    for (int c = 0; c < d; c += VW) store(to + t / 2 * up(d) + c, token_pair(from, stride, t, c, n, d));
}

// These columns as rows: [up(d)][BLOCK / 2].
static void copy_turned(float* to, const Bf16* from, int64_t stride, int n, int d) {
  for (int t = 0; t < n; t += 2 * VW)
    for (int c = 0; c < d; c += VW) {
      Vec r[VW];
      for (int i = 0; i < VW; i++) r[i] = token_pair(from, stride, t + 2 * i, c, n, d);
      transpose(r);
      for (int i = 0; i < VW; i++) store(to + (c + i) * (BLOCK / 2) + t / 2, r[i]);
    }
}

// Two vectors that lie next to each other in a row, as 32 bf16.
INLINE void store_row_pair(float* to, Vec first, Vec second) {
  _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
}
