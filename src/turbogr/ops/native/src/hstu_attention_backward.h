// HSTU attention backward: blocks of keys at a time, tile by tile over their queries; rows = queries, lanes = keys.
//
//   weights = SiLU(q k^T + bias), dscores = (dy v^T) * SiLU'(q k^T + bias)
//   dv^T += dy^T weights, dk^T += q^T dscores, dq += dscores k
//   dbias += dscores, summed over the heads              the tile's bias and buckets are made once for all heads
//
// A few blocks of keys go over the queries side by side, so that q, dy and dq come from memory once for all of them.
#pragma once
#include "hstu_attention.h"

// What the backward keeps of a block of keys, all heads; and of the tile at hand, its bias, buckets and the sums of its
// score gradients over the heads, each [rows][BLOCK].
struct KeyBlock {
  int depth_k, depth_v, ld;  // units of dqk and dv; width of `columns`
  float *k, *v;              // lanes [H][depth][BLOCK]
  float* columns;            // k again [H][depth(BLOCK)][ld]
  float *dk, *dv;            // sums [H][sum_rows(d)][BLOCK]
  float *bias, *cells;
  int32_t* buckets;
  Ahead* ahead;              // or null
  Tile tile;
};

// Vectors of a tile's rows [.., end) that are seen.
INLINE int vectors_seen(const Tile& tile, int end) {
  return tile.kind == Kind::DIAGONAL ? (end - 1) / VW + 1 : tile.vectors;
}

// Rows [r, r + M) of a tile, one head: their weights and the slopes there.
template <class N, int M>
static void weight_rows(const HstuCall& call, const KeyBlock& keys, int64_t h, int r, const Operand& q) {
  const float* lanes = keys.k + h * keys.depth_k * BLOCK;
  const float scale = 1.0f / float(call.max_len);
  vector_groups(0, vectors_seen(keys.tile, r + M), [&](int v, auto V) {
    Scores x{{q.data + r * q.stride, q.stride}, lanes + v * VW, keys.bias + r * BLOCK + v * VW, keys.depth_k};
    float* weights = work.weights.floats(0) + r / N::STEP * BLOCK + v * VW;
    float* slopes = work.slopes.floats(0) + r * BLOCK + v * VW;
    if (keys.tile.kind != Kind::WHOLE)
      backward_weights<N, true, M, V.value>(x, weights, slopes, scale);
    else
      backward_weights<N, false, M, V.value>(x, weights, slopes, scale);
  });
}

// Where the score gradients of a tile lie as rows, BLOCK units of `stacked` or as pairs along the lanes.
template <class N>
INLINE float* gradient_rows() {
  return N::STEP == 1 ? work.dscores.floats(0) : work.dscore_rows.floats(0);
}

template <class N, int M>
static void gradients_of_rows(const KeyBlock& keys, int64_t h, int r, const Operand& dy) {
  const float* lanes = keys.v + h * keys.depth_v * BLOCK;
  vector_groups(0, vectors_seen(keys.tile, r + M), [&](int v, auto V) {
    Scores x{{dy.data + r * dy.stride, dy.stride}, lanes + v * VW, nullptr, keys.depth_v};
    score_gradients<N, M, V.value>(x, work.slopes.floats(0) + r * BLOCK + v * VW,
                                   work.dscores.floats(0) + r / N::STEP * BLOCK + v * VW,
                                   gradient_rows<N>() + (r * BLOCK + v * VW) / N::STEP,
                                   keys.cells + r * BLOCK + v * VW, h > 0);
  });
}

// What they add to dq.
template <class N, int M>
static void add_to_queries(const HstuCall& call, const KeyBlock& keys, int64_t h, int r, float* dq, int64_t stride) {
  const int dqk = int(call.dqk), lda = BLOCK / N::STEP, depth = N::depth(vectors_seen(keys.tile, r + M) * VW);
  const float* columns = keys.columns + h * N::depth(BLOCK) * keys.ld;
  const float* in_rows = gradient_rows<N>() + r * lda;
  if (dqk < VW) return add_to_rows<N, M, 1>(dq, stride, in_rows, lda, columns, keys.ld, 0, depth, dqk);
  // the last vector ends with the width, over the one before it, and in one step with that
  int c = 0, vectors = (dqk + VW - 1) / VW;
  if (vectors % 2) {
    add_to_rows<N, M, 1>(dq, stride, in_rows, lda, columns, keys.ld, 0, depth, 0);
    c = VW;
  }
  for (; c < dqk; c += 2 * VW) {
    int second = std::min(VW, dqk - VW - c);
    add_to_rows<N, M, 2>(dq + c, stride, in_rows, lda, columns + c, keys.ld, second, depth, 0);
  }
}

// sums [d][BLOCK] += operand^T tile, over the tile's rows; the tile is `stacked`.
template <class N>
static void add_columns(const Tile& tile, const Operand& operand, int d, const float* stacked, float* sums,
                        Ahead* ahead) {
  const bool diagonal = tile.kind == Kind::DIAGONAL;
  auto add = [&](int v, auto V) {
    int unseen = diagonal ? v * VW / N::STEP : 0;
    row_groups(d, 1, [&](int c, int columns) {
      with_count<ROWS>(columns, [&](auto M) {
        add_to_lanes<N, M.value, V.value>(sums + c * BLOCK + v * VW, operand.data + c + unseen * operand.stride,
                                          operand.stride, stacked + unseen * BLOCK + v * VW,
                                          N::depth(tile.rows) - unseen);
      });
      Ahead::fetch(ahead, BACKWARD_AHEAD);
    });
  };
  if (!diagonal) return vector_groups(0, tile.vectors, add);
  for (int v = 0; v < tile.vectors; v++) add(v, Count<1>{});
}

// Where the sums of dq go: dq itself, or floats apart where dq holds bf16.
struct QuerySums {
  float* data;  // of the row's first token
  int64_t token, head;
};

// One head of a tile's queries: as rows and as operands that are summed over them.
struct Queries {
  Operand q, dy, q_columns, dy_columns;
};

template <class N>
static void backward_tile(const HstuCall& call, const KeyBlock& keys, int64_t h, const Queries& x, float* dq,
                          int64_t dq_stride) {
  const int dqk = int(call.dqk), dv = int(call.dv);
  // one operand after the other, each small enough for the first-level cache
  auto rows_of = [&](auto body) {
    row_groups(keys.tile.rows, N::STEP, [&](int r, int rows) {
      with_count<ROWS>(rows, [&](auto M) { body(r, M); });
      Ahead::fetch(keys.ahead, BACKWARD_AHEAD);
    });
  };
  rows_of([&](int r, auto M) { weight_rows<N, M.value>(call, keys, h, r, x.q); });
  rows_of([&](int r, auto M) { gradients_of_rows<N, M.value>(keys, h, r, x.dy); });
  rows_of([&](int r, auto M) { add_to_queries<N, M.value>(call, keys, h, r, dq + r * dq_stride, dq_stride); });
  add_columns<N>(keys.tile, x.dy_columns, dv, work.weights.floats(0), keys.dv + h * dv * BLOCK, keys.ahead);
  add_columns<N>(keys.tile, x.q_columns, dqk, work.dscores.floats(0), keys.dk + h * dqk * BLOCK, keys.ahead);
}

// All heads of a block of queries with the blocks of keys.
template <class N>
static void backward_queries(const HstuCall& call, const Row& row, int query_block, const KeyBlock* keys, int count,
                             const QuerySums& dq) {
  typedef typename N::In In;
  const int dqk = int(call.dqk), dv = int(call.dv), queries = row.tokens_of(query_block);
  const int64_t query0 = row.start + query_block * BLOCK;
  for (int64_t h = 0; h < call.heads; h++) {
    const In *q = at<In>(call.q, query0, h), *dy = at<In>(call.dy, query0, h);
    Queries x;
    x.q = N::rows(work.rows.floats(0), q, call.q.token, queries, dqk);
    x.dy = N::rows(work.values.floats(0), dy, call.dy.token, queries, dv);
    x.q_columns = N::columns_too(x.q, work.columns.floats(0), q, call.q.token, queries, dqk);
    x.dy_columns = N::columns_too(x.dy, work.more_columns.floats(0), dy, call.dy.token, queries, dv);
    float* to = dq.data + query_block * BLOCK * dq.token + h * dq.head;
    for (int b = 0; b < count; b++)
      if (keys[b].tile.kind != Kind::NOTHING) backward_tile<N>(call, keys[b], h, x, to, dq.token);
  }
}

// Makes room for everything of a thread's backward, so that the tiles need not ask.
template <class N>
static void make_room(const HstuCall& call, KeyBlock (&blocks)[KEY_BLOCKS], Ahead* ahead = nullptr) {
  const int dqk = int(call.dqk), dv = int(call.dv), ld = up(dqk);
  const size_t heads = size_t(call.heads), tile = BLOCK * BLOCK;
  const size_t k = heads * size_t(N::depth(dqk)) * BLOCK, v = heads * size_t(N::depth(dv)) * BLOCK;
  const size_t columns = heads * size_t(N::depth(BLOCK) * ld), dk = heads * size_t(N::sum_rows(dqk)) * BLOCK;
  const size_t sums = dk + heads * size_t(N::sum_rows(dv)) * BLOCK;
  for (size_t b = 0; b < KEY_BLOCKS; b++) {
    KeyBlock& keys = blocks[b];
    keys.depth_k = N::depth(dqk), keys.depth_v = N::depth(dv), keys.ld = ld, keys.ahead = ahead;
    keys.k = work.lanes.floats(KEY_BLOCKS * (k + v)) + b * (k + v), keys.v = keys.k + k;
    keys.columns = work.key_columns.floats(KEY_BLOCKS * columns) + b * columns;
    keys.dk = work.sums.floats(KEY_BLOCKS * sums) + b * sums, keys.dv = keys.dk + dk;
    keys.bias = work.bias.floats(KEY_BLOCKS * tile) + b * tile;
    keys.cells = work.cells.floats(KEY_BLOCKS * tile) + b * tile;
    keys.buckets = work.buckets.ints(KEY_BLOCKS * tile) + b * tile;
  }
  for (Buffer* one : {&work.weights, &work.slopes, &work.dscores, &work.dscore_rows}) one->floats(tile);
  for (Buffer* one : {&work.rows, &work.dy_rows, &work.values, &work.columns, &work.more_columns})
    one->floats(size_t(BLOCK * std::max(BLOCK, up(std::max(dqk, dv)))));
}

template <class N>
static void pack_keys(const HstuCall& call, int64_t key0, int count, const KeyBlock& keys) {
  typedef typename N::In In;
  const int dqk = int(call.dqk), dv = int(call.dv);
  for (int64_t h = 0; h < call.heads; h++) {
    const In *k = at<In>(call.k, key0, h), *v = at<In>(call.v, key0, h);
    float* columns = keys.columns + h * N::depth(BLOCK) * keys.ld;
    if (N::TILES && count < BLOCK) {  // whole tiles are read
      std::memset(keys.k + h * keys.depth_k * BLOCK, 0, size_t(keys.depth_k * BLOCK) * 4);
      std::memset(keys.v + h * keys.depth_v * BLOCK, 0, size_t(keys.depth_v * BLOCK) * 4);
      std::memset(columns, 0, size_t(N::depth(BLOCK) * keys.ld) * 4);
    }
    pack_lanes<N>(keys.k + h * keys.depth_k * BLOCK, k, call.k.token, count, dqk);
    pack_lanes<N>(keys.v + h * keys.depth_v * BLOCK, v, call.v.token, count, dv);
    N::copied_columns(columns, k, call.k.token, count, dqk);
    // lanes behind the last key hold no gradient, but they are summed
    const int first = N::depth(count), last = N::depth(up(count));
    std::memset(columns + first * keys.ld, 0, size_t((last - first) * keys.ld) * 4);
  }
  std::memset(keys.dk, 0, size_t(call.heads * (N::sum_rows(dqk) + N::sum_rows(dv))) * BLOCK * 4);
}

// Floats that the sums of a row's dq take where dq itself cannot hold them: [blocks * BLOCK][H][sum_rows(dqk)].
template <class N>
static size_t query_sums_size(const HstuCall& call, const Row& row) {
  return N::IN_FLOATS ? 0 : size_t(row.blocks() * BLOCK * call.heads * N::sum_rows(int(call.dqk)));
}

// Of a row whose sums stand at `apart`; fresh: they are set to 0.
template <class N>
static QuerySums query_sums(const HstuCall& call, const Row& row, float* apart, bool fresh) {
  if constexpr (N::IN_FLOATS) {
    for (int64_t t = 0; fresh && t < row.length; t++)
      for (int64_t h = 0; h < call.heads; h++)
        std::memset(at<float>(call.dq, row.start + t, h), 0, size_t(call.dqk) * 4);
    return {at<float>(call.dq, row.start, 0), call.dq.token, call.dq.head};
  } else {
    if (fresh) std::memset(apart, 0, query_sums_size<N>(call, row) * 4);
    const int width = N::sum_rows(int(call.dqk));
    return {apart, call.heads * width, width};
  }
}

template <class N>
static void write_query_sums(const HstuCall& call, const Row& row, const QuerySums& sums) {
  if constexpr (!N::IN_FLOATS) {
    const int dqk = int(call.dqk);
    for (int64_t t = 0; t < row.length; t++)
      for (int64_t h = 0; h < call.heads; h++) {
        const float* from = sums.data + t * sums.token + h * sums.head;
        auto* to = at<typename N::In>(call.dq, row.start + t, h);
        for (int c = 0; c < dqk; c += VW) N::write(to + c, Single::load(from, c, dqk), dqk - c);
      }
  }
}

template <class N>
static void unpack_keys(const HstuCall& call, int64_t key0, int count, const KeyBlock& keys) {
  typedef typename N::In In;
  const int dqk = int(call.dqk), dv = int(call.dv);
  for (int64_t h = 0; h < call.heads; h++) {
    unpack_lanes<N>(at<In>(call.dk, key0, h), call.dk.token, keys.dk + h * N::sum_rows(dqk) * BLOCK, count, dqk,
                    1.0f);
    unpack_lanes<N>(at<In>(call.dv_out, key0, h), call.dv_out.token, keys.dv + h * N::sum_rows(dv) * BLOCK, count, dv,
                    1.0f / float(call.max_len));
  }
}

// dk and dv of the blocks of keys from `first` on, KEY_BLOCKS at most, and what they add to dq and to the tables'
// gradients.
template <class N>
static void backward_keys(const HstuCall& call, const Bias& bias, const Row& row, const RowTimes& times, int first,
                          KeyBlock* blocks, const QuerySums& dq, BiasGradients& gradients, LongRow* shared) {
  const int count = std::min(KEY_BLOCKS, row.blocks() - first), last = first + count - 1;
  for (int b = 0; b < count; b++)
    pack_keys<N>(call, row.start + (first + b) * BLOCK, row.tokens_of(first + b), blocks[b]);
  for (int query_block = 0; query_block < row.blocks(); query_block++) {
    for (int b = 0; b < count; b++) {
      KeyBlock& keys = blocks[b];
      const int lanes = row.tokens_of(first + b);
      keys.tile = {query_block * BLOCK, row.tokens_of(query_block), (first + b) * BLOCK, (lanes + VW - 1) / VW,
                   row.kind(query_block, first + b)};
      if (keys.tile.kind != Kind::NOTHING)
        tile_bias<false>(bias, row, times, keys.tile, lanes, keys.bias, keys.buckets);
    }
    if (shared) shared->wait(first, query_block);
    backward_queries<N>(call, row, query_block, blocks, count, dq);
    if (shared) shared->pass(last, query_block);
    for (int b = 0; b < count; b++)
      if (blocks[b].tile.kind != Kind::NOTHING) gradients.add(row, blocks[b].tile, blocks[b].cells, blocks[b].buckets);
  }
  for (int b = 0; b < count; b++)
    unpack_keys<N>(call, row.start + (first + b) * BLOCK, row.tokens_of(first + b), blocks[b]);
}

template <class N>
static void short_rows(const HstuCall& call, const Bias& bias, const BackwardPlan& plan, const BackwardUnit& unit,
                       Ahead* ahead) {
  KeyBlock blocks[KEY_BLOCKS];
  make_room<N>(call, blocks, ahead);
  const TableSums& sums = plan.sums[unit.sums];
  BiasGradients gradients(bias, sums.length, work.diagonals.floats(BiasGradients::copies_size(sums.length)),
                          work.histogram.floats(BiasGradients::histogram_size(bias)));
  for (size_t n = unit.first; n < unit.last; n++) {
    const Row row(call.offsets, call.mask, plan.order[n]);
    const RowTimes times(bias, row, work.times.ints(2 * size_t(row.length + BLOCK)));
    const QuerySums dq = query_sums<N>(call, row, work.dq.floats(query_sums_size<N>(call, row)), true);
    for (int first = 0; first < row.blocks(); first += KEY_BLOCKS)
      backward_keys<N>(call, bias, row, times, first, blocks, dq, gradients, nullptr);
    write_query_sums<N>(call, row, dq);
    gradients.flush_times(sums, times.most);
  }
  gradients.flush_positions(sums);
}

template <class N>
static void long_row(const HstuCall& call, const Bias& bias, const BackwardPlan& plan, const BackwardUnit& unit) {
  KeyBlock blocks[KEY_BLOCKS];
  make_room<N>(call, blocks);
  const TableSums& sums = plan.sums[unit.sums];
  BiasGradients gradients(bias, sums.length, work.diagonals.floats(BiasGradients::copies_size(sums.length)),
                          work.histogram.floats(BiasGradients::histogram_size(bias)));
  const Row row(call.offsets, call.mask, plan.order[unit.first]);
  const RowTimes times(bias, row, work.times.ints(2 * size_t(row.length + BLOCK)));
  const bool first = unit.key_block == 0, last = unit.key_block + KEY_BLOCKS >= row.blocks();
  const int last_block = std::min(unit.key_block + KEY_BLOCKS, row.blocks()) - 1;
  if (first && !N::IN_FLOATS) unit.shared->make_sums(query_sums_size<N>(call, row));
  unit.shared->wait(unit.key_block, 0);
  const QuerySums dq = query_sums<N>(call, row, unit.shared->sums.get(), first);
  backward_keys<N>(call, bias, row, times, unit.key_block, blocks, dq, gradients, unit.shared);
  unit.shared->wait(unit.key_block, row.blocks());
  gradients.flush_times(sums, times.most);
  gradients.flush_positions(sums);
  if (last) write_query_sums<N>(call, row, dq);
  unit.shared->pass(last_block, row.blocks());
  if (last) unit.shared->sums.reset();
}
