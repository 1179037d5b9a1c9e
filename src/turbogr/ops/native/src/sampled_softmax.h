// What the phases of the sampled softmax do with rows of vectors: scores of VW rows at once, weighted sums of rows, the
// way back through a norm, and the generator's negatives.
//
// A row has D columns. It lies either padded with zeros to whole vectors (unit vectors that were written here), or in
// place in a table, where its last vector is a part of one. NV is the number of vectors that the compiler unrolls; a row
// has NV + 8 k of them, so that any D runs and D up to 8 VW is straight code.
#pragma once
#include <cmath>
#include <utility>

#include "philox.h"
#include "rows.h"

constexpr int UNROLLED = 8;
using AllLanes = std::make_integer_sequence<int, VW>;

// Lane i: a[i] + a[i ^ H] where bit H of i is 0, b[i] + b[i ^ H] where it is 1.
template <int H, int... I>
INLINE Vec add_lanes(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I & H ? VW + I : I)...) +
         __builtin_shufflevector(a, b, (I & H ? VW + (I ^ H) : I ^ H)...);
}
template <int H>
INLINE Vec add_across(Vec a, Vec b) {
  return add_lanes<H>(a, b, AllLanes{});
}

struct Products {
  Vec with_query, with_itself;
};
template <int H>
INLINE Products add_across(Products a, Products b) {
  return {add_across<H>(a.with_query, b.with_query), add_across<H>(a.with_itself, b.with_itself)};
}

// Lane i: the lanes of part(first + i) added up. Depth first: few vectors live at once.
template <int COUNT, class Part>
INLINE Products sums(const Part& part, int first = 0) {
  if constexpr (COUNT == 1)
    return part(first);
  else
    return add_across<COUNT / 2>(sums<COUNT / 2>(part, first), sums<COUNT / 2>(part, first + COUNT / 2));
}

// Both vectors' lanes added up: the first's in lane 0, the second's in lane 1.
INLINE Vec sum_both(Vec a, Vec b) {
  Vec x = add_across<1>(a, b);
  if constexpr (VW > 2) x = add_across<2>(x, x);
  if constexpr (VW > 4) x = add_across<4>(x, x);
  if constexpr (VW > 8) x = add_across<8>(x, x);
  return x;
}

INLINE float highest(Vec x) {
  float best = x[0];
  for (int i = 1; i < VW; i++) best = x[i] > best ? x[i] : best;
  return best;
}

// Rows [., D] at a stride.
struct Rows {
  const float* first;
  int64_t stride;
  int vectors;  // in a row, the last one with `tail` lanes
  int tail;
  const float* row(int64_t i) const { return first + i * stride; }
};

// Vector n of a row that has NV vectors from here on.
template <int NV, bool PADDED>
INLINE Vec vector_of(const float* row, int n, int tail) {
  return PADDED || n < NV - 1 ? load(row + n * VW) : read(row + n * VW, tail);
}

// Lane i: products of row at[i] with the query (padded) and, of rows in place, with itself.
template <int NV, bool PADDED>
INLINE Products products(const float* query, const Rows& rows, const int32_t* at) {
  int before = rows.vectors - NV;
  return sums<VW>([&](int i) __attribute__((always_inline)) {
    const float* row = rows.row(at[i]);
    Products p{};
    for (int n = 0; n < before; n++) {
      Vec x = load(row + n * VW);
      p.with_query += load(query + n * VW) * x;
      if constexpr (!PADDED) p.with_itself += x * x;
    }
    for (int n = 0; n < NV; n++) {
      Vec x = vector_of<NV, PADDED>(row + before * VW, n, rows.tail);
      p.with_query += load(query + (before + n) * VW) * x;
      if constexpr (!PADDED) p.with_itself += x * x;
    }
    return p;
  });
}

// NV vectors of out = sum_i weight[i] * rows[at[i]], from column `first` on; places and weights are STEP apart. Long sums
// are made of short ones, which keeps their rounding errors small.
template <int NV, bool PADDED, int STEP>
INLINE void sum_columns(const Rows& rows, int first, const int32_t* at, const float* weight, int64_t count, float* out) {
  Vec total[NV] = {};
  for (int64_t begin = 0; begin < count; begin += 256) {
    Vec part[NV] = {};
    int64_t end = begin + 256 < count ? begin + 256 : count;
    for (int64_t i = begin; i < end; i++) {
      const float* row = rows.row(at[i * STEP]) + first;
      for (int n = 0; n < NV; n++) part[n] += weight[i * STEP] * vector_of<NV, PADDED>(row, n, rows.tail);
    }
    for (int n = 0; n < NV; n++) total[n] += part[n];
  }
  for (int n = 0; n < NV; n++) store(out + first + n * VW, total[n]);
}

// out (padded) = sum_i weight[i] * rows[at[i]]
template <int NV, bool PADDED, int STEP = 1>
INLINE void weighted_sum(const Rows& rows, const int32_t* at, const float* weight, int64_t count, float* out) {
  int before = rows.vectors - NV;
  for (int n = 0; n < before; n += UNROLLED) sum_columns<UNROLLED, true, STEP>(rows, n * VW, at, weight, count, out);
  sum_columns<NV, PADDED, STEP>(rows, before * VW, at, weight, count, out);
}

// unit (padded) = x / max(|x|, eps) for a row in place.
INLINE void normalise(const Rows& rows, int64_t i, float eps, float* unit) {
  const float* x = rows.row(i);
  Vec square{};
  auto at = [&](int n) { return read(x + n * VW, n == rows.vectors - 1 ? rows.tail : VW); };
  for (int n = 0; n < rows.vectors; n++) square += at(n) * at(n);
  float norm = std::sqrt(sum_both(square, square)[0]);
  float inverse = 1.0f / (norm > eps ? norm : eps);
  for (int n = 0; n < rows.vectors; n++) store(unit + n * VW, at(n) * inverse);
}

// `scale` times the gradient of x, a row in place, from that of x / max(|x|, eps) (padded).
INLINE void through_norm(const Rows& rows, int64_t i, const float* dunit, float eps, float scale, float* dx) {
  const float* x = rows.row(i);
  Vec square{}, along{};
  auto count = [&](int n) { return n == rows.vectors - 1 ? rows.tail : VW; };
  for (int n = 0; n < rows.vectors; n++) {
    Vec part = read(x + n * VW, count(n));
    square += part * part, along += part * load(dunit + n * VW);
  }
  Vec both = sum_both(square, along);
  float norm = std::sqrt(both[0]);
  float inverse = 1.0f / (norm > eps ? norm : eps);
  float share = norm > eps ? both[1] * inverse * inverse : 0.0f, factor = inverse * scale;
  for (int n = 0; n < rows.vectors; n++)
    write(dx + n * VW, (load(dunit + n * VW) - share * read(x + n * VW, count(n))) * factor, count(n));
}

// The vectors' lanes in turn: half 0 or 1 of a[0], b[0], a[1], b[1], ...
template <int HALF, int... I>
INLINE VecW zip_lanes(VecW a, VecW b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I & 1 ? VW + I / 2 + HALF * VW / 2 : I / 2 + HALF * VW / 2)...);
}
template <int HALF>
INLINE VecW zip(VecW a, VecW b) {
  return zip_lanes<HALF>(a, b, AllLanes{});
}

// The draws 0 .. count-1 of one counter line, as integers below `bound`: the high half of word * bound.
INLINE void draw_below(uint64_t seed, uint32_t word0, uint32_t word1, uint32_t user, uint32_t position, uint32_t bound,
                       int64_t count, int32_t* out) {
  VecW lane;
  for (int i = 0; i < VW; i++) lane[i] = uint32_t(i);
  for (int64_t done = 0; done < count; done += 4 * VW) {
    VecW low, below[4], natural[4];
    VecWords words = philox(seed, word0, word1, VecW{} + user, lane + ((position << 16) | uint32_t(done / 4)));
    for (int j = 0; j < 4; j++) multiply_wide(words.w[j], bound, low, below[j]);
    VecW even0 = zip<0>(below[0], below[2]), odd0 = zip<0>(below[1], below[3]);
    VecW even1 = zip<1>(below[0], below[2]), odd1 = zip<1>(below[1], below[3]);
    natural[0] = zip<0>(even0, odd0), natural[1] = zip<1>(even0, odd0);
    natural[2] = zip<0>(even1, odd1), natural[3] = zip<1>(even1, odd1);
    int64_t wanted = count - done < 4 * VW ? count - done : 4 * VW;
    std::memcpy(out + done, natural, size_t(wanted) * 4);
  }
}
