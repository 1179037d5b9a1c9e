// HSTU attention backward: a block of keys at a time, tile by tile over its queries; rows = queries, lanes = keys.
//
//   weights = SiLU(q k^T + bias), dscores = (dy v^T) * SiLU'(q k^T + bias)
//   dv^T += dy^T weights, dk^T += q^T dscores, dq += dscores k
//   dbias += dscores, summed over the heads              the tile's bias and buckets are made once for all heads
#pragma once
#include "hstu_attention.h"

// What the backward keeps of a block of keys, all heads.
struct KeyBlock {
  int depth_k, depth_v, ld;  // units of dqk and dv; width of `columns`
  float *k, *v;              // lanes [H][depth][BLOCK]
  float* columns;            // k again [H][depth(BLOCK)][ld]
  float *dk, *dv;            // sums [H][d][BLOCK]
};

// Rows [r, r + rows) of a tile, one head: their weights and dscores, and what these add to dq.
template <class N, int M>
static void backward_rows(const HstuCall& call, const Tile& tile, const KeyBlock& keys, int64_t h, int r,
                          const Operand& q, const Operand& dy, float* dq, int64_t dq_stride) {
  const bool diagonal = tile.kind == Kind::DIAGONAL, masked = tile.kind != Kind::WHOLE;
  const int to = diagonal ? (r + M - 1) / VW + 1 : tile.vectors, dqk = int(call.dqk);
  const float* lanes_k = keys.k + h * keys.depth_k * BLOCK;
  const float* lanes_v = keys.v + h * keys.depth_v * BLOCK;
  float* weights = work.weights.floats(0) + r / N::STEP * BLOCK;
  float* stacked = work.dscores.floats(0) + r / N::STEP * BLOCK;
  float* in_rows = N::STEP == 1 ? stacked : work.dscore_rows.floats(0);
  float* slopes = work.slopes.floats(0);
  const float scale = 1.0f / float(call.max_len);
  vector_groups(0, to, [&](int v, auto V) {
    Scores x{{q.data + r * q.stride, q.stride}, lanes_k + v * VW, work.bias.floats(0) + r * BLOCK + v * VW, keys.depth_k};
    if (masked)
      backward_weights<N, true, M, V.value>(x, weights + v * VW, slopes + v * VW, scale);
    else
      backward_weights<N, false, M, V.value>(x, weights + v * VW, slopes + v * VW, scale);
  });
  vector_groups(0, to, [&](int v, auto V) {
    Scores x{{dy.data + r * dy.stride, dy.stride}, lanes_v + v * VW, nullptr, keys.depth_v};
    score_gradients<N, M, V.value>(x, slopes + v * VW, stacked + v * VW, in_rows + v * VW / N::STEP,
                                   work.cells.floats(0) + r * BLOCK + v * VW, h > 0);
  });

  const int lda = BLOCK / N::STEP, depth = N::depth(to * VW);
  const float* columns = keys.columns + h * N::depth(BLOCK) * keys.ld;
  if (dqk < VW) return add_to_rows<N, M, 1>(dq, dq_stride, in_rows, lda, columns, keys.ld, 0, depth, dqk);
  // the last vector ends with the width, over the one before it, and in one step with that
  int c = 0, vectors = (dqk + VW - 1) / VW;
  if (vectors % 2) {
    add_to_rows<N, M, 1>(dq, dq_stride, in_rows, lda, columns, keys.ld, 0, depth, 0);
    c = VW;
  }
  for (; c < dqk; c += 2 * VW) {
    int second = std::min(VW, dqk - VW - c);
    add_to_rows<N, M, 2>(dq + c, dq_stride, in_rows, lda, columns + c, keys.ld, second, depth, 0);
  }
}

// sums [d][BLOCK] += operand^T tile, over the tile's rows; the tile is `stacked`.
template <class N>
static void add_columns(const Tile& tile, const Operand& operand, int d, const float* stacked, float* sums) {
  const bool diagonal = tile.kind == Kind::DIAGONAL;
  auto add = [&](int v, auto V) {
    int unseen = diagonal ? v * VW / N::STEP : 0;
    row_groups(d, 1, [&](int c, int columns) {
      with_count<ROWS>(columns, [&](auto M) {
        add_to_lanes<N, M.value, V.value>(sums + c * BLOCK + v * VW, operand.data + c + unseen * operand.stride,
                                          operand.stride, stacked + unseen * BLOCK + v * VW,
                                          N::depth(tile.rows) - unseen);
      });
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

template <class N>
static void backward_tile(const HstuCall& call, const Row& row, const Tile& tile, const KeyBlock& keys,
                          const QuerySums& dq) {
  typedef typename N::In In;
  const int dqk = int(call.dqk), dv = int(call.dv);
  const int64_t query0 = row.start + tile.row0;
  for (int64_t h = 0; h < call.heads; h++) {
    const In *q = at<In>(call.q, query0, h), *dy = at<In>(call.dy, query0, h);
    Operand q_rows = N::rows(work.rows.floats(0), q, call.q.token, tile.rows, dqk);
    Operand dy_rows = N::rows(work.values.floats(0), dy, call.dy.token, tile.rows, dv);
    row_groups(tile.rows, N::STEP, [&](int r, int rows) {
      with_count<ROWS>(rows, [&](auto M) {
        float* to = dq.data + (tile.row0 + r) * dq.token + h * dq.head;
        backward_rows<N, M.value>(call, tile, keys, h, r, q_rows, dy_rows, to, dq.token);
      });
    });
    Operand dy_columns = N::columns(work.columns.floats(0), dy, call.dy.token, tile.rows, dv);
    add_columns<N>(tile, dy_columns, dv, work.weights.floats(0), keys.dv + h * dv * BLOCK);
    Operand q_columns = N::columns(work.columns.floats(0), q, call.q.token, tile.rows, dqk);
    add_columns<N>(tile, q_columns, dqk, work.dscores.floats(0), keys.dk + h * dqk * BLOCK);
  }
}

// Makes room for everything of a thread's backward, so that the tiles need not ask.
template <class N>
static KeyBlock make_room(const HstuCall& call) {
  const int dqk = int(call.dqk), dv = int(call.dv);
  KeyBlock keys{N::depth(dqk), N::depth(dv), up(dqk), nullptr, nullptr, nullptr, nullptr, nullptr};
  const size_t heads = size_t(call.heads), tile = BLOCK * BLOCK;
  keys.k = work.lanes.floats(heads * size_t(keys.depth_k + keys.depth_v) * BLOCK);
  keys.v = keys.k + heads * size_t(keys.depth_k) * BLOCK;
  keys.columns = work.key_columns.floats(heads * BLOCK * size_t(keys.ld));
  keys.dk = work.sums.floats(heads * size_t(dqk + dv) * BLOCK);
  keys.dv = keys.dk + heads * size_t(dqk) * BLOCK;
  for (Buffer* one : {&work.bias, &work.buckets, &work.weights, &work.dscores, &work.cells}) one->floats(tile);
  for (Buffer* one : {&work.slopes, &work.dscore_rows}) one->floats(ROWS * BLOCK);
  for (Buffer* one : {&work.rows, &work.values, &work.columns}) one->floats(BLOCK * up(std::max(dqk, dv)));
  return keys;
}

template <class N>
static void pack_keys(const HstuCall& call, int64_t key0, int count, const KeyBlock& keys) {
  typedef typename N::In In;
  const int dqk = int(call.dqk), dv = int(call.dv);
  for (int64_t h = 0; h < call.heads; h++) {
    const In *k = at<In>(call.k, key0, h), *v = at<In>(call.v, key0, h);
    pack_lanes<N>(keys.k + h * keys.depth_k * BLOCK, k, call.k.token, count, dqk);
    pack_lanes<N>(keys.v + h * keys.depth_v * BLOCK, v, call.v.token, count, dv);
    float* columns = keys.columns + h * N::depth(BLOCK) * keys.ld;
    N::copied_columns(columns, k, call.k.token, count, dqk);
    // lanes behind the last key hold no gradient, but they are summed
    const int first = N::depth(count), last = N::depth(up(count));
    std::memset(columns + first * keys.ld, 0, size_t((last - first) * keys.ld) * 4);
  }
  std::memset(keys.dk, 0, size_t(call.heads * (dqk + dv)) * BLOCK * 4);
}

// Of a row whose sums stand at `apart`; fresh: they are set to 0.
template <class N>
static QuerySums query_sums(const HstuCall& call, const Row& row, float* apart, bool fresh) {
  const size_t width = size_t(call.dqk) * 4;
  if constexpr (N::IN_FLOATS) {
    for (int64_t t = 0; fresh && t < row.length; t++)
      for (int64_t h = 0; h < call.heads; h++) std::memset(at<float>(call.dq, row.start + t, h), 0, width);
    return {at<float>(call.dq, row.start, 0), call.dq.token, call.dq.head};
  } else {
    if (fresh) std::memset(apart, 0, size_t(row.length * call.heads) * width);
    return {apart, call.heads * call.dqk, call.dqk};
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

// dk and dv of a block of keys, and what it adds to dq and to the tables' gradients.
template <class N>
static void backward_key_block(const HstuCall& call, const Bias& bias, const Row& row, const RowTimes& times,
                               int key_block, const KeyBlock& keys, const QuerySums& dq, BiasGradients& gradients,
                               LongRow* shared) {
  typedef typename N::In In;
  const int count = row.tokens_of(key_block), dqk = int(call.dqk), dv = int(call.dv);
  const int64_t key0 = row.start + key_block * BLOCK;
  int32_t* buckets = work.buckets.ints(0);
  pack_keys<N>(call, key0, count, keys);
  for (int query_block = 0; query_block < row.blocks(); query_block++) {
    const Tile tile{query_block * BLOCK, row.tokens_of(query_block), key_block * BLOCK, (count + VW - 1) / VW,
                    row.kind(query_block, key_block)};
    const bool seen = tile.kind != Kind::NOTHING;
    if (seen) tile_bias<false>(bias, row, times, tile, count, work.bias.floats(0), buckets);
    if (shared) shared->wait(key_block, query_block);
    if (seen) backward_tile<N>(call, row, tile, keys, dq);
    if (shared) shared->pass(key_block, query_block);
    if (seen) gradients.add(row, tile, work.cells.floats(0), buckets);
  }
  for (int64_t h = 0; h < call.heads; h++) {
    unpack_lanes<N>(at<In>(call.dk, key0, h), call.dk.token, keys.dk + h * dqk * BLOCK, count, dqk, 1.0f);
    unpack_lanes<N>(at<In>(call.dv_out, key0, h), call.dv_out.token, keys.dv + h * dv * BLOCK, count, dv,
                    1.0f / float(call.max_len));
  }
}

template <class N>
static void short_rows(const HstuCall& call, const Bias& bias, const BackwardPlan& plan, const BackwardUnit& unit) {
  const KeyBlock keys = make_room<N>(call);
  const TableSums& sums = plan.sums[unit.sums];
  BiasGradients gradients(bias, sums.length, work.diagonals.floats(BiasGradients::copies_size(sums.length)),
                          work.histogram.floats(BiasGradients::histogram_size(bias)));
  for (size_t n = unit.first; n < unit.last; n++) {
    const Row row(call.offsets, call.mask, plan.order[n]);
    const RowTimes times(bias, row, work.times.ints(2 * size_t(row.length + BLOCK)));
    const size_t apart = N::IN_FLOATS ? 0 : size_t(row.length * call.heads * call.dqk);
    const QuerySums dq = query_sums<N>(call, row, work.dq.floats(apart), true);
    for (int key_block = 0; key_block < row.blocks(); key_block++)
      backward_key_block<N>(call, bias, row, times, key_block, keys, dq, gradients, nullptr);
    write_query_sums<N>(call, row, dq);
    gradients.flush_times(sums, times.most);
  }
  gradients.flush_positions(sums);
}

template <class N>
static void long_row(const HstuCall& call, const Bias& bias, const BackwardPlan& plan, const BackwardUnit& unit) {
  const KeyBlock keys = make_room<N>(call);
  const TableSums& sums = plan.sums[unit.sums];
  BiasGradients gradients(bias, sums.length, work.diagonals.floats(BiasGradients::copies_size(sums.length)),
                          work.histogram.floats(BiasGradients::histogram_size(bias)));
  const Row row(call.offsets, call.mask, plan.order[unit.first]);
  const RowTimes times(bias, row, work.times.ints(2 * size_t(row.length + BLOCK)));
  const bool first = unit.key_block == 0, last = unit.key_block == row.blocks() - 1;
  if (first && !N::IN_FLOATS) unit.shared->make_sums(size_t(row.length * call.heads * call.dqk));
  unit.shared->wait(unit.key_block, 0);
  const QuerySums dq = query_sums<N>(call, row, unit.shared->sums.get(), first);
  backward_key_block<N>(call, bias, row, times, unit.key_block, keys, dq, gradients, unit.shared);
  unit.shared->wait(unit.key_block, row.blocks());
  gradients.flush_times(sums, times.most);
  gradients.flush_positions(sums);
  if (last) write_query_sums<N>(call, row, dq);
  unit.shared->pass(unit.key_block, row.blocks());
  if (last) unit.shared->sums.reset();
}
