// FuXi's position and time channels forward: a block of queries at a time, tile by tile over its keys; rows = keys,
// lanes = queries.
//
//   y^T += v^T map      a tile's cells are made once for all columns
#pragma once
#include "fuxi_attention.h"

// sums [width][BLOCK] += values^T stacked
template <class N>
static void add_values(const Tile& tile, const Operand& values, int width, const float* stacked, float* sums) {
  const bool diagonal = tile.kind == Kind::DIAGONAL;
  auto add = [&](int v, auto V) {
    int seen = diagonal ? std::min(tile.rows, (v + V.value) * VW) : tile.rows;
    row_groups(width, 1, [&](int c, int columns) {
      with_count<ROWS>(columns, [&](auto M) {
        add_to_lanes<N, M.value, V.value>(sums + c * BLOCK + v * VW, values.data + c, values.stride, stacked + v * VW,
                                          N::depth(seen));
      });
    });
  };
  if (!diagonal) return vector_groups(0, tile.vectors, add);
  for (int v = 0; v < tile.vectors; v++) add(v, Count<1>{});
}

template <class N>
static void forward_unit(const FuxiCall& call, const Maps& maps, const ForwardUnit& unit) {
  typedef typename N::In In;
  const Row row(call.offsets, call.mask, unit.row);
  const RowTimes times(maps.of_time, row, fuxi_work.times.ints(2 * size_t(row.length + BLOCK)));
  const Parts parts(call, {&call.v, &call.y});
  const size_t room = size_t(maps.count() * parts.total) * BLOCK;
  float* sums = fuxi_work.sums.floats(room);
  for (int query_block = unit.first; query_block < unit.last; query_block++) {
    const int i = query_block * BLOCK, queries = row.tokens_of(query_block);
    std::memset(sums, 0, room * 4);
    for (int key_block = 0; key_block < row.blocks(); key_block++) {
      const Tile tile{key_block * BLOCK, row.tokens_of(key_block), i, (queries + VW - 1) / VW,
                      row.kind(query_block, key_block)};
      if (tile.kind == Kind::NOTHING) continue;
      const TileMaps made = tile_maps<N, true>(maps, row, times, tile, queries);
      for (int part = 0; part < parts.count; part++) {
        const int width = parts.columns(part);
        Operand values = N::columns(fuxi_work.columns.floats(BLOCK * size_t(up(width))),
                                    parts.at<In>(call.v, row.start + tile.row0, part), call.v.token, tile.rows, width);
        for (int map = 0; map < made.count; map++)
          add_values<N>(tile, values, width, made.stacked[map],
                        sums + (map * parts.total + parts.first(part)) * BLOCK);
      }
    }
    for (int map = 0; map < maps.count(); map++)
      for (int part = 0; part < parts.count; part++)
        unpack_lanes<N>(parts.at<In>(call.y, row.start + i, part) + map * call.y_channel, call.y.token,
                        sums + (map * parts.total + parts.first(part)) * BLOCK, queries, parts.columns(part), 1.0f);
  }
}
