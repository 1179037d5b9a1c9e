// HSTU attention forward: a block of queries at a time, tile by tile over its keys; rows = keys, lanes = queries.
//
//   weights = SiLU(k q^T + bias), y^T += v^T weights     the tile's bias is made once for all heads
#pragma once
#include "hstu_attention.h"

template <class N>
static void forward_tile(const HstuCall& call, const Row& row, const Tile& tile, int64_t h, const float* bias) {
  typedef typename N::In In;
  const int dqk = int(call.dqk), dv = int(call.dv);
  const int64_t key0 = row.start + tile.row0;
  float* weights = work.weights.floats(BLOCK * BLOCK);
  const float* lanes = work.lanes.floats(0) + h * N::depth(dqk) * BLOCK;
  float* sums = work.sums.floats(0) + h * dv * BLOCK;
  const bool diagonal = tile.kind == Kind::DIAGONAL, masked = tile.kind != Kind::WHOLE;

  Operand keys = N::rows(work.rows.floats(BLOCK * up(dqk)), at<In>(call.k, key0, h), call.k.token, tile.rows, dqk);
  row_groups(tile.rows, N::STEP, [&](int r, int rows) {
    vector_groups(diagonal ? r / VW : 0, tile.vectors, [&](int v, auto V) {
      with_count<ROWS>(rows, [&](auto M) {
        Scores x{{keys.data + r * keys.stride, keys.stride}, lanes + v * VW, bias + r * BLOCK + v * VW, N::depth(dqk)};
        float* out = weights + r / N::STEP * BLOCK + v * VW;
        if (masked)
          forward_weights<N, true, M.value, V.value>(x, out);
        else
          forward_weights<N, false, M.value, V.value>(x, out);
      });
    });
  });

  Operand values =
      N::columns(work.columns.floats(BLOCK * up(dv)), at<In>(call.v, key0, h), call.v.token, tile.rows, dv);
  auto add = [&](int v, auto V) {
    int seen = diagonal ? std::min(tile.rows, (v + V.value) * VW) : tile.rows;
    row_groups(dv, 1, [&](int c, int columns) {
      with_count<ROWS>(columns, [&](auto M) {
        add_to_lanes<N, M.value, V.value>(sums + c * BLOCK + v * VW, values.data + c, values.stride, weights + v * VW,
                                          N::depth(seen));
      });
    });
  };
  if (!diagonal) return vector_groups(0, tile.vectors, add);
  for (int v = 0; v < tile.vectors; v++) add(v, Count<1>{});
}

template <class N>
static void forward_unit(const HstuCall& call, const Bias& bias, const ForwardUnit& unit) {
  typedef typename N::In In;
  const Row row(call.offsets, call.mask, unit.row);
  const int dqk = int(call.dqk), dv = int(call.dv), depth = N::depth(dqk);
  const RowTimes times(bias, row, work.times.ints(2 * size_t(row.length + BLOCK)));
  float* lanes = work.lanes.floats(size_t(call.heads * depth) * BLOCK);
  float* sums = work.sums.floats(size_t(call.heads * dv) * BLOCK);
  float* cells = work.bias.floats(BLOCK * BLOCK);
  for (int query_block = unit.first; query_block < unit.last; query_block++) {
    const int i = query_block * BLOCK, queries = row.tokens_of(query_block);
    for (int64_t h = 0; h < call.heads; h++)
      pack_lanes<N>(lanes + h * depth * BLOCK, at<In>(call.q, row.start + i, h), call.q.token, queries, dqk);
    std::memset(sums, 0, size_t(call.heads * dv) * BLOCK * 4);
    for (int key_block = 0; key_block < row.blocks(); key_block++) {
      const Tile tile{key_block * BLOCK, row.tokens_of(key_block), i, (queries + VW - 1) / VW,
                      row.kind(query_block, key_block)};
      if (tile.kind == Kind::NOTHING) continue;
      tile_bias<true>(bias, row, times, tile, queries, cells, nullptr);
      for (int64_t h = 0; h < call.heads; h++) forward_tile<N>(call, row, tile, h, cells);
    }
    for (int64_t h = 0; h < call.heads; h++)
      unpack_lanes<N>(at<In>(call.y, row.start + i, h), call.y.token, sums + h * dv * BLOCK, queries, dv,
                      1.0f / float(call.max_len));
  }
}
