// A call of FuXi's position and time channels as Python hands it over, and the maps of a tile.
//
// A map has no heads: all columns of v, H heads of dv next to each other, are multiplied by the same cells. They are
// worked on in parts of like width; where heads do not lie next to each other, a part is a head.
//
// T tokens, B rows, H heads, C maps; v [T, H, dv], y [T, C, H, dv]
#pragma once
#include "attention_numbers.h"
#include "attention_work.h"

struct Columns {
  void* data;
  int64_t token, head;  // strides in elements; the last dimension is dense
};

struct FuxiCall {
  int64_t rows, heads, dv, max_len;
  const int64_t* offsets;
  Mask mask;
  BiasTables tables;  // time: a table, or alpha, beta, gamma (`decay`), whose buckets and edges stand for nothing
  Columns v, y, dy, dv_out;
  int64_t y_channel, dy_channel;  // strides from one map to the next, position first
  float *dposition, *dtime;
  int32_t decay, bf16, threads;
};

constexpr int PART = 64;  // columns aimed at

struct Parts {
  int count, width, total;
  bool merged;

  Parts(const FuxiCall& call, std::initializer_list<const Columns*> tensors) : total(int(call.heads * call.dv)) {
    merged = true;
    for (const Columns* one : tensors) merged = merged && (one->head == call.dv || call.heads == 1);
    int aimed = (total + PART - 1) / PART;
    width = merged ? up((total + aimed - 1) / aimed) : int(call.dv);
    count = merged ? (total + width - 1) / width : int(call.heads);
  }
  int columns(int part) const { return merged ? std::min(width, total - part * width) : width; }
  template <class In>
  In* at(const Columns& x, int64_t token, int part) const {
    return (In*)x.data + token * x.token + part * (merged ? width : x.head);
  }
  int first(int part) const { return part * width; }
};

// ln(x) of a normal number, relative error below 2e-7.
INLINE Vec logarithm(Vec x) {
  VecI bits = (VecI)x, whole = (bits - 0x3f3504f3) >> 23;
  Vec e = __builtin_convertvector(whole, Vec), f = (Vec)(bits - (whole << 23)) - 1.0f, z = f * f;
  Vec p = splat(7.0376836292e-2f);
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  return e * 0.693359375f + (f + (f * z * p - e * 2.12194440e-4f - 0.5f * z));
}

// alpha * gamma ** (T ** beta), and what its gradients are made of.
struct Decay {
  float alpha = 0, beta = 0, log_gamma = 0;

  explicit Decay(const float* given) {
    // logl: a call of log would bind to glibc 2.29, which some systems that torch still runs on have not
    if (given) alpha = given[0], beta = given[1], log_gamma = float(__builtin_logl(given[2]));
  }

  struct Cell {
    Vec gate, power, log;  // gamma ** power, T ** beta (0 where T is 0), ln T
  };
  INLINE Cell cell(const Decay& decay, Vec seconds) {
    VecI apart = seconds > splat(0.0f);
    Vec log = logarithm(apart ? seconds : splat(1.0f)), exponent = log * decay.beta;
    exponent = exponent < splat(40.0f) ? exponent : splat(40.0f);
    Vec power = (Vec)((VecI)exp(exponent) & apart), x = power * decay.log_gamma;
    return {(Vec)((VecI)exp(x) & (x > splat(-87.0f))), power, log};
  }
};

// The maps of a call in the form that tiles read, made once per call.
struct Maps {
  bool position, time;
  Bias of_position, of_time;  // each knows its own table alone
  bool decays;
  Decay decay;

  Maps(const FuxiCall& call, bool forward)
      : position(call.tables.position),
        time(call.tables.time),
        of_position(only(call.tables, true), call.max_len, forward),
        of_time(only(call.tables, false), call.max_len, forward),
        decays(call.decay),
        decay(call.decay ? call.tables.time : nullptr) {}

  int count() const { return position + time; }

 private:
  static BiasTables only(BiasTables tables, bool position) {
    (position ? tables.time : tables.position) = nullptr;
    return tables;
  }
};

// What a thread works in: a few tiles and the columns of a block of tokens.
struct FuxiWorkspace {
  Buffer sums, lanes, rows, columns, times, buckets, diagonals, histograms[2];
  Buffer cells[2], stacked[2], gradients, gates, powers, logs;
};
static thread_local FuxiWorkspace fuxi_work;

// |dt| in seconds of the cells of a tile's row, from lane vector v on.
template <bool FORWARD>
INLINE Vec seconds_apart(const RowTimes& times, const Tile& tile, int r, int v, int lanes) {
  int row = tile.row0 + r, lane0 = tile.lane0 + v * VW;
  if (times.narrow) {
    VecI apart = load((FORWARD ? times.next : times.own) + lane0) - (FORWARD ? times.own : times.next)[row];
    return __builtin_convertvector(apart < 0 ? -apart : apart, Vec);
  }
  Vec seconds;
  for (int l = 0; l < VW; l++) {
    int lane = std::min(lane0 + l, tile.lane0 + lanes - 1);
    int64_t next = times.next64[FORWARD ? lane : row], own = times.own64[FORWARD ? row : lane];
    seconds[l] = float(next > own ? uint64_t(next) - uint64_t(own) : uint64_t(own) - uint64_t(next));
  }
  return seconds;
}

// cells [rows][BLOCK] of the decay, 0 where a pair is not seen; the backward keeps gate, gate * power and that * log.
template <bool FORWARD>
static void decay_cells(const Maps& maps, const Row& row, const RowTimes& times, const Tile& tile, int lanes,
                        float* cells) {
  float *gates = nullptr, *powers = nullptr, *logs = nullptr;
  if (!FORWARD) {
    gates = fuxi_work.gates.floats(BLOCK * BLOCK);
    powers = fuxi_work.powers.floats(BLOCK * BLOCK), logs = fuxi_work.logs.floats(BLOCK * BLOCK);
  }
  for (int r = 0; r < tile.rows; r++) {
    for (int v = 0; v < tile.vectors; v++) {
      const int at = r * BLOCK + v * VW;
      Decay::Cell x = Decay::cell(maps.decay, seconds_apart<FORWARD>(times, tile, r, v, lanes));
      if (tile.kind != Kind::WHOLE) {
        VecI of_rows = splat(tile.row0 + r), of_lanes = iota() + (tile.lane0 + v * VW);
        VecI i = FORWARD ? of_lanes : of_rows, j = FORWARD ? of_rows : of_lanes;
        x.gate = (Vec)((VecI)x.gate & row.sees(i, j) & row.is_biased(i, j));
      }
      store(cells + at, x.gate * maps.decay.alpha);
      if (FORWARD) continue;
      store(gates + at, x.gate);
      store(powers + at, x.gate * x.power);
      store(logs + at, x.gate * x.power * x.log);
    }
  }
}

// cells as the products read them, 0 where a pair is not seen; they themselves where that is what they are.
template <class N>
static const float* stack(const Tile& tile, const float* cells, bool marked, float* stacked) {
  if (N::STEP == 1 && !marked) return cells;
  for (int r = 0; r < tile.rows; r += 2) {
    with_count<2>(std::min(2, tile.rows - r), [&](auto M) {
      for (int v = 0; v < tile.vectors; v++) {
        Vec x[M.value][1];
        for (int m = 0; m < M.value; m++) {
          Vec cell = load(cells + (r + m) * BLOCK + v * VW);
          x[m][0] = marked ? (Vec)((VecI)cell & is_seen(cell)) : cell;
        }
        N::store_stacked(stacked + r / N::STEP * BLOCK + v * VW, x);
      }
    });
  }
  return stacked;
}

// The cells of every map of a tile; the time map's buckets, or what a decay's gradients are made of, for a backward.
struct TileMaps {
  const float* stacked[2];
  int count = 0;
};

template <class N, bool FORWARD>
static TileMaps tile_maps(const Maps& maps, const Row& row, const RowTimes& times, const Tile& tile, int lanes) {
  TileMaps made;
  const size_t room = BLOCK * BLOCK;
  auto add = [&](auto fill, bool marks) {
    float* cells = fuxi_work.cells[made.count].floats(room);
    fill(cells);
    made.stacked[made.count] =
        stack<N>(tile, cells, marks && tile.kind != Kind::WHOLE, fuxi_work.stacked[made.count].floats(room));
    made.count++;
  };
  if (maps.position)
    add([&](float* to) { tile_bias<FORWARD>(maps.of_position, row, times, tile, lanes, to, nullptr); }, true);
  if (maps.time && !maps.decays) {
    int32_t* buckets = FORWARD ? nullptr : fuxi_work.buckets.ints(room);
    add([&](float* to) { tile_bias<FORWARD>(maps.of_time, row, times, tile, lanes, to, buckets); }, true);
  } else if (maps.time) {
    add([&](float* to) { decay_cells<FORWARD>(maps, row, times, tile, lanes, to); }, false);
  }
  return made;
}
