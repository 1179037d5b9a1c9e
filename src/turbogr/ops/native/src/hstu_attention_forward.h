// HSTU attention forward: blocks of queries at a time, tile by tile over their keys; rows = keys, lanes = queries.
//
//   weights = SiLU(k q^T + bias), y^T += v^T weights     a tile's bias is made once for all heads
//
// A few blocks of queries go over the keys side by side, so that keys and values come from memory once for all of them.
#pragma once
#include "hstu_attention.h"

// What the forward keeps of a block of queries: lanes [H][depth][BLOCK] of q, sums [H][dv][BLOCK] of y^T; and of the
// tile at hand, its bias [rows][BLOCK].
struct QueryBlock {
  float *lanes, *sums, *bias;
  Ahead* ahead;  // or null
  Tile tile;
};

// One head of a tile: what its keys and values add to the sums.
template <class N>
static void forward_tile(const HstuCall& call, const QueryBlock& queries, int64_t h, const Operand& keys,
                         const Operand& values) {
  const int depth = N::depth(int(call.dqk)), dv = int(call.dv);
  const Tile& tile = queries.tile;
  const float* lanes = queries.lanes + h * depth * BLOCK;
  float* weights = work.weights.floats(BLOCK * BLOCK);
  float* sums = queries.sums + h * dv * BLOCK;
  const bool diagonal = tile.kind == Kind::DIAGONAL, masked = tile.kind != Kind::WHOLE;

  row_groups(tile.rows, N::STEP, [&](int r, int rows) {
    vector_groups(diagonal ? r / VW : 0, tile.vectors, [&](int v, auto V) {
      with_count<ROWS>(rows, [&](auto M) {
        Scores x{{keys.data + r * keys.stride, keys.stride}, lanes + v * VW, queries.bias + r * BLOCK + v * VW, depth};
        float* out = weights + r / N::STEP * BLOCK + v * VW;
        if (masked)
          forward_weights<N, true, M.value, V.value>(x, out);
        else
          forward_weights<N, false, M.value, V.value>(x, out);
      });
    });
    Ahead::fetch(queries.ahead, FORWARD_AHEAD);
  });

  auto add = [&](int v, auto V) {
    int seen = diagonal ? std::min(tile.rows, (v + V.value) * VW) : tile.rows;
    row_groups(dv, 1, [&](int c, int columns) {
      with_count<ROWS>(columns, [&](auto M) {
        add_to_lanes<N, M.value, V.value>(sums + c * BLOCK + v * VW, values.data + c, values.stride, weights + v * VW,
                                          N::depth(seen));
      });
      Ahead::fetch(queries.ahead, FORWARD_AHEAD);
    });
  };
  if (!diagonal) return vector_groups(0, tile.vectors, add);
  for (int v = 0; v < tile.vectors; v++) add(v, Count<1>{});
}

// Blocks [first, first + count) of queries of a row, side by side over all their keys.
template <class N>
static void forward_blocks(const HstuCall& call, const Bias& bias, const Row& row, const RowTimes& times, int first,
                           int count, QueryBlock* blocks) {
  typedef typename N::In In;
  const int dqk = int(call.dqk), dv = int(call.dv), depth = N::depth(dqk);
  for (int b = 0; b < count; b++) {
    const int64_t query0 = row.start + (first + b) * BLOCK;
    for (int64_t h = 0; h < call.heads; h++)
      pack_lanes<N>(blocks[b].lanes + h * depth * BLOCK, at<In>(call.q, query0, h), call.q.token,
                    row.tokens_of(first + b), dqk);
    std::memset(blocks[b].sums, 0, size_t(call.heads * dv) * BLOCK * 4);
  }
  for (int key_block = 0; key_block < row.blocks(); key_block++) {
    const int keys = row.tokens_of(key_block);
    const int64_t key0 = row.start + key_block * BLOCK;
    bool any = false;
    for (int b = 0; b < count; b++) {
      const int queries = row.tokens_of(first + b);
      blocks[b].tile = {key_block * BLOCK, keys, (first + b) * BLOCK, (queries + VW - 1) / VW,
                        row.kind(first + b, key_block)};
      if (blocks[b].tile.kind == Kind::NOTHING) continue;
      tile_bias<true>(bias, row, times, blocks[b].tile, queries, blocks[b].bias, nullptr);
      any = true;
    }
    for (int64_t h = 0; any && h < call.heads; h++) {
      Operand k = N::rows(work.rows.floats(0), at<In>(call.k, key0, h), call.k.token, keys, dqk);
      Operand v = N::columns(work.columns.floats(0), at<In>(call.v, key0, h), call.v.token, keys, dv);
      for (int b = 0; b < count; b++)
        if (blocks[b].tile.kind != Kind::NOTHING) forward_tile<N>(call, blocks[b], h, k, v);
    }
  }
}

template <class N>
static void forward_unit(const HstuCall& call, const Bias& bias, const ForwardUnit& unit, Ahead* ahead) {
  typedef typename N::In In;
  const Row row(call.offsets, call.mask, unit.row);
  const int dv = int(call.dv);
  const RowTimes times(bias, row, work.times.ints(2 * size_t(row.length + BLOCK)));
  const size_t lanes = size_t(call.heads * N::depth(int(call.dqk))) * BLOCK, sums = size_t(call.heads * dv) * BLOCK;
  for (Buffer* one : {&work.rows, &work.columns}) one->floats(BLOCK * up(std::max(call.dqk, call.dv)));
  QueryBlock blocks[QUERY_BLOCKS];
  for (size_t b = 0; b < QUERY_BLOCKS; b++) {
    blocks[b].lanes = work.lanes.floats(QUERY_BLOCKS * lanes) + b * lanes;
    blocks[b].sums = work.sums.floats(QUERY_BLOCKS * sums) + b * sums;
    blocks[b].bias = work.bias.floats(QUERY_BLOCKS * BLOCK * BLOCK) + b * BLOCK * BLOCK;
    blocks[b].ahead = ahead;
  }
  for (int first = unit.first; first < unit.last; first += QUERY_BLOCKS) {
    const int count = std::min(QUERY_BLOCKS, unit.last - first);
    forward_blocks<N>(call, bias, row, times, first, count, blocks);
    for (int b = 0; b < count; b++)
      for (int64_t h = 0; h < call.heads; h++)
        unpack_lanes<N>(at<In>(call.y, row.start + (first + b) * BLOCK, h), call.y.token,
                        blocks[b].sums + h * dv * BLOCK, row.tokens_of(first + b), dv, 1.0f / float(call.max_len));
  }
}
