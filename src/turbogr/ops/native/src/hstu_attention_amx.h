// HSTU attention in bf16 on AMX, a tile's rows = queries, lanes = keys, forward and backward.
//
//   weights = SiLU(q k^T + bias), y += weights v
//   dscores = (dy v^T) * SiLU'(q k^T + bias), dq += dscores k, dv^T += dy^T weights, dk^T += q^T dscores
//
// A tile is worked on in strips of 16 rows and widths of 32 lanes; what of these is not seen has UNSEEN in its bias.
#pragma once
#include "attention_amx.h"
#include "hstu_attention.h"

INLINE int to_32(int n) { return (n + 31) / 32 * 32; }

// Lanes of rows [r, r + 16) that must be computed.
INLINE int strip_width(const Tile& tile, int r) {
  return tile.kind == Kind::DIAGONAL ? std::min(to_32(r + 16), to_32(tile.vectors * VW)) : to_32(tile.vectors * VW);
}

// Marks what a tile lacks to whole strips and widths.
INLINE void mark_edges(const Tile& tile, float* bias) {
  for (int r = tile.rows; r < to_32(tile.rows); r++)
    for (int v = 0; v < BLOCK / VW; v++) store(bias + r * BLOCK + v * VW, splat(UNSEEN));
  if (tile.vectors % 2 == 0) return;
  for (int r = 0; r < tile.rows; r++) store(bias + r * BLOCK + tile.vectors * VW, splat(UNSEEN));
}

INLINE Vec if_seen(Vec x, const float* bias) { return (Vec)((VecI)x & is_seen(load(bias))); }

// What a unit of the forward keeps of a block of queries, all heads: rows of q [H][BLOCK][depth], y [H][BLOCK][up(dv)].
struct QueryRows {
  float *q, *y, *bias;
  Tile tile;
};

static void forward_tiles(const HstuCall& call, const QueryRows& queries, int64_t h, const float* k_lanes,
                          const float* v_columns) {
  const Tile& tile = queries.tile;
  const int depth = HalfTiles::depth(int(call.dqk)), ldv = up(call.dv);
  const float* q = queries.q + h * BLOCK * depth;
  float* y = queries.y + h * BLOCK * ldv;
  float *scores = work.slopes.floats(0), *weights = work.weights.floats(0);
  const bool masked = tile.kind != Kind::WHOLE || tile.vectors % 2;
  for (int r = 0; r < tile.rows; r += 16) {
    const int width = strip_width(tile, r);
    const float* bias = queries.bias + r * BLOCK;
    multiply_strips(scores, bias, BLOCK, q + r * depth, depth, k_lanes, BLOCK, depth, width);
    for (int m = 0; m < 16; m++)
      for (int l = 0; l < width; l += 2 * VW) {
        Vec s = load(scores + m * BLOCK + l), t = load(scores + m * BLOCK + l + VW);
        s *= quick_sigmoid(s), t *= quick_sigmoid(t);
        if (masked) s = if_seen(s, bias + m * BLOCK + l), t = if_seen(t, bias + m * BLOCK + l + VW);
        store_row_pair(weights + m * (BLOCK / 2) + l / 2, s, t);
      }
    multiply_strips(y + r * ldv, y + r * ldv, ldv, weights, BLOCK / 2, v_columns, ldv, width / 2, ldv);
  }
}

// Blocks [first, first + count) of queries of a row, side by side over all their keys.
static void forward_blocks(const HstuCall& call, const Bias& bias, const Row& row, const RowTimes& times, int first,
                           int count, QueryRows* blocks) {
  const int dqk = int(call.dqk), dv = int(call.dv), depth = HalfTiles::depth(dqk);
  float *k_lanes = work.lanes.floats(0), *v_columns = work.columns.floats(0);
  for (int b = 0; b < count; b++) {
    const int64_t query0 = row.start + (first + b) * BLOCK;
    for (int64_t h = 0; h < call.heads; h++)
      copy_rows(blocks[b].q + h * BLOCK * depth, at<Bf16>(call.q, query0, h), call.q.token,
                row.tokens_of(first + b), dqk);
    std::memset(blocks[b].y, 0, size_t(call.heads * BLOCK * up(dv)) * 4);
  }
  for (int key_block = 0; key_block < row.blocks(); key_block++) {
    const int keys = row.tokens_of(key_block);
    const int64_t key0 = row.start + key_block * BLOCK;
    bool any = false;
    for (int b = 0; b < count; b++) {
      Tile& tile = blocks[b].tile;
      tile = {(first + b) * BLOCK, row.tokens_of(first + b), key_block * BLOCK, (keys + VW - 1) / VW,
              row.kind(first + b, key_block)};
      if (tile.kind == Kind::NOTHING) continue;
      tile_bias<false>(bias, row, times, tile, keys, blocks[b].bias, nullptr);
      mark_edges(tile, blocks[b].bias);
      any = true;
    }
    for (int64_t h = 0; any && h < call.heads; h++) {
      if (keys < BLOCK) std::memset(k_lanes, 0, size_t(depth) * BLOCK * 4);
      pack_lanes<HalfTiles>(k_lanes, at<Bf16>(call.k, key0, h), call.k.token, keys, dqk);
      copy_columns(v_columns, at<Bf16>(call.v, key0, h), call.v.token, keys, dv);
      for (int b = 0; b < count; b++)
        if (blocks[b].tile.kind != Kind::NOTHING) forward_tiles(call, blocks[b], h, k_lanes, v_columns);
    }
  }
}

template <>
void forward_unit<HalfTiles>(const HstuCall& call, const Bias& bias, const ForwardUnit& unit, Ahead*) {
  const Row row(call.offsets, call.mask, unit.row);
  const int dv = int(call.dv), depth = HalfTiles::depth(int(call.dqk)), ldv = up(dv);
  const RowTimes times(bias, row, work.times.ints(2 * size_t(row.length + BLOCK)));
  const size_t q = size_t(call.heads * BLOCK * depth), y = size_t(call.heads * BLOCK * ldv), tile = BLOCK * BLOCK;
  work.lanes.floats(size_t(depth) * BLOCK), work.columns.floats(size_t(BLOCK / 2 * ldv));
  for (Buffer* one : {&work.slopes, &work.weights}) one->floats(tile);
  QueryRows blocks[QUERY_BLOCKS];
  for (size_t b = 0; b < QUERY_BLOCKS; b++) {
    blocks[b].q = work.rows.floats(QUERY_BLOCKS * q) + b * q;
    blocks[b].y = work.sums.floats(QUERY_BLOCKS * y) + b * y;
    blocks[b].bias = work.bias.floats(QUERY_BLOCKS * tile) + b * tile;
  }
  const float scale = 1.0f / float(call.max_len);
  for (int first = unit.first; first < unit.last; first += QUERY_BLOCKS) {
    const int count = std::min(QUERY_BLOCKS, unit.last - first);
    forward_blocks(call, bias, row, times, first, count, blocks);
    for (int b = 0; b < count; b++)
      for (int t = 0; t < row.tokens_of(first + b); t++)
        for (int64_t h = 0; h < call.heads; h++) {
          const float* from = blocks[b].y + (h * BLOCK + t) * ldv;
          Bf16* to = at<Bf16>(call.y, row.start + (first + b) * BLOCK + t, h);
          for (int c = 0; c < dv; c += VW) HalfTiles::write(to + c, load(from + c) * scale, dv - c);
        }
  }
}

// Weights and slopes of a tile, one head; the weights as pairs of rows.
static void weights_of_tile(const HstuCall& call, const KeyBlock& keys, int64_t h, const Operand& q) {
  const float scale = 1.0f / float(call.max_len);
  const bool masked = keys.tile.kind != Kind::WHOLE || keys.tile.vectors % 2 || keys.tile.rows % 32;
  for (int r = 0; r < to_32(keys.tile.rows); r += 16) {
    const int width = strip_width(keys.tile, r);
    const float* bias = keys.bias + r * BLOCK;
    float* slopes = work.slopes.floats(0) + r * BLOCK;
    multiply_strips(slopes, bias, BLOCK, q.data + r * q.stride, q.stride, keys.k + h * keys.depth_k * BLOCK, BLOCK,
                    keys.depth_k, width);
    for (int m = 0; m < 16; m += 2)
      for (int l = 0; l < width; l += VW) {
        Vec weight[2];
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
          float* cell = slopes + (m + n) * BLOCK + l;
          Vec s = load(cell), gate = quick_sigmoid(s);
          weight[n] = s * gate;
          Vec slope = (gate + weight[n] * (1.0f - gate)) * scale;
          if (masked) {
            const float* at = bias + (m + n) * BLOCK + l;
            weight[n] = if_seen(weight[n], at), slope = if_seen(slope, at);
          }
          store(cell, slope);
        }
        store(work.weights.floats(0) + (r + m) / 2 * BLOCK + l, HalfTiles::pair(weight[0], weight[1]));
      }
  }
}

// Score gradients of a tile, one head: as pairs of rows, as pairs of lanes, and summed over the heads.
static void gradients_of_tile(const KeyBlock& keys, int64_t h, const Operand& dy) {
  float* products = work.values.floats(0);
  for (int r = 0; r < to_32(keys.tile.rows); r += 16) {
    const int width = strip_width(keys.tile, r);
    const float* slopes = work.slopes.floats(0) + r * BLOCK;
    multiply_strips(products, nullptr, BLOCK, dy.data + r * dy.stride, dy.stride, keys.v + h * keys.depth_v * BLOCK,
                    BLOCK, keys.depth_v, width);
    for (int m = 0; m < 16; m += 2)
      for (int l = 0; l < width; l += 2 * VW) {
        Vec d[2][2];
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
#pragma GCC unroll 2
          for (int w = 0; w < 2; w++) {
            const int cell = (m + n) * BLOCK + l + w * VW;
            d[n][w] = load(products + cell) * load(slopes + cell);
            float* sum = keys.cells + r * BLOCK + cell;
            store(sum, h > 0 ? load(sum) + d[n][w] : d[n][w]);
          }
          store_row_pair(work.dscore_rows.floats(0) + (r + m + n) * (BLOCK / 2) + l / 2, d[n][0], d[n][1]);
        }
        float* stacked = work.dscores.floats(0) + (r + m) / 2 * BLOCK + l;
        store(stacked, HalfTiles::pair(d[0][0], d[1][0]));
        store(stacked + VW, HalfTiles::pair(d[0][1], d[1][1]));
      }
  }
}

// sums [up(d)][BLOCK] += turned stacked: `turned` [up(d)][BLOCK / 2] are the tile's queries, all its rows are summed.
INLINE void add_turned(const Tile& tile, const float* turned, int d, const float* stacked, float* sums) {
  const int width = to_32(tile.vectors * VW), depth = to_32(tile.rows) / 2;
  for (int c = 0; c < d; c += 16) {
    float* to = sums + c * BLOCK;
    const float* a = turned + c * (BLOCK / 2);
    if (tile.kind != Kind::DIAGONAL) {
      multiply_strips(to, to, BLOCK, a, BLOCK / 2, stacked, BLOCK, depth, width);
      continue;
    }
    for (int l = 0; l < width; l += 32)
      multiply_strips(to + l, to + l, BLOCK, a + l / 2, BLOCK / 2, stacked + l / 2 * BLOCK + l, BLOCK, depth - l / 2,
                      32);
  }
}

// All heads of a block of queries with the blocks of keys.
template <>
void backward_queries<HalfTiles>(const HstuCall& call, const Row& row, int query_block, const KeyBlock* keys, int count,
                                 const QuerySums& dq) {
  const int dqk = int(call.dqk), dv = int(call.dv), queries = row.tokens_of(query_block);
  const int64_t query0 = row.start + query_block * BLOCK;
  const Operand q{work.rows.floats(0), HalfTiles::depth(dqk)};
  float *q_turned = work.columns.floats(0), *dy_turned = work.more_columns.floats(0);
  const Operand dy{work.dy_rows.floats(0), HalfTiles::depth(dv)};
  for (int64_t h = 0; h < call.heads; h++) {
    const Bf16 *from_q = at<Bf16>(call.q, query0, h), *from_dy = at<Bf16>(call.dy, query0, h);
    copy_rows(work.rows.floats(0), from_q, call.q.token, queries, dqk);
    copy_rows(work.dy_rows.floats(0), from_dy, call.dy.token, queries, dv);
    copy_turned(q_turned, from_q, call.q.token, queries, dqk);
    copy_turned(dy_turned, from_dy, call.dy.token, queries, dv);
    float* to = dq.data + query_block * BLOCK * dq.token + h * dq.head;
    for (int b = 0; b < count; b++) {
      const Tile& tile = keys[b].tile;
      if (tile.kind == Kind::NOTHING) continue;
      if (h == 0) mark_edges(tile, keys[b].bias);
      weights_of_tile(call, keys[b], h, q);
      gradients_of_tile(keys[b], h, dy);
      const float* columns = keys[b].columns + h * (BLOCK / 2) * keys[b].ld;
      for (int r = 0; r < tile.rows; r += 16)
        multiply_strips(to + r * dq.token, to + r * dq.token, dq.token, work.dscore_rows.floats(0) + r * (BLOCK / 2),
                        BLOCK / 2, columns, keys[b].ld, strip_width(tile, r) / 2, keys[b].ld);
      add_turned(tile, dy_turned, dv, work.weights.floats(0), keys[b].dv + h * HalfTiles::sum_rows(dv) * BLOCK);
      add_turned(tile, q_turned, dqk, work.dscores.floats(0), keys[b].dk + h * HalfTiles::sum_rows(dqk) * BLOCK);
    }
  }
}
