// FuXi's position and time channels backward: a block of keys at a time, tile by tile over its queries; rows = queries,
// lanes = keys.
//
//   dv^T += dy^T map, added to what the semantic channel left in dv
//   a cell's gradient = dy_i . v_j over all columns, into the position table, the time table or the decay's three sums
//
// A block of keys writes its own dv alone; the blocks of a long row add to the tables one after another.
#pragma once
#include "fuxi_attention.h"

// Sums of a decay: of gate, gate * power and gate * power * log, times the cells' gradients.
struct DecaySums {
  double total[3] = {0, 0, 0};

  void add(const Tile& tile, const float* gradients) {
    const float *gates = fuxi_work.gates.floats(0), *powers = fuxi_work.powers.floats(0);
    const float* logs = fuxi_work.logs.floats(0);
    Vec sums[3] = {};
    for (int r = 0; r < tile.rows; r++) {
      int to = tile.kind == Kind::DIAGONAL ? r / VW + 1 : tile.vectors;
      for (int v = 0; v < to; v++) {
        Vec gradient = load(gradients + r * BLOCK + v * VW);
        sums[0] += gradient * load(gates + r * BLOCK + v * VW);
        sums[1] += gradient * load(powers + r * BLOCK + v * VW);
        sums[2] += gradient * load(logs + r * BLOCK + v * VW);
      }
    }
    for (int n = 0; n < 3; n++) total[n] += sum(sums[n]);
  }
};

// cells [M][BLOCK] += rows . lanes, or begin with it
template <class N, int M, int V>
static void map_gradients(const Scores& x, float* cells) {
  Vec d[M][V];
  multiply_scores<N>(d, x);
#pragma GCC unroll 16
  for (int m = 0; m < M; m++)
#pragma GCC unroll 2
    for (int n = 0; n < V; n++) store(cells + m * BLOCK + VW * n, d[m][n]);
}

// gradients [rows][BLOCK] of the cells of a map, 0 where `marked` cells are not seen; on the diagonal, of no others.
template <class N>
static void tile_gradients(const FuxiCall& call, const Parts& parts, const Tile& tile, int64_t query0, int map,
                           const float* marked, float* gradients) {
  typedef typename N::In In;
  const bool diagonal = tile.kind == Kind::DIAGONAL;
  const float* lanes = fuxi_work.lanes.floats(0);
  for (int part = 0; part < parts.count; part++) {
    const int width = parts.columns(part), depth = N::depth(width);
    const In* dy = parts.at<In>(call.dy, query0, part) + map * call.dy_channel;
    Operand rows = N::rows(fuxi_work.rows.floats(0), dy, call.dy.token, tile.rows, width);
    row_groups(tile.rows, 1, [&](int r, int count) {
      with_count<ROWS>(count, [&](auto M) {
        vector_groups(0, diagonal ? (r + M.value - 1) / VW + 1 : tile.vectors, [&](int v, auto V) {
          float* to = gradients + r * BLOCK + v * VW;
          Scores x{{rows.data + r * rows.stride, rows.stride}, lanes + v * VW, part ? to : nullptr, depth};
          map_gradients<N, M.value, V.value>(x, to);
        });
      });
    });
    lanes += N::depth(parts.width) * BLOCK;
  }
  if (tile.kind == Kind::WHOLE || !marked) return;
  for (int r = 0; r < tile.rows; r++) {
    for (int v = 0, to = diagonal ? r / VW + 1 : tile.vectors; v < to; v++) {
      float* at = gradients + r * BLOCK + v * VW;
      store(at, (Vec)((VecI)load(at) & is_seen(load(marked + r * BLOCK + v * VW))));
    }
  }
}

// sums [width][BLOCK] += dy^T stacked, over the tile's rows
template <class N>
static void add_dy(const Tile& tile, const Operand& dy, int width, const float* stacked, float* sums) {
  const bool diagonal = tile.kind == Kind::DIAGONAL;
  auto add = [&](int v, auto V) {
    int unseen = diagonal ? v * VW / N::STEP : 0;
    row_groups(width, 1, [&](int c, int columns) {
      with_count<ROWS>(columns, [&](auto M) {
        add_to_lanes<N, M.value, V.value>(sums + c * BLOCK + v * VW, dy.data + c + unseen * dy.stride, dy.stride,
                                          stacked + unseen * BLOCK + v * VW, N::depth(tile.rows) - unseen);
      });
    });
  };
  if (!diagonal) return vector_groups(0, tile.vectors, add);
  for (int v = 0; v < tile.vectors; v++) add(v, Count<1>{});
}

INLINE Vec widened(const float* p, int count) { return count >= VW ? load(p) : load_part(p, count); }
INLINE Vec widened(const Bf16* p, int count) { return widen_bf16(p, count); }

// sums [width][BLOCK] are added to n tokens.
template <class N>
static void add_lanes(typename N::In* to, int64_t stride, const float* sums, int n, int width) {
  for (int t = 0; t < n; t += VW)
    for (int c = 0; c < width; c += VW) {
      Vec r[VW];
      for (int i = 0; i < VW; i++) r[i] = c + i < width ? load(sums + (c + i) * BLOCK + t) : Vec{};
      transpose(r);
      for (int i = 0; i < VW && t + i < n; i++) {
        auto* at = to + (t + i) * stride + c;
        N::write(at, r[i] + widened(at, width - c), width - c);
      }
    }
}

// Gradients of the tables of a unit, kept apart by map: their cells are others.
struct MapGradients {
  const Maps& maps;
  BiasGradients position, time;
  DecaySums decay;

  MapGradients(const Maps& given, int length)
      : maps(given),
        position(given.of_position, length, fuxi_work.diagonals.floats(BiasGradients::copies_size(length)),
                 fuxi_work.histograms[0].floats(BiasGradients::histogram_size(given.of_position))),
        time(given.of_time, 0, fuxi_work.diagonals.floats(0),
             fuxi_work.histograms[1].floats(BiasGradients::histogram_size(given.of_time))) {}

  void add(const FuxiCall& call, const Row& row, const Tile& tile, int map, const float* gradients) {
    if (map == 0 && maps.position)
      position.add(row, tile, gradients, nullptr);
    else if (call.decay)
      decay.add(tile, gradients);
    else
      time.add(row, tile, gradients, fuxi_work.buckets.ints(0));
  }

  // A row is done.
  void flush_times(const TableSums& sums, int most) {
    if (maps.decays) {
      for (int n = 0; n < 3; n++) sums.time[n] += decay.total[n];
      decay = DecaySums{};
    } else {
      time.flush_times(sums, most);
    }
  }
  void flush_positions(const TableSums& sums) { position.flush_positions(sums); }
};

// What a block of keys adds to dv and to the tables' gradients.
template <class N>
static void backward_key_block(const FuxiCall& call, const Maps& maps, const Row& row, const RowTimes& times,
                               int key_block, MapGradients& gradients) {
  typedef typename N::In In;
  const int count = row.tokens_of(key_block);
  const int64_t key0 = row.start + key_block * BLOCK;
  const Parts parts(call, {&call.v, &call.dy, &call.dv_out});
  const int ld = N::depth(parts.width) * BLOCK;
  float* sums = fuxi_work.sums.floats(size_t(parts.count * parts.width) * BLOCK);
  float* lanes = fuxi_work.lanes.floats(size_t(parts.count * ld));
  float* cells = fuxi_work.gradients.floats(BLOCK * BLOCK);
  fuxi_work.rows.floats(BLOCK * size_t(up(parts.width)));
  std::memset(sums, 0, size_t(parts.count * parts.width) * BLOCK * 4);
  for (int part = 0; part < parts.count; part++)
    pack_lanes<N>(lanes + part * ld, parts.at<In>(call.v, key0, part), call.v.token, count, parts.columns(part));
  for (int query_block = 0; query_block < row.blocks(); query_block++) {
    const Tile tile{query_block * BLOCK, row.tokens_of(query_block), key_block * BLOCK, (count + VW - 1) / VW,
                    row.kind(query_block, key_block)};
    if (tile.kind == Kind::NOTHING) continue;
    const TileMaps made = tile_maps<N, false>(maps, row, times, tile, count);
    const int64_t query0 = row.start + tile.row0;
    for (int map = 0; map < made.count; map++) {
      for (int part = 0; part < parts.count; part++) {
        const int width = parts.columns(part);
        const In* dy = parts.at<In>(call.dy, query0, part) + map * call.dy_channel;
        Operand columns = N::columns(fuxi_work.columns.floats(BLOCK * size_t(up(width))), dy, call.dy.token, tile.rows, width);
        add_dy<N>(tile, columns, width, made.stacked[map], sums + parts.first(part) * BLOCK);
      }
      const bool marks = !(maps.decays && map == maps.position);
      tile_gradients<N>(call, parts, tile, query0, map, marks ? fuxi_work.cells[map].floats(0) : nullptr, cells);
      gradients.add(call, row, tile, map, cells);
    }
  }
  for (int part = 0; part < parts.count; part++)
    add_lanes<N>(parts.at<In>(call.dv_out, key0, part), call.dv_out.token, sums + parts.first(part) * BLOCK, count,
                 parts.columns(part));
}

template <class N>
static void short_rows(const FuxiCall& call, const Maps& maps, const BackwardPlan& plan, const BackwardUnit& unit) {
  const TableSums& sums = plan.sums[unit.sums];
  MapGradients gradients(maps, sums.length);
  for (size_t n = unit.first; n < unit.last; n++) {
    const Row row(call.offsets, call.mask, plan.order[n]);
    const RowTimes times(maps.of_time, row, fuxi_work.times.ints(2 * size_t(row.length + BLOCK)));
    for (int key_block = 0; key_block < row.blocks(); key_block++)
      backward_key_block<N>(call, maps, row, times, key_block, gradients);
    gradients.flush_times(sums, times.most);
  }
  gradients.flush_positions(sums);
}

template <class N>
static void long_row(const FuxiCall& call, const Maps& maps, const BackwardPlan& plan, const BackwardUnit& unit) {
  const TableSums& sums = plan.sums[unit.sums];
  MapGradients gradients(maps, sums.length);
  const Row row(call.offsets, call.mask, plan.order[unit.first]);
  const RowTimes times(maps.of_time, row, fuxi_work.times.ints(2 * size_t(row.length + BLOCK)));
  backward_key_block<N>(call, maps, row, times, unit.key_block, gradients);
  unit.shared->wait(unit.key_block, row.blocks());
  gradients.flush_times(sums, times.most);
  gradients.flush_positions(sums);
  unit.shared->pass(unit.key_block, row.blocks());
}
