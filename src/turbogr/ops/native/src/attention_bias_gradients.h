// Gradients of the bias tables: sums of score gradients over diagonals and over time buckets, a tile at a time.
//
// Both are kept in floats while they are hot and emptied into doubles in a fixed order.
//   position  VW copies of the diagonals' sums, row i adds to copy i % VW: its vectors lie aligned, and no row waits
//             for what the row before it stored
//   time      a histogram per lane; a lane adds a run of cells in one bucket up, and the runs that ended are listed
//             before they touch the histogram
#pragma once
#include "attention_bias.h"

INLINE int32_t bits_of(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Where the sums of some rows go: position[length - 1 - d] for distance d, time[bucket].
struct TableSums {
  double* position;
  double* time;
  int length;
};

struct BiasGradients {
  const Bias& bias;
  int buckets;       // of the histogram; the last one is nobody's
  int width;         // of a copy
  int zero;          // where distance 0 stands in copy 0
  float* copies;     // [VW][width]
  float* histogram;  // [buckets][VW]

  static size_t copies_size(int length) { return size_t(VW) * size_t(length + 3 * BLOCK); }
  static size_t histogram_size(const Bias& bias) { return size_t(bias.given.buckets + 2) * VW; }

  // For rows of at most `length` tokens.
  BiasGradients(const Bias& tables, int length, float* copies_memory, float* histogram_memory)
      : bias(tables),
        buckets(int(tables.given.buckets) + 2),
        width((length + VW - 1) / VW * VW + 2 * BLOCK),
        zero(width - BLOCK),
        copies(copies_memory),
        histogram(histogram_memory) {
    std::memset(copies, 0, size_t(width) * VW * 4);
    std::memset(histogram, 0, size_t(buckets) * VW * 4);
  }

  // cells [rows][BLOCK]: score gradients of a tile of the backward, summed over the heads.
  void add(const Row& row, const Tile& tile, const float* cells, const int32_t* of_buckets) {
    if (bias.given.time) add_times(tile, cells, of_buckets);
    if (!bias.given.position) return;
    if (tile.kind == Kind::MIXED)
      add_mixed_positions(row, tile, cells);
    else
      add_positions(tile, cells);
  }

  // Empties the histogram; the buckets of a row go up to `most`.
  void flush_times(const TableSums& sums, int most) {
    if (!bias.given.time) return;
    for (int b = 0; b <= most; b++) {
      sums.time[b] += sum(load(histogram + b * VW));
      store(histogram + b * VW, Vec{});
    }
  }

  void flush_positions(const TableSums& sums) {
    if (!bias.given.position) return;
    for (int y = 0; y < sums.length; y++) {
      const float* at = copies + zero - (sums.length - 1) + y;
      float total = 0;
      for (int c = 0; c < VW; c++) total += at[c * (width + 1)];
      sums.position[y] += total;
    }
  }

 private:
  void add_positions(const Tile& tile, const float* cells) {
    for (int r = 0; r < tile.rows; r++) {
      int i = tile.row0 + r, copy = i % VW, to = tile.kind == Kind::DIAGONAL ? r / VW + 1 : tile.vectors;
      float* sums = copies + copy * width + zero + tile.lane0 - (i - copy);
      for (int v = 0; v < to; v++) store(sums + v * VW, load(sums + v * VW) + load(cells + r * BLOCK + v * VW));
    }
  }

  void add_mixed_positions(const Row& row, const Tile& tile, const float* cells) {
    for (int r = 0; r < tile.rows; r++) {
      int i = std::min(tile.row0 + r, row.history_end);
      if (tile.row0 + r < row.context) continue;
      for (int l = 0; l < tile.vectors * VW; l++) {
        int j = std::min(tile.lane0 + l, row.history_end);
        // cells that are not seen hold 0
        if (tile.lane0 + l >= row.context && i >= j) copies[zero - (i - j)] += cells[r * BLOCK + l];
      }
    }
  }

  void add_times(const Tile& tile, const float* cells, const int32_t* of_buckets) {
    const VecI lanes = iota();
    float run_sums[BLOCK * VW + 2 * VW];
    float run_places[BLOCK * VW + 2 * VW];  // the bits of int32
    for (int v = 0; v < tile.vectors; v++) {
      int r = tile.kind == Kind::DIAGONAL ? v * VW : 0, runs = 0;
      VecI bucket = load(of_buckets + r * BLOCK + v * VW);
      Vec run{};
      for (; r < tile.rows; r++) {
        VecI here = load(of_buckets + r * BLOCK + v * VW);
        unsigned ended = different(here, bucket);
        append(run_sums + runs, run, ended);
        runs += append(run_places + runs, (Vec)(bucket * VW + lanes), ended);
        run = (Vec)((VecI)run & (here == bucket)) + load(cells + r * BLOCK + v * VW);
        bucket = here;
      }
      for (int n = 0; n < runs; n++) histogram[bits_of(run_places[n])] += run_sums[n];
      float last[VW];
      int32_t at[VW];
      store(last, run), store(at, bucket * VW + lanes);
      for (int l = 0; l < VW; l++) histogram[at[l]] += last[l];
    }
  }
};
