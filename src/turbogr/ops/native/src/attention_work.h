// How attention's work is cut and handed to threads: the same pieces for any number of threads, added in a fixed order.
//
// Forward: a unit is a few query blocks of one row; units share nothing.
// Backward: a unit is some short rows, or a few key blocks of a long row. Units of one long row add to the same dq, each
// query block in the order of the key blocks: a unit waits until the one before it is past that query block. Units are
// taken in order, those of long rows one at a time, so the first unfinished one never waits for one that has not begun.
#pragma once
#include <atomic>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <thread>

#include "attention_bias_gradients.h"

constexpr int FORWARD_BLOCKS = 8;     // query blocks of a unit
constexpr int QUERY_BLOCKS = 4;       // of these, how many go over the keys side by side
constexpr int KEY_BLOCKS = 4;         // key blocks of a long row that go over the queries side by side
constexpr int64_t SHORT_ROW = 512;    // longer rows are cut into key blocks
constexpr int64_t SHORT_TOKENS = 256; // rows are put together up to so many tokens

// body(unit, after) for every unit, taken in order by whoever is free. The units before `alone` are taken one at a time;
// with another one a thread takes the one `after` it too, that its memory can be fetched meanwhile, or there is none.
template <class Body>
static void in_parallel(size_t units, size_t alone, int threads, Body body) {
  std::atomic<size_t> next{0};
#pragma omp parallel num_threads(threads)
  for (size_t unit = next.fetch_add(1); unit < units;) {
    const size_t after = unit < alone ? units : next.fetch_add(1);
    body(unit, after);
    unit = unit < alone ? next.fetch_add(1) : after;
  }
}

// Memory that a thread keeps from call to call, aligned to cache lines.
class Buffer {
 public:
  ~Buffer() { std::free(memory); }
  float* floats(size_t count) {
    if (count > size) {
      std::free(memory);
      size = (count + 31) / 16 * 16;  // a vector may be read from anywhere in it
      memory = std::aligned_alloc(64, size * 4);
    }
    return (float*)memory;
  }
  int32_t* ints(size_t count) { return (int32_t*)floats(count); }

 private:
  void* memory = nullptr;
  size_t size = 0;
};

static std::vector<int64_t> longest_first(const int64_t* offsets, int64_t rows) {
  std::vector<int64_t> order(static_cast<size_t>(rows));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return offsets[a + 1] - offsets[a] > offsets[b + 1] - offsets[b]; });
  return order;
}

struct ForwardUnit {
  int64_t row;
  int first, last;  // query blocks
};

static std::vector<ForwardUnit> forward_units(const int64_t* offsets, int64_t rows) {
  std::vector<ForwardUnit> units;
  for (int64_t b = 0; b < rows; b++) {
    int blocks = int((offsets[b + 1] - offsets[b] + BLOCK - 1) / BLOCK);
    for (int first = 0; first < blocks; first += FORWARD_BLOCKS)
      units.push_back({b, first, std::min(first + FORWARD_BLOCKS, blocks)});
  }
  auto work = [](const ForwardUnit& unit) { return (unit.last - unit.first) * (unit.first + unit.last); };
  std::stable_sort(units.begin(), units.end(), [&](auto& a, auto& b) { return work(a) > work(b); });
  return units;
}

// One long row while its key blocks are worked on.
struct LongRow {
  explicit LongRow(int blocks) : passed(new std::atomic<int>[size_t(blocks)]) {
    for (int block = 0; block < blocks; block++) passed[size_t(block)] = 0;
  }
  std::unique_ptr<std::atomic<int>[]> passed;  // by key block: query blocks that it has finished
  std::unique_ptr<float[]> sums;               // of dq, where dq itself cannot hold them

  void make_sums(size_t count) { sums.reset(new float[count]); }

  // Until the key block before this one is past `query_block`.
  void wait(int key_block, int query_block) const {
    if (key_block == 0) return;
    for (int tries = 0; passed[size_t(key_block - 1)].load(std::memory_order_acquire) <= query_block; tries++)
      if (tries > 64) std::this_thread::yield();
  }
  void pass(int key_block, int query_block) {
    passed[size_t(key_block)].store(query_block + 1, std::memory_order_release);
  }
};

struct BackwardUnit {
  size_t first, last;   // rows, by their place in the order
  int key_block;        // of a long row, the first; -1: all of them
  LongRow* shared;      // of a long row
  size_t sums;          // which TableSums
};

struct BackwardPlan {
  std::vector<int64_t> order;
  std::vector<BackwardUnit> units;
  std::vector<std::unique_ptr<LongRow>> long_rows;
  std::vector<TableSums> sums;
  std::vector<double> positions, times;

  // They come first.
  size_t units_of_long_rows() const {
    return size_t(std::count_if(units.begin(), units.end(), [](const BackwardUnit& unit) { return unit.shared; }));
  }

  // Units of a long row have `together` key blocks.
  BackwardPlan(const int64_t* offsets, int64_t rows, const BiasTables& tables, int together = 1)
      : order(longest_first(offsets, rows)) {
    auto length = [&](size_t at) { return offsets[order[at] + 1] - offsets[order[at]]; };
    for (size_t at = 0; at < order.size() && length(at) > 0;) {
      int longest = int(length(at));
      size_t end = at + 1;
      if (longest > SHORT_ROW) {
        int blocks = (longest + BLOCK - 1) / BLOCK;
        long_rows.push_back(std::make_unique<LongRow>(blocks));
        for (int block = 0; block < blocks; block += together)
          units.push_back({at, end, block, long_rows.back().get(), sums.size()});
      } else {
        for (int64_t tokens = longest; end < order.size() && length(end) > 0; end++) {
          tokens += length(end);
          if (tokens > SHORT_TOKENS) break;
        }
        units.push_back({at, end, -1, nullptr, sums.size()});
      }
      sums.push_back({nullptr, nullptr, longest});
      at = end;
    }
    place_sums(tables);
  }

  // The tables' gradients: all sums, in their order.
  void finish(const BiasTables& tables, int64_t max_len, float* dposition, float* dtime) const {
    if (tables.position) {
      std::vector<double> total(size_t(max_len), 0.0);
      for (const TableSums& one : sums)
        for (int y = 0; y < one.length; y++) total[size_t(one.length - 1 - y)] += one.position[y];
      std::copy(total.begin(), total.end(), dposition);
    }
    if (tables.time) {
      for (int64_t b = 0; b <= tables.buckets; b++) {
        double total = 0;
        for (const TableSums& one : sums) total += one.time[b];
        dtime[b] = float(total);
      }
    }
  }

 private:
  void place_sums(const BiasTables& tables) {
    size_t room = 0, entries = size_t(tables.buckets) + 1;
    for (const TableSums& one : sums) room += size_t(one.length);
    if (tables.position) positions.assign(room, 0.0);
    if (tables.time) times.assign(entries * sums.size(), 0.0);
    size_t at = 0;
    for (size_t n = 0; n < sums.size(); n++) {
      if (tables.position) sums[n].position = &positions[at];
      if (tables.time) sums[n].time = &times[n * entries];
      at += size_t(sums[n].length);
    }
  }
};
