// Sampled softmax over the positive and R negatives of every token, forward and backward in one pass.
//
//   c(t, r) = unit(query_t) . unit(table[candidate(t, r)]),  s = c * scale - log_q[candidate]     candidate 0: positive
//   loss_t = log sum_r exp s(t, r) - s(t, 0)                                                      hits left out
//   slope(t, r) = dloss_t / dc(t, r) = (softmax_r - [r = 0]) * scale
//   dunit(query_t) = sum_r slope(t, r) unit(row),   dunit(row) = sum over (t, r) of that row: slope(t, r) unit(query_t)
//
// Tokens are worked on part after part. A part draws its candidates, counts them by range of ids ("bucket"), works through
// the tokens and leaves one entry (id, token, slope) per candidate in its bucket, in the order of the tokens whatever the
// number of threads. A bucket's entries are then sorted by row and added up row by row, in registers.
//
// A small table is copied as unit rows, every row is a bucket, so that its entries lie sorted as they are left, and its
// rows' gradients are added up after each part, all of which stays in a cache. For a large one all tokens are one part:
// its entries wait until the gradients are asked for, which then leave bucket after bucket, those of the touched rows only.
//
// T tokens, P of them in a part, R negatives, C = 1 + R candidates of a token, N rows, D columns, W columns padded
#include "sampled_softmax.h"

#include <algorithm>
#include <vector>

#define ALONE static __attribute__((noinline))

constexpr float LEFT_OUT = -3e38f;

// Of a bucket: the row's number in it above the token's in the part.
struct Entry {
  float slope;
  uint32_t key;

  // Both at once: a load or a store less where entries come by the million.
  static void put(Entry& to, uint32_t key, float slope) {
    uint32_t bits;
    std::memcpy(&bits, &slope, 4);
    uint64_t both = uint64_t(key) << 32 | bits;
    std::memcpy((void*)&to, &both, sizeof both);
  }
  uint64_t both() const {
    uint64_t both;
    std::memcpy(&both, this, sizeof both);
    return both;
  }
};

// The fields of turbogr.ops.sampled_softmax.cpu.Job, in its order.
struct Job {
  int64_t tokens, negatives, width, padded, rows;  // T R D W N
  const float *query, *table;                      // [T, D] [N, D]
  const int64_t* positive;                         // [T]
  const int64_t* given;                            // [T, R] negatives, or null: drawn by
  const int64_t *users, *positions;                // [T]
  uint64_t seed;
  uint32_t word0, word1;
  const float* log_q;  // [N] or null
  float scale, eps;
  float *total, *losses, *dquery;  // [1] [T] [T, D]
  int64_t* outside;                // [1] a token with a candidate that is no row; untouched where there is none
  float *unit_query, *unit_rows;   // [P, W], [N, W] or null: rows are read in place
  float* sums;                     // [N, W] gradients of the unit rows, or null: entries are kept instead
  uint8_t* touched;                // [N] beside them: whether a row has an entry
  int32_t* candidates;             // [P * C + 16]
  Entry* entries;                  // [P * C]
  uint32_t* places;                // [blocks, buckets]
  int64_t *first_entry, *first_row;  // [buckets + 1], of the last part
  int64_t part, block, buckets;      // tokens of a part and of a block
  int shift, token_bits;             // bucket of an id: id >> shift; bits that hold any token of a part
  int gradients;                     // whether they are wanted
  int threads;

  int64_t count() const { return negatives + 1; }
  Rows in_place(const float* first) const {
    int vectors = int((width + VW - 1) / VW);
    return {first, width, vectors, int(width) - (vectors - 1) * VW};
  }
  Rows with_padding(const float* first) const { return {first, padded, in_place(first).vectors, VW}; }
};

// Tokens begin .. end of a job. What is kept of a token lies at its place in the part.
struct Part {
  int64_t begin, end, blocks;
  Part(const Job& job, int64_t number)
      : begin(number * job.part), end(std::min(begin + job.part, job.tokens)), blocks((end - begin + job.block - 1) / job.block) {}
  int64_t block_begin(const Job& job, int64_t block) const { return begin + block * job.block; }
  int64_t block_end(const Job& job, int64_t block) const { return std::min(block_begin(job, block + 1), end); }
  int32_t* candidates(const Job& job, int64_t t) const { return job.candidates + (t - begin) * job.count(); }
  float* unit_query(const Job& job, int64_t t) const { return job.unit_query + (t - begin) * job.padded; }
};

// A token with a candidate that is no row gets row 0 throughout, and is told.
static void candidates_of_block(const Job& job, const Part& part, int64_t block) {
  uint32_t* counts = job.places + block * job.buckets;
  std::fill(counts, counts + job.buckets, 0u);
  for (int64_t t = part.block_begin(job, block); t < part.block_end(job, block); t++) {
    int32_t* at = part.candidates(job, t);
    uint64_t highest = uint64_t(job.positive[t]);
    at[0] = int32_t(highest);
    if (job.given)
      for (int64_t r = 0; r < job.negatives; r++) {
        uint64_t id = uint64_t(job.given[t * job.negatives + r]);
        highest = id > highest ? id : highest, at[r + 1] = int32_t(id);
      }
    else
      draw_below(job.seed, job.word0, job.word1, uint32_t(job.users[t]), uint32_t(job.positions[t]),
                 uint32_t(job.rows), job.negatives, at + 1);
    if (highest >= uint64_t(job.rows)) {
#pragma omp atomic write
      *job.outside = t;
      std::fill(at, at + job.count(), 0);
    }
    for (int64_t r = 0; r < job.count(); r++) counts[at[r] >> job.shift]++;
  }
}

ALONE void add_up(const uint32_t* __restrict counts, int64_t n, uint32_t* __restrict sums) {
  for (int64_t i = 0; i < n; i++) sums[i] += counts[i];
}
ALONE void take_places(uint32_t* __restrict counts, int64_t n, uint32_t* __restrict next) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t count = counts[i];
    counts[i] = next[i], next[i] += count;
  }
}

// counts [blocks, buckets] -> where every block's entries of every bucket begin.
static void places_of_blocks(const Job& job, const Part& part) {
  std::vector<uint32_t> next(size_t(job.buckets), 0u);
  auto counts = [&](int64_t block) { return job.places + block * job.buckets; };
  for (int64_t block = 0; block < part.blocks; block++) add_up(counts(block), job.buckets, next.data());
  int64_t total = 0;
  for (int64_t b = 0; b < job.buckets; b++) {
    job.first_entry[b] = total, total += next[b];
    next[b] = uint32_t(job.first_entry[b]);
  }
  job.first_entry[job.buckets] = total;
  for (int64_t block = 0; block < part.blocks; block++) take_places(counts(block), job.buckets, next.data());
}

// Floats that begin at a cache line; growing forgets what was there.
struct Line {
  float x[16];
};
struct alignas(64) AlignedLine : Line {};
struct Buffer {
  std::vector<AlignedLine> lines;
  explicit Buffer(int64_t floats = 0) { grow(floats); }
  void grow(int64_t floats) {
    if (int64_t(lines.size()) * 16 < floats) lines.resize(size_t(floats + 15) / 16);
  }
  float* data() { return lines.empty() ? nullptr : lines[0].x; }
};

// What a thread holds of the token that it works on.
struct Token {
  Buffer scores, weights, dunit;  // [C padded] twice, [W]
  explicit Token(const Job& job) : scores(job.count() + VW), weights(job.count() + VW), dunit(job.padded) {}
};

// Scores of a token's candidates; of rows in place also one over their norms, as weights. The highest score.
template <int NV, bool PADDED>
INLINE float score(const Job& job, const Part& part, const Rows& rows, int64_t t, Token& token) {
  const int32_t* at = part.candidates(job, t);
  const float* query = part.unit_query(job, t);
  int64_t ahead = t + 1 < part.end ? job.count() : 0;
  VecI lane;
  for (int i = 0; i < VW; i++) lane[i] = i;
  Vec best = splat(LEFT_OUT);
  for (int64_t r = 0; r < job.count(); r += VW) {
    if constexpr (!PADDED)
      for (int64_t next = r + ahead; next < std::min(r + VW, job.count()) + ahead && ahead; next++)
        for (int n = 0; n < rows.vectors; n++) __builtin_prefetch(rows.row(at[next]) + n * VW, 0, 2);
    Products p = products<NV, PADDED>(query, rows, at + r);
    if constexpr (!PADDED) {
      Vec norm = p.with_itself;
      for (int i = 0; i < VW; i++) norm[i] = std::sqrt(norm[i]);
      Vec inverse = 1.0f / (norm > job.eps ? norm : splat(job.eps));
      store(token.weights.data() + r, inverse);
      p.with_query *= inverse;
    }
    Vec s = p.with_query * job.scale;
    if (job.log_q)
      for (int i = 0; i < VW; i++) s[i] -= job.log_q[at[r + i]];
    VecI id;
    std::memcpy(&id, at + r, sizeof id);
    VecI number = lane + int32_t(r);
    VecI counts = (number == 0) | ((id != at[0]) & (number < int32_t(job.count())));
    s = counts ? s : splat(LEFT_OUT);
    best = s > best ? s : best;
    store(token.scores.data() + r, s);
  }
  return highest(best);
}

// Not inlined, as all loops here that shall have the registers to themselves.
ALONE void leave_entries(const int32_t* at, const float* slopes, int64_t count, uint32_t token, int token_bits, int shift,
                         uint32_t* __restrict places, Entry* __restrict entries) {
  uint32_t within = (1u << shift) - 1;
  for (int64_t r = 0; r < count; r++) {
    uint32_t id = uint32_t(at[r]);
    Entry::put(entries[places[id >> shift]++], (id & within) << token_bits | token, slopes[r]);
  }
}

template <int NV, bool PADDED>
static void work_on_block(const Job& job, const Part& part, int64_t block, Token& token) {
  Rows rows = PADDED ? job.with_padding(job.unit_rows) : job.in_place(job.table), queries = job.in_place(job.query);
  uint32_t* places = job.places + block * job.buckets;
  float *slopes = token.scores.data(), *weights = PADDED ? slopes : token.weights.data();
  for (int64_t t = part.block_begin(job, block); t < part.block_end(job, block); t++) {
    const int32_t* at = part.candidates(job, t);
    normalise(queries, t, job.eps, part.unit_query(job, t));
    float best = score<NV, PADDED>(job, part, rows, t, token), positive = slopes[0];
    Vec sum{};
    for (int64_t r = 0; r < job.count(); r += VW) {
      Vec s = load(slopes + r);
      Vec e = s == LEFT_OUT ? Vec{} : exp(s - best);
      e = s == s ? e : s;  // not a number stays one
      store(slopes + r, e);
      sum += e;
    }
    float all = sum_both(sum, sum)[0];
    job.losses[t] = std::log(all) + best - positive;
    if (!job.gradients) continue;
    for (int64_t r = 0; r < job.count(); r += VW) store(slopes + r, load(slopes + r) * (job.scale / all));
    slopes[0] -= job.scale;
    leave_entries(at, slopes, job.count(), uint32_t(t - part.begin), job.token_bits, job.shift, places, job.entries);
    if constexpr (!PADDED)
      for (int64_t r = 0; r < job.count(); r += VW) store(weights + r, load(weights + r) * load(slopes + r));
    weighted_sum<NV, PADDED>(rows, at, weights, job.count(), token.dunit.data());
    through_norm(queries, t, token.dunit.data(), job.eps, 1.0f, job.dquery + t * job.width);
  }
}

// The entries of a bucket by row: tokens and slopes of row i from begin(i) to begin(i + 1).
struct Sorted {
  std::vector<uint32_t> ends;  // of rows 0 .. , from place 1 on; place 0 is 0
  std::vector<int32_t> tokens;
  std::vector<float> slopes;
  explicit Sorted(const Job& job) : ends((size_t(1) << job.shift) + 1) {}

  uint32_t begin(int64_t row) const { return ends[row]; }

  // Counts the entries of every row; the number of rows that have some.
  int64_t count(const Job& job, int64_t bucket) {
    std::fill(ends.begin(), ends.end(), 0);
    uint32_t* counts = ends.data() + 1;
    int bits = 32 + job.token_bits;
    for (int64_t i = job.first_entry[bucket]; i < job.first_entry[bucket + 1]; i++) counts[job.entries[i].both() >> bits]++;
    return int64_t(ends.size()) - std::count(ends.begin(), ends.end(), 0u);
  }

  void sort(const Job& job, int64_t bucket) {
    count(job, bucket);
    uint32_t total = 0;
    for (size_t row = 1; row < ends.size(); row++) {
      uint32_t own = ends[row];
      ends[row] = total, total += own;
    }
    if (tokens.size() < total) tokens.resize(total), slopes.resize(total);
    scatter(job.entries + job.first_entry[bucket], total, job.token_bits, ends.data() + 1, tokens.data(), slopes.data());
  }

  ALONE void scatter(const Entry* entries, int64_t count, int token_bits, uint32_t* __restrict next,
                     int32_t* __restrict tokens, float* __restrict slopes) {
    uint32_t token = (1u << token_bits) - 1;
    for (int64_t i = 0; i < count; i++) {
      uint64_t both = entries[i].both();
      uint32_t key = uint32_t(both >> 32), place = next[key >> token_bits]++, slope = uint32_t(both);
      tokens[place] = int32_t(key & token);
      std::memcpy(slopes + place, &slope, 4);
    }
  }
};

// f(row, its gradient as a unit vector, padded) for every row of a bucket that has entries, ascending.
template <int NV, class F>
INLINE void for_rows_of_bucket(const Job& job, int64_t bucket, Sorted& sorted, float* dunit, const F& f) {
  Rows queries = job.with_padding(job.unit_query);
  sorted.sort(job, bucket);
  for (int64_t i = 0; i < int64_t(1) << job.shift; i++) {
    uint32_t begin = sorted.begin(i), count = sorted.begin(i + 1) - begin;
    if (!count) continue;
    weighted_sum<NV, true>(queries, sorted.tokens.data() + begin, sorted.slopes.data() + begin, count, dunit);
    f((bucket << job.shift) + i, dunit);
  }
}

// Adds up the entries of a row that is a bucket: their keys are the tokens.
template <int NV>
static void add_row(const Job& job, int64_t row, float* more) {
  int64_t begin = job.first_entry[row], count = job.first_entry[row + 1] - begin;
  if (!count) return;
  const Entry* entries = job.entries + begin;
  Rows queries = job.with_padding(job.unit_query);
  weighted_sum<NV, true, 2>(queries, (const int32_t*)&entries->key, &entries->slope, count, more);
  float* sum = job.sums + row * job.padded;
  for (int64_t d = 0; d < job.padded; d += VW) store(sum + d, load(sum + d) + load(more + d));
  job.touched[row] = 1;
}

template <int NV>
static void rows_of_bucket(const Job& job, int64_t bucket, float scale, int64_t* ids, float* values, Sorted& sorted,
                           float* dunit) {
  Rows table = job.in_place(job.table);
  int64_t place = job.first_row[bucket];
  for_rows_of_bucket<NV>(job, bucket, sorted, dunit, [&](int64_t row, const float* gradient) {
    through_norm(table, row, gradient, job.eps, scale, values + (ids ? place : row) * job.width);
    if (ids) ids[place++] = row;
  });
}

// f(NV) for the number of unrolled vectors that rows of D columns have.
template <class F>
static void with_vectors(const Job& job, const F& f) {
  switch ((job.in_place(nullptr).vectors - 1) % UNROLLED + 1) {
#define CASE(n) case n: return f(std::integral_constant<int, n>{});
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#undef CASE
  }
}

// Losses and query gradients; what `sampled_softmax_rows` needs.
EXPORT void sampled_softmax_tokens(const Job* given) {
  const Job& job = *given;
  std::fill_n(job.first_entry, job.buckets + 1, 0);
  std::fill_n(job.first_row, job.buckets + 1, 0);
#pragma omp parallel num_threads(job.threads)
  with_vectors(job, [&](auto vectors) {
    Token token(job);
    Sorted sorted(job);
    Buffer dunit(job.padded);
    Rows table = job.in_place(job.table);
    if (job.unit_rows)
#pragma omp for schedule(static)
      for (int64_t i = 0; i < job.rows; i++) normalise(table, i, job.eps, job.unit_rows + i * job.padded);
    if (job.sums)
#pragma omp for schedule(static)
      for (int64_t i = 0; i < job.rows; i++)
        job.touched[i] = 0, std::fill_n(job.sums + i * job.padded, job.padded, 0.0f);
    for (int64_t number = 0; number * job.part < job.tokens; number++) {
      Part part(job, number);
#pragma omp for schedule(dynamic)
      for (int64_t block = 0; block < part.blocks; block++) candidates_of_block(job, part, block);
#pragma omp single
      {
        std::fill_n(part.candidates(job, part.end), 16, 0);
        places_of_blocks(job, part);
      }
#pragma omp for schedule(dynamic)
      for (int64_t block = 0; block < part.blocks; block++)
        if (job.unit_rows)
          work_on_block<vectors, true>(job, part, block, token);
        else
          work_on_block<vectors, false>(job, part, block, token);
      if (!job.gradients) continue;
      if (job.sums) {
#pragma omp for schedule(dynamic, 64)
        for (int64_t row = 0; row < job.rows; row++) add_row<vectors>(job, row, dunit.data());
      } else {
#pragma omp for schedule(dynamic)
        for (int64_t bucket = 0; bucket < job.buckets; bucket++)
          job.first_row[bucket + 1] = sorted.count(job, bucket);
      }
    }
  });
  double total = 0;
  for (int64_t t = 0; t < job.tokens; t++) total += double(job.losses[t]);
  *job.total = float(total);
  if (job.gradients && !job.sums)
    for (int64_t bucket = 0; bucket < job.buckets; bucket++) job.first_row[bucket + 1] += job.first_row[bucket];
}

// `scale` times the gradients of the touched rows: ids [U] ascending and values [U, D]; where ids is null, values [N, D]
// of zeros, each touched row in its place.
EXPORT void sampled_softmax_rows(const Job* given, float scale, int64_t* ids, float* values) {
  const Job& job = *given;
#pragma omp parallel num_threads(job.threads)
  with_vectors(job, [&](auto vectors) {
    Sorted sorted(job);
    Buffer dunit(job.padded);
#pragma omp for schedule(dynamic)
    for (int64_t bucket = 0; bucket < job.buckets; bucket++)
      rows_of_bucket<vectors>(job, bucket, scale, ids, values, sorted, dunit.data());
  });
}

// The same where there are `sums`: of the `count` rows `ids` [count], or of all [N] where it is null.
EXPORT void sampled_softmax_summed_rows(const Job* given, float scale, int64_t count, const int64_t* ids, float* values) {
  const Job& job = *given;
  Rows table = job.in_place(job.table);
#pragma omp parallel for schedule(static) num_threads(job.threads)
  for (int64_t i = 0; i < count; i++) {
    int64_t row = ids ? ids[i] : i;
    through_norm(table, row, job.sums + row * job.padded, job.eps, scale, values + i * job.width);
  }
}
