// The relative biases of a tile, computed inside it, and the gradients of their tables.
//
// Position: entry p_i - p_j of a table; along a tile's lanes these lie next to each other (backwards in the backward).
// Time: entry bucket(|next_times_i - times_j|). A bucket is guessed by a cheap logarithm, which may be one too low and
// never too high, and mended by one comparison with an integer edge. Rows whose times span 2^31 seconds or more, and
// bucket widths too fine for the guess, look the edges up in 64 bits.
//
// FORWARD: rows = keys, lanes = queries; else rows = queries, lanes = keys.
#pragma once
#include <vector>

#include "attention_rows.h"

struct BiasTables {
  const float* position;  // [max_len] or null
  const float* time;      // [buckets + 1] or null
  const int64_t* times;   // [T]
  const int64_t* next_times;
  const int64_t* edges;  // [buckets] the smallest |dt| of bucket 1, 2, ..
  int64_t buckets;
  double width;
};

// The tables in the form that tiles read, made once per call.
struct Bias {
  BiasTables given;
  std::vector<float> around;    // zeros, the position table, zeros: a tile may read BLOCK entries past an end
  const float* center;          // forward: center[d] is distance d; backward: center[-d]
  std::vector<float> time;      // the time table, long enough for TABLE_PARTS vectors
  std::vector<float> edges;     // edges[b]: the smallest |dt| above bucket b, the bits of an int32
  float slope, shift;           // guess = slope * (bits of the float |dt|) + shift
  bool guesses;

  Bias(const BiasTables& tables, int64_t max_len, bool forward) : given(tables) {
    around.assign(size_t(max_len) + 2 * BLOCK, 0.0f);
    center = around.data() + BLOCK + (forward ? 0 : max_len - 1);
    if (given.position) {
      for (int64_t d = 0; d < max_len; d++) around[size_t(BLOCK + (forward ? d : max_len - 1 - d))] = given.position[d];
    }
    // The bits of a float, seen as an integer, are 2^23 (log2 + 127) to within -.0861 log2: linear between powers of 2.
    double per_doubling = 0.6931471805599453 / given.width;
    slope = float(per_doubling / (1 << 23)), shift = float(-127 * per_doubling - 1e-3);
    guesses = per_doubling * 0.0861 < 0.99;
    if (!given.time) return;
    size_t entries = size_t(given.buckets) + 1, room = std::max(entries, size_t(TABLE_PARTS * VW));
    time.assign(room, 0.0f), edges.assign(room, 0.0f);
    std::copy(given.time, given.time + entries, time.begin());
    for (size_t b = 0; b < room; b++) {
      int32_t edge = b + 1 < entries ? int32_t(std::min<int64_t>(given.edges[b], INT32_MAX)) : INT32_MAX;
      std::memcpy(&edges[b], &edge, sizeof edge);
    }
  }

  // The entry that pairs without a bias count into, behind all others.
  int32_t nowhere() const { return int32_t(given.buckets) + 1; }

  int32_t exact_bucket(int64_t next, int64_t time_j) const {
    uint64_t apart = next > time_j ? uint64_t(next) - uint64_t(time_j) : uint64_t(time_j) - uint64_t(next);
    const uint64_t* first = (const uint64_t*)given.edges;  // edges are positive
    return int32_t(std::upper_bound(first, first + given.buckets, apart) - first);
  }
};

// Times of one row; in 32 bits, relative to their middle, where they fit. Read up to BLOCK past the end.
struct RowTimes {
  const int64_t *own64 = nullptr, *next64 = nullptr;
  int32_t *own = nullptr, *next = nullptr;
  bool narrow = false;
  int32_t most = 0;  // the highest bucket of the row

  // scratch [2 * (length + BLOCK)]
  RowTimes(const Bias& bias, const Row& row, int32_t* scratch) {
    if (!bias.given.time) return;
    own64 = bias.given.times + row.start, next64 = bias.given.next_times + row.start;
    int64_t low = INT64_MAX, high = INT64_MIN;
    for (int i = 0; i < row.length; i++) {
      low = std::min(low, std::min(own64[i], next64[i])), high = std::max(high, std::max(own64[i], next64[i]));
    }
    most = bias.exact_bucket(high, low);
    uint64_t span = uint64_t(high) - uint64_t(low);
    narrow = bias.guesses && span < uint64_t(INT32_MAX);
    if (!narrow) return;
    own = scratch, next = scratch + row.length + BLOCK;
    int64_t middle = low + int64_t(span / 2);
    for (int i = 0; i < row.length; i++) own[i] = int32_t(own64[i] - middle), next[i] = int32_t(next64[i] - middle);
    std::fill(own + row.length, own + row.length + BLOCK, own[row.length - 1]);
    std::fill(next + row.length, next + row.length + BLOCK, next[row.length - 1]);
  }
};

// A table kept in PARTS vectors; 0: in memory.
template <int PARTS>
struct Table {
  Vec parts[PARTS];
  explicit Table(const float* entries) {
    for (int n = 0; n < PARTS; n++) parts[n] = load(entries + VW * n);
  }
  INLINE Vec at(const Table& table, VecI index) { return pick<PARTS>(table.parts, index); }
};
template <>
struct Table<0> {
  const float* entries;
  explicit Table(const float* table) : entries(table) {}
  INLINE Vec at(const Table& table, VecI index) { return gather(table.entries, index); }
};

INLINE VecI iota() {
  VecI x;
  for (int l = 0; l < VW; l++) x[l] = l;
  return x;
}

// One tile: its first row and lane token within the jagged row, how many rows and vectors of lanes, and its kind.
struct Tile {
  int row0, rows, lane0, vectors;
  Kind kind;
};

// Time entries of rows of a tile into bias [rows][BLOCK], their buckets into `buckets` unless null.
template <bool FORWARD, int PARTS>
static void time_bias(const Bias& bias, const RowTimes& times, const Tile& tile, float* out, int32_t* buckets) {
  const Table<PARTS> edges(bias.edges.data()), entries(bias.time.data());
  const int32_t* of_lanes = (FORWARD ? times.next : times.own) + tile.lane0;
  const int32_t* of_rows = (FORWARD ? times.own : times.next) + tile.row0;
  const VecI most = splat(times.most);
  const Vec slope = splat(bias.slope), shift = splat(bias.shift);
  bool diagonal = tile.kind == Kind::DIAGONAL;
  for (int r = 0; r < tile.rows; r++) {
    VecI at = splat(of_rows[r]);
    int from = diagonal && FORWARD ? r / VW : 0, to = diagonal && !FORWARD ? r / VW + 1 : tile.vectors;
    for (int v = from; v < to; v++) {
      VecI apart = load(of_lanes + v * VW) - at;
      apart = apart < 0 ? -apart : apart;
      apart = apart < 1 ? splat(1) : apart;
      VecI bits = (VecI)__builtin_convertvector(apart, Vec);
      VecI guess = __builtin_convertvector(__builtin_convertvector(bits, Vec) * slope + shift, VecI);
      guess = guess < most ? guess : most;
      VecI bucket = guess - (VecI)(apart >= (VecI)Table<PARTS>::at(edges, guess));
      if (buckets) store(buckets + r * BLOCK + v * VW, bucket);
      store(out + r * BLOCK + v * VW, Table<PARTS>::at(entries, bucket));
    }
  }
}

template <bool FORWARD>
static void exact_time_bias(const Bias& bias, const RowTimes& times, const Tile& tile, int lanes, float* out,
                            int32_t* buckets) {
  for (int r = 0; r < tile.rows; r++) {
    for (int l = 0; l < tile.vectors * VW; l++) {
      int row = tile.row0 + r, lane = tile.lane0 + std::min(l, lanes - 1);
      int32_t bucket = FORWARD ? bias.exact_bucket(times.next64[lane], times.own64[row])
                               : bias.exact_bucket(times.next64[row], times.own64[lane]);
      if (buckets) buckets[r * BLOCK + l] = bucket;
      out[r * BLOCK + l] = bias.time[size_t(bucket)];
    }
  }
}

// Adds the position entries and marks what is not seen, by the formula of each cell.
template <bool FORWARD>
static void mixed_bias(const Bias& bias, const Row& row, const Tile& tile, float* out, int32_t* buckets) {
  for (int r = 0; r < tile.rows; r++) {
    VecI rows = splat(tile.row0 + r);
    for (int v = 0; v < tile.vectors; v++) {
      VecI lanes = iota() + (tile.lane0 + v * VW);
      VecI i = FORWARD ? lanes : rows, j = FORWARD ? rows : lanes;
      VecI biased = row.is_biased(i, j), seen = row.sees(i, j);
      Vec x = load(out + r * BLOCK + v * VW);
      if (bias.given.position) {
        VecI steps = row.position(i) - row.position(j);
        steps = steps < row.length ? steps : splat(row.length - 1);  // lanes behind the row are read too
        x += gather(bias.given.position, steps > 0 ? steps : VecI{});
      }
      x = (Vec)((VecI)x & biased);
      store(out + r * BLOCK + v * VW, seen ? x : splat(UNSEEN));
      if (buckets) {
        int32_t* to = buckets + r * BLOCK + v * VW;
        store(to, biased ? load(to) : splat(bias.nowhere()));
      }
    }
  }
}

// Adds the position entries of history; on the diagonal, marks what is not seen.
template <bool FORWARD>
static void history_bias(const Bias& bias, const Tile& tile, float* out) {
  bool diagonal = tile.kind == Kind::DIAGONAL;
  for (int r = 0; r < tile.rows; r++) {
    const float* entries = bias.center + tile.lane0 - (tile.row0 + r);
    int from = diagonal && FORWARD ? r / VW : 0, to = diagonal && !FORWARD ? r / VW + 1 : tile.vectors;
    float* cells = out + r * BLOCK;
    for (int v = from; v < to; v++) store(cells + v * VW, load(cells + v * VW) + load(entries + v * VW));
    if (!diagonal) continue;
    int edge = r / VW;  // the one vector that is seen in part
    VecI lanes = iota() + edge * VW;
    VecI seen = FORWARD ? lanes >= r : lanes <= r;
    store(cells + edge * VW, seen ? load(cells + edge * VW) : splat(UNSEEN));
    for (int v = 0; v < tile.vectors; v++)
      if (v < from || v >= to) store(cells + v * VW, splat(UNSEEN));
  }
}

// bias [rows][BLOCK] of a tile, UNSEEN where a pair is not seen, and its buckets unless null.
template <bool FORWARD>
static void tile_bias(const Bias& bias, const Row& row, const RowTimes& times, const Tile& tile, int lanes, float* out,
                      int32_t* buckets) {
  if (!bias.given.time) {
    std::memset(out, 0, size_t(tile.rows) * BLOCK * 4);
  } else if (!times.narrow) {
    exact_time_bias<FORWARD>(bias, times, tile, lanes, out, buckets);
  } else if constexpr (TABLE_PARTS == 0) {
    time_bias<FORWARD, 0>(bias, times, tile, out, buckets);
  } else {
    if (times.most < 2 * VW)
      time_bias<FORWARD, 2>(bias, times, tile, out, buckets);
    else if (times.most < 4 * VW)
      time_bias<FORWARD, 4>(bias, times, tile, out, buckets);
    else if (times.most < 8 * VW)
      time_bias<FORWARD, 8>(bias, times, tile, out, buckets);
    else
      time_bias<FORWARD, 0>(bias, times, tile, out, buckets);
  }
  if (tile.kind == Kind::MIXED)
    mixed_bias<FORWARD>(bias, row, tile, out, bias.given.time ? buckets : nullptr);
  else
    history_bias<FORWARD>(bias, tile, out);
}
