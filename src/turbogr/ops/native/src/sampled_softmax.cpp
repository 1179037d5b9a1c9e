// Sampled softmax over the positive and R negatives of every token, forward and backward in one pass.
//
//   c(t, r) = unit(query_t) . unit(table[candidate(t, r)]),  s = c * scale - log_q[candidate]     candidate 0: positive
//   loss_t = log sum_r exp s(t, r) - s(t, 0)                                                      hits left out
//   slope(t, r) = dloss_t / dc(t, r) = (softmax_r - [r = 0]) * scale
//   dunit(query_t) = sum_r slope(t, r) unit(row),   dunit(row) = sum over (t, r) of that row: slope(t, r) unit(query_t)
//
// `sampled_softmax_tokens` draws the candidates, counts them by range of ids ("bucket"), works through the tokens and
// leaves one entry (id, token, slope) per candidate in its bucket. Entries of a bucket stand in the order of the tokens
// whatever the number of threads. `sampled_softmax_rows` adds them up, bucket after bucket: only the gradients of one
// bucket's touched rows are held at a time, in a cache, and leave in the order of the ids.
//
// T tokens, R negatives, C = 1 + R candidates of a token, N rows of the table, D columns, W columns padded
#include "sampled_softmax.h"

#include <algorithm>
#include <vector>

#define ALONE static __attribute__((noinline))

constexpr float LEFT_OUT = -3e38f;

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
  // kept from one call to the other
  float *unit_query, *unit_rows;   // [T, W], [N, W] or null: rows are read in place
  int32_t* candidates;             // [T * C + 16]
  uint64_t* entries;               // [T * C]
  uint32_t* places;                // [blocks, buckets]
  int64_t *first_entry, *first_row;  // [buckets + 1]
  int64_t blocks, buckets;
  int shift, token_bits;  // bucket of an id: id >> shift; bits that hold any token
  int gradients;          // whether they are wanted
  int threads;

  int64_t count() const { return negatives + 1; }
  int64_t block_begin(int64_t block) const { return tokens * block / blocks; }
  Rows in_place(const float* first) const {
    int vectors = int((width + VW - 1) / VW);
    return {first, width, vectors, int(width) - (vectors - 1) * VW};
  }
  Rows with_padding(const float* first) const { return {first, padded, in_place(first).vectors, VW}; }
};

// A token with a candidate that is no row gets row 0 throughout, and is told.
static void candidates_of_block(const Job& job, int64_t block, uint32_t* counts) {
  for (int64_t t = job.block_begin(block); t < job.block_begin(block + 1); t++) {
    int32_t* at = job.candidates + t * job.count();
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

// counts [blocks, buckets] -> where every block's entries of every bucket begin.
static void places_of_blocks(const Job& job) {
  int64_t* first = job.first_entry;
  std::fill(first, first + job.buckets + 1, 0);
  for (int64_t block = 0; block < job.blocks; block++)
    for (int64_t b = 0; b < job.buckets; b++) first[b + 1] += job.places[block * job.buckets + b];
  for (int64_t b = 0; b < job.buckets; b++) first[b + 1] += first[b];
  std::vector<uint32_t> next(first, first + job.buckets);
  for (int64_t block = 0; block < job.blocks; block++)
    for (int64_t b = 0; b < job.buckets; b++) {
      uint32_t count = job.places[block * job.buckets + b];
      job.places[block * job.buckets + b] = next[b];
      next[b] += count;
    }
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
INLINE float score(const Job& job, const Rows& rows, int64_t t, Token& token) {
  const int32_t* at = job.candidates + t * job.count();
  const float* query = job.unit_query + t * job.padded;
  int64_t ahead = t + 1 < job.tokens ? job.count() : 0;
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

// An entry of a bucket: the id less the bucket's first one, the token, the slope.
struct Entry {
  uint32_t id, token;
  float slope;

  static uint64_t packed(uint32_t key, float slope) {
    uint32_t bits;
    std::memcpy(&bits, &slope, 4);
    return uint64_t(key) << 32 | bits;
  }
  Entry(uint64_t packed, int token_bits)
      : id(uint32_t(packed >> 32 >> token_bits)), token(uint32_t(packed >> 32) & ((1u << token_bits) - 1)) {
    uint32_t bits = uint32_t(packed);
    std::memcpy(&slope, &bits, 4);
  }
};

// Not inlined, as all loops here that shall have the registers to themselves.
ALONE void leave_entries(const int32_t* at, const float* slopes, int64_t count, uint32_t token, int token_bits, int shift,
                         uint32_t* __restrict places, uint64_t* __restrict entries) {
  uint32_t within = (1u << shift) - 1;
  for (int64_t r = 0; r < count; r++) {
    uint32_t id = uint32_t(at[r]);
    entries[places[id >> shift]++] = Entry::packed((id & within) << token_bits | token, slopes[r]);
  }
}

template <int NV, bool PADDED>
static void work_on_block(const Job& job, int64_t block, Token& token) {
  Rows rows = PADDED ? job.with_padding(job.unit_rows) : job.in_place(job.table), queries = job.in_place(job.query);
  uint32_t* places = job.places + block * job.buckets;
  float *slopes = token.scores.data(), *weights = PADDED ? slopes : token.weights.data();
  for (int64_t t = job.block_begin(block); t < job.block_begin(block + 1); t++) {
    const int32_t* at = job.candidates + t * job.count();
    normalise(queries, t, job.eps, job.unit_query + t * job.padded);
    float best = score<NV, PADDED>(job, rows, t, token), positive = slopes[0];
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
    leave_entries(at, slopes, job.count(), uint32_t(t), job.token_bits, job.shift, places, job.entries);
    if constexpr (!PADDED)
      for (int64_t r = 0; r < job.count(); r += VW) store(weights + r, load(weights + r) * load(slopes + r));
    weighted_sum<NV, PADDED>(rows, at, weights, job.count(), token.dunit.data());
    through_norm(queries, t, token.dunit.data(), job.eps, 1.0f, job.dquery + t * job.width);
  }
}

// The touched rows of a bucket, and a row's place among them.
struct Touched {
  std::vector<uint64_t> bits;
  std::vector<uint32_t> before;  // rows of earlier words
  explicit Touched(const Job& job) : bits((size_t(1) << job.shift) / 64 + 1), before(bits.size()) {}

  int64_t mark(const Job& job, int64_t bucket) {
    std::fill(bits.begin(), bits.end(), 0);
    for (int64_t i = job.first_entry[bucket]; i < job.first_entry[bucket + 1]; i++) {
      uint64_t id = job.entries[i] >> 32 >> job.token_bits;
      bits[id / 64] |= uint64_t(1) << id % 64;
    }
    uint32_t rows = 0;
    for (size_t word = 0; word < bits.size(); word++) before[word] = rows, rows += __builtin_popcountll(bits[word]);
    return rows;
  }
  uint32_t place(uint32_t id) const {
    return before[id / 64] + __builtin_popcountll(bits[id / 64] & ((uint64_t(1) << id % 64) - 1));
  }
};

// sums (padded, one per touched row) += slope * query of every entry
template <int NV>
ALONE void add_entries(const uint64_t* entries, int64_t count, int token_bits, Rows queries, const Touched& touched,
                       float* __restrict sums) {
  constexpr int64_t AHEAD = 16;
  const uint64_t* bits = touched.bits.data();
  const uint32_t* earlier = touched.before.data();
  int before = queries.vectors - NV;
  for (int64_t i = 0; i < count; i++) {
    Entry next(entries[i + AHEAD < count ? i + AHEAD : i], token_bits), entry(entries[i], token_bits);
    for (int n = 0; n < NV; n++) __builtin_prefetch(queries.row(next.token) + n * VW);
    uint64_t below = bits[entry.id / 64] & ((uint64_t(1) << entry.id % 64) - 1);
    float* out = sums + (earlier[entry.id / 64] + uint32_t(__builtin_popcountll(below))) * queries.stride;
    const float* query = queries.row(entry.token);
    for (int n = 0; n < before; n++, out += VW, query += VW) store(out, load(out) + entry.slope * load(query));
    for (int n = 0; n < NV; n++) store(out + n * VW, load(out + n * VW) + entry.slope * load(query + n * VW));
  }
}

template <int NV>
static void rows_of_bucket(const Job& job, int64_t bucket, float scale, int64_t* ids, float* values, Touched& touched,
                           Buffer& buffer) {
  Rows queries = job.with_padding(job.unit_query), table = job.in_place(job.table);
  int64_t end = job.first_entry[bucket + 1], first = bucket << job.shift, row = job.first_row[bucket];
  int64_t rows = touched.mark(job, bucket);
  buffer.grow(rows * job.padded);
  float* dunit = buffer.data();
  std::fill(dunit, dunit + rows * job.padded, 0.0f);
  int64_t begin = job.first_entry[bucket];
  add_entries<NV>(job.entries + begin, end - begin, job.token_bits, queries, touched, dunit);
  const float* from = dunit;
  for (size_t word = 0; word < touched.bits.size(); word++)
    for (uint64_t left = touched.bits[word]; left; left &= left - 1, row++, from += job.padded) {
      int64_t id = first + int64_t(word) * 64 + __builtin_ctzll(left);
      through_norm(table, id, from, job.eps, scale, values + (ids ? row : id) * job.width);
      if (ids) ids[row] = id;
    }
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

// Losses and query gradients; entries and the number of touched rows (first_row[buckets]) for `sampled_softmax_rows`.
EXPORT void sampled_softmax_tokens(const Job* given) {
  const Job& job = *given;
  std::fill(job.places, job.places + job.blocks * job.buckets, 0u);
  std::fill_n(job.candidates + job.tokens * job.count(), 16, 0);
#pragma omp parallel num_threads(job.threads)
  {
#pragma omp for schedule(dynamic) nowait
    for (int64_t block = 0; block < job.blocks; block++)
      candidates_of_block(job, block, job.places + block * job.buckets);
    if (job.unit_rows) {
      Rows table = job.in_place(job.table);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < job.rows; i++) normalise(table, i, job.eps, job.unit_rows + i * job.padded);
    }
#pragma omp barrier
#pragma omp single
    places_of_blocks(job);
    with_vectors(job, [&](auto vectors) {
      Token token(job);
#pragma omp for schedule(dynamic)
      for (int64_t block = 0; block < job.blocks; block++)
        if (job.unit_rows)
          work_on_block<vectors, true>(job, block, token);
        else
          work_on_block<vectors, false>(job, block, token);
    });
    if (job.gradients) {
      Touched touched(job);
#pragma omp for schedule(dynamic, 4)
      for (int64_t bucket = 0; bucket < job.buckets; bucket++) job.first_row[bucket + 1] = touched.mark(job, bucket);
    }
  }
  double total = 0;
  for (int64_t t = 0; t < job.tokens; t++) total += double(job.losses[t]);
  *job.total = float(total);
  job.first_row[0] = 0;
  if (job.gradients)
    for (int64_t bucket = 0; bucket < job.buckets; bucket++) job.first_row[bucket + 1] += job.first_row[bucket];
}

// `scale` times the gradients of the touched rows: ids [U] ascending and values [U, D]; where ids is null, values [N, D]
// of zeros, each touched row in its place.
EXPORT void sampled_softmax_rows(const Job* given, float scale, int64_t* ids, float* values) {
  const Job& job = *given;
#pragma omp parallel num_threads(job.threads)
  with_vectors(job, [&](auto vectors) {
    Touched touched(job);
    Buffer dunit;
#pragma omp for schedule(dynamic)
    for (int64_t bucket = 0; bucket < job.buckets; bucket++)
      rows_of_bucket<vectors>(job, bucket, scale, ids, values, touched, dunit);
  });
}
