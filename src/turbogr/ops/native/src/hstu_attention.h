// A call of HSTU attention as Python hands it over, and what its threads work in.
//
// T tokens, B rows, H heads; q, k [T, H, dqk], v, y [T, H, dv]
#pragma once
#include <initializer_list>

#include "attention_ahead.h"
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
  Ahead ahead;
};
static thread_local Workspace work;

// Tokens that are fetched ahead with every operand of a tile.
constexpr int FORWARD_AHEAD = 2, BACKWARD_AHEAD = 1;

// For a unit to fetch the parts of rows *first .. *last, which the thread takes after it; null where there are none.
template <class In>
static Ahead* fetch_ahead(const HstuCall& call, const int64_t* first, const int64_t* last,
                        std::initializer_list<const Tensor*> parts) {
  Ahead* ahead = work.ahead.start(call.offsets, first, last);
  for (const Tensor* x : parts) {
    const int64_t d = x == &call.q || x == &call.k || x == &call.dq || x == &call.dk ? call.dqk : call.dv;
    work.ahead.add(x->data, x->token * int64_t(sizeof(In)), ((call.heads - 1) * x->head + d) * int64_t(sizeof(In)));
  }
  return ahead;
}
