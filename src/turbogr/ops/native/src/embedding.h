// What the embedding kernels share: copies of rows past the cache, prefetching, sums of rows.
//
// n ids or occurrences, U distinct ids, N rows of a table, D width
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "common.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Rows are asked for so many ids before they are needed: about the latency of memory in copies of one row.
static const int64_t AHEAD = 8;

INLINE void prefetch_row(const float* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(row + d);
}

// Store past the cache; p must be aligned to a whole vector.
INLINE void stream(float* p, Vec x) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)x);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)x);
#else
  *(Vec*)p = x;
#endif
}

// Streamed stores become visible to the other threads before what follows.
INLINE void end_of_stream() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Whether rows of so many bytes from `out` on are whole vectors.
INLINE bool streams(const void* out, int64_t bytes) {
  return bytes % sizeof(Vec) == 0 && uintptr_t(out) % sizeof(Vec) == 0;
}

// Columns first .. first + V * VW of `count` rows, summed in the order of `order`; the last vector begins at `last`, so
// that a width which is no multiple of VW overlaps the vector before it. `known` places of `order` may be read.
template <int V>
static void sum_columns(const float* rows, int64_t dim, const int32_t* order, int64_t count, int64_t known,
                        int64_t first, int64_t last, float* out) {
  Vec total[V] = {};
  for (int64_t i = 0; i < count; i++) {
    if (i + AHEAD < known) {
      const float* later = rows + order[i + AHEAD] * dim + first;
      for (int v = 0; v < V; v += (VW < 16 ? 16 / VW : 1)) __builtin_prefetch(later + v * VW);
    }
    const float* row = rows + order[i] * dim;
    for (int v = 0; v < V - 1; v++) total[v] += load(row + first + v * VW);
    total[V - 1] += load(row + last);
  }
  for (int v = 0; v < V - 1; v++) store(out + first + v * VW, total[v]);
  store(out + last, total[V - 1]);
}

// out [D] = the sum of rows[order[0]], rows[order[1]], ... in this order.
static void sum_rows(const float* rows, int64_t dim, const int32_t* order, int64_t count, int64_t known, float* out) {
  if (dim < VW) {
    std::fill(out, out + dim, 0.0f);
    for (int64_t i = 0; i < count; i++)
      for (int64_t d = 0; d < dim; d++) out[d] += rows[order[i] * dim + d];
    return;
  }
  for (int64_t first = 0; first < dim; first += 8 * VW) {
    int64_t vectors = std::min<int64_t>((dim - first + VW - 1) / VW, 8);
    int64_t last = std::min(first + (vectors - 1) * VW, dim - VW);
    switch (vectors) {
      case 1: sum_columns<1>(rows, dim, order, count, known, first, last, out); break;
      case 2: sum_columns<2>(rows, dim, order, count, known, first, last, out); break;
      case 3: sum_columns<3>(rows, dim, order, count, known, first, last, out); break;
      case 4: sum_columns<4>(rows, dim, order, count, known, first, last, out); break;
      case 5: sum_columns<5>(rows, dim, order, count, known, first, last, out); break;
      case 6: sum_columns<6>(rows, dim, order, count, known, first, last, out); break;
      case 7: sum_columns<7>(rows, dim, order, count, known, first, last, out); break;
      default: sum_columns<8>(rows, dim, order, count, known, first, last, out);
    }
  }
}

// The summed gradient of every distinct id, computed when asked for: either its row of values [U, D] as it is, or the
// sum of its occurrences values[order[starts[u]]], ..., values[order[starts[u + 1] - 1]] of values [n, D].
//
// An id with more than PIECE occurrences is summed in pieces, all cores on one hot id. Pieces are cut the same whatever
// the number of threads, so the sums are too.
class Gradients {
 public:
  Gradients(const float* values, int64_t dim, const int32_t* order, const int64_t* starts, int64_t distinct,
            int threads)
      : values_(values), dim_(dim), order_(order), starts_(starts), total_(order ? starts[distinct] : 0) {
    if (!order) return;
    std::vector<int64_t> begins, ends;  // of every piece, in `order`
    for (int64_t u = 0; u < distinct; u++) {
      if (starts[u + 1] - starts[u] <= PIECE) continue;
      long_ids_.push_back(u);
      first_piece_.push_back(int64_t(begins.size()));
      for (int64_t begin = starts[u]; begin < starts[u + 1]; begin += PIECE) {
        begins.push_back(begin);
        ends.push_back(std::min(begin + PIECE, starts[u + 1]));
      }
    }
    int64_t pieces = int64_t(begins.size());
    first_piece_.push_back(pieces);
    for (int64_t piece = 0; piece < pieces; piece++) in_order_.push_back(int32_t(piece));
    partial_.reset(new float[size_t(pieces * dim)]);
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (pieces > 1)
    for (int64_t piece = 0; piece < pieces; piece++)
      sum_rows(values_, dim_, order_ + begins[piece], ends[piece] - begins[piece], total_ - begins[piece],
               partial_.get() + piece * dim_);
  }

  // Row u, perhaps in `scratch` [D].
  const float* row(int64_t u, float* scratch) const {
    if (!order_) return values_ + u * dim_;
    int64_t begin = starts_[u], count = starts_[u + 1] - begin;
    if (count == 1) {
      if (begin + AHEAD < total_) prefetch_row(values_ + order_[begin + AHEAD] * dim_, dim_);
      return values_ + order_[begin] * dim_;
    }
    if (count <= PIECE) {
      sum_rows(values_, dim_, order_ + begin, count, total_ - begin, scratch);
      return scratch;
    }
    int64_t at = std::lower_bound(long_ids_.begin(), long_ids_.end(), u) - long_ids_.begin();
    int64_t pieces = first_piece_[at + 1] - first_piece_[at];
    sum_rows(partial_.get(), dim_, in_order_.data() + first_piece_[at], pieces, pieces, scratch);
    return scratch;
  }

 private:
  static const int64_t PIECE = 512;
  const float* values_;
  int64_t dim_;
  const int32_t* order_;
  const int64_t* starts_;
  int64_t total_;
  std::vector<int64_t> long_ids_, first_piece_;
  std::vector<int32_t> in_order_;
  std::unique_ptr<float[]> partial_;  // [pieces, D]
};
