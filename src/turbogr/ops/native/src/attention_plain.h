// What the attention tiles need of an instruction set, in vector extensions alone (NEON), and what each function does.
#pragma once

// Rows of a micro-kernel, whose sums are ROWS x 2 vectors: as many as the registers hold.
constexpr int ROWS = 8;
// How many vectors of a table `pick` can choose from in registers; 0: tables stay in memory.
constexpr int TABLE_PARTS = 0;

// The first `count` lanes, the others 0; count < VW. Nothing behind them is touched.
INLINE Vec load_part(const float* p, int count) { return load_first(p, count); }
INLINE void store_part(float* p, Vec x, int count) { store_first(p, x, count); }

// 1 / (1 + exp(-x)), relative error below 5e-7; a NaN stays one, somewhere in x * quick_sigmoid(x).
INLINE Vec quick_sigmoid(Vec x) { return sigmoid(x); }

// Bit l is set where lane l differs.
INLINE unsigned different(VecI a, VecI b) {
  unsigned bits = 0;
  for (int l = 0; l < VW; l++) bits |= unsigned(a[l] != b[l]) << l;
  return bits;
}

// The lanes whose bits are set, one after the other; up to VW numbers behind them may be overwritten. Answers how many.
INLINE int append(float* to, Vec x, unsigned lanes) {
  int count = 0;
  for (; lanes; lanes &= lanes - 1) to[count++] = x[__builtin_ctz(lanes)];
  return count;
}

INLINE Vec gather(const float* table, VecI index) {
  Vec x;
  for (int l = 0; l < VW; l++) x[l] = table[index[l]];
  return x;
}

// Entry `index` of a table held in PARTS vectors.
template <int PARTS>
INLINE Vec pick(const Vec*, VecI) {
  return Vec{};  // never taken: TABLE_PARTS is 0
}

// r[i][l] <-> r[l][i]
INLINE void transpose(Vec (&r)[VW]) {
  for (int i = 0; i < VW; i++)
    for (int l = i + 1; l < VW; l++) {
      float x = r[i][l];
      r[i][l] = r[l][i];
      r[l][i] = x;
    }
}
