// Products of one tile: at most BLOCK queries by BLOCK keys, held as rows of lanes.
//
// One side of a tile's tokens are its rows, the other its lanes: vectors run over the lanes, so no head width is padded.
//   forward   rows = keys, lanes = queries      backward  rows = queries, lanes = keys
// A number format N (attention_numbers.h) says what a 32-bit unit of an operand is, a float or two bf16, and how units
// are multiplied. Sums are always fp32.
//   M, V   rows and vectors of a micro-kernel, M <= ROWS, V <= 2
#pragma once
#include "common.h"
#if defined(__AVX512F__)
#include "attention_avx512.h"
#elif defined(__AVX2__)
#include "attention_avx2.h"
#else
#include "attention_plain.h"
#endif

typedef int32_t VecIU __attribute__((vector_size(VW * 4), aligned(4)));
INLINE VecI load(const int32_t* p) { return *(const VecIU*)p; }
INLINE void store(int32_t* p, VecI x) { *(VecIU*)p = x; }

constexpr int BLOCK = 64;
constexpr int WIDTH = 2;  // vectors of a micro-kernel

// In the bias of a cell that is not seen; its weight and gradients are 0.
constexpr float UNSEEN = -3e38f;
INLINE VecI is_seen(Vec bias) { return bias > splat(-2e38f); }

template <int N>
struct Count {
  static constexpr int value = N;
};

// body(Count<count>{}) for 1 <= count <= MOST.
template <int MOST, class Body>
INLINE void with_count(int count, Body body) {
  if constexpr (MOST == 1) {
    body(Count<1>{});
  } else {
    if (count == MOST)
      body(Count<MOST>{});
    else
      with_count<MOST - 1>(count, body);
  }
}

// body(begin, count) over [0, n) in nearly even parts of at most ROWS; every part but the last a multiple of `step`.
template <class Body>
INLINE void row_groups(int n, int step, Body body) {
  int whole = (n + step - 1) / step, most = ROWS / step, parts = (whole + most - 1) / most;
  for (int part = 0, begin = 0; part < parts; part++) {
    int end = whole * (part + 1) / parts * step;
    end = end < n ? end : n;
    body(begin, end - begin);
    begin = end;
  }
}

// body(first vector, number of vectors as a Count) over vectors [from, to).
template <class Body>
INLINE void vector_groups(int from, int to, Body body) {
  for (; from + WIDTH <= to; from += WIDTH) body(from, Count<WIDTH>{});
  if (from < to) body(from, Count<1>{});
}

// sums[m][n] += sum_k a[m * stride + k] * b[k * ldb + at(n)], at(0) = 0, at(1) = second
template <class N, int M, int V>
INLINE void multiply_rows(Vec (&sums)[M][V], const float* a, int64_t stride, const float* b, int64_t ldb, int second,
                          int depth) {
  const float* every_third[(M + 2) / 3];  // the addresses between are one register away
#pragma GCC unroll 8
  for (int m = 0; m < (M + 2) / 3; m++) every_third[m] = a + 3 * m * stride;
  for (int k = 0; k < depth; k++) {
    Vec right[V];
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) right[n] = load(b + n * second);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      float left = every_third[m / 3][(m % 3) * stride];
#pragma GCC unroll 2
      for (int n = 0; n < V; n++) sums[m][n] = N::madd(sums[m][n], left, right[n]);
    }
    b += ldb;
#pragma GCC unroll 8
    for (int m = 0; m < (M + 2) / 3; m++) every_third[m]++;
  }
}

// sums[m][n] += sum_k a[m + k * stride] * b[k * BLOCK + VW n]
template <class N, int M, int V>
INLINE void multiply_columns(Vec (&sums)[M][V], const float* a, int64_t stride, const float* b, int depth) {
  for (int k = 0; k < depth; k++) {
    Vec right[V];
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) right[n] = load(b + VW * n);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 2
      for (int n = 0; n < V; n++) sums[m][n] = N::madd(sums[m][n], a[m], right[n]);
    }
    b += BLOCK;
    a += stride;
  }
}

// Where rows of an operand lie, in units.
struct Operand {
  const float* data;
  int64_t stride;
};

// Rows [m] of scores: their operand rows, the other side's lanes [depth][BLOCK] and their bias [M][BLOCK].
struct Scores {
  Operand rows;
  const float* lanes;
  const float* bias;
  int depth;
};

template <class N, int M, int V>
INLINE void multiply_scores(Vec (&sums)[M][V], const Scores& x) {
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) sums[m][n] = x.bias ? load(x.bias + m * BLOCK + VW * n) : Vec{};
  multiply_rows<N>(sums, x.rows.data, x.rows.stride, x.lanes, BLOCK, VW, x.depth);
}

// weights = SiLU(scores)
template <class N, bool MASKED, int M, int V>
static void forward_weights(const Scores& x, float* weights) {
  Vec s[M][V];
  multiply_scores<N>(s, x);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) {
      s[m][n] = s[m][n] * quick_sigmoid(s[m][n]);
      if (MASKED) s[m][n] = (Vec)((VecI)s[m][n] & is_seen(load(x.bias + m * BLOCK + VW * n)));
    }
  N::store_stacked(weights, s);
}

// weights = SiLU(scores), slopes [M][BLOCK] = SiLU'(scores) * scale
template <class N, bool MASKED, int M, int V>
static void backward_weights(const Scores& x, float* weights, float* slopes, float scale) {
  Vec s[M][V];
  multiply_scores<N>(s, x);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) {
      Vec gate = quick_sigmoid(s[m][n]);
      Vec weight = s[m][n] * gate, slope = (gate + weight * (1.0f - gate)) * scale;
      if (MASKED) {
        VecI seen = is_seen(load(x.bias + m * BLOCK + VW * n));
        weight = (Vec)((VecI)weight & seen), slope = (Vec)((VecI)slope & seen);
      }
      s[m][n] = weight;
      store(slopes + m * BLOCK + VW * n, slope);
    }
  N::store_stacked(weights, s);
}

// stacked and in_rows = dweights * slopes; summed [M][BLOCK] takes it in (`more`) or begins with it, unless null
template <class N, int M, int V>
static void score_gradients(const Scores& x, const float* slopes, float* stacked, float* in_rows, float* summed,
                            bool more) {
  Vec d[M][V];
  multiply_scores<N>(d, x);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) {
      d[m][n] *= load(slopes + m * BLOCK + VW * n);
      if (summed) {
        float* sum = summed + m * BLOCK + VW * n;
        store(sum, more ? load(sum) + d[m][n] : d[m][n]);
      }
    }
  N::store_stacked(stacked, d);
  N::store_rows(in_rows, d);
}

// c[m * BLOCK + lane] += sum_k a[m + k * stride] * b[k * BLOCK + lane]
template <class N, int M, int V>
static void add_to_lanes(float* c, const float* a, int64_t stride, const float* b, int depth) {
  Vec sums[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) sums[m][n] = load(c + m * BLOCK + VW * n);
  multiply_columns<N>(sums, a, stride, b, depth);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) store(c + m * BLOCK + VW * n, sums[m][n]);
}

// c[m * ldc + at(n)] += sum_k a[m * lda + k] * b[k * ldb + at(n)], at(0) = 0, at(1) = second
// Two vectors may overlap: both hold the same sums where they do. `narrow` > 0: one vector of so many lanes.
template <class N, int M, int V>
static void add_to_rows(float* c, int64_t ldc, const float* a, int lda, const float* b, int ldb, int second, int depth,
                        int narrow) {
  Vec sums[M][V];
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int n = 0; n < V; n++)
      sums[m][n] = narrow ? load_part(c + m * ldc, narrow) : load(c + m * ldc + n * second);
  multiply_rows<N>(sums, a, lda, b, ldb, second, depth);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) {
      if (narrow)
        store_part(c + m * ldc, sums[m][n], narrow);
      else
        store(c + m * ldc + n * second, sums[m][n]);
    }
}
