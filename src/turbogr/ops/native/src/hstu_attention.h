// A call of HSTU attention as Python hands it over, and what its threads work in.
//
// T tokens, B rows, H heads; q, k [T, H, dqk], v, y [T, H, dv]
#pragma once
#include "attention_numbers.h"
#include "attention_work.h"

struct Tensor {
  void* data;
  int64_t token, head;  // strides in elements; the last dimension is dense
};

struct HstuCall {
  int64_t rows, heads, dqk, dv, max_len;
  const int64_t* offsets;
  Mask mask;
  BiasTables tables;
  Tensor q, k, v, y, dy, dq, dk, dv_out;
  float *dposition, *dtime;
  int32_t bf16, threads;
};

template <class In>
INLINE In* at(const Tensor& x, int64_t token, int64_t head) {
  return (In*)x.data + token * x.token + head * x.head;
}

// What a thread works in; a few tiles, whatever the rows' lengths (but for a row's times and diagonals).
struct Workspace {
  Buffer lanes, sums, values, bias, buckets, weights, slopes, dscores, dscore_rows, cells, rows, dy_rows, columns,
      more_columns, times, key_columns, diagonals, histogram, dq;
};
static thread_local Workspace work;
