// Embedding tables: lookup, distinct ids, and gradients summed by id. Row optimizers are in embedding_update.cpp.
#include "embedding.h"
#include "id_hash.h"

// Outputs above this many bytes are written past the cache: they would not stay in it anyway.
static const int64_t CACHED = 8 << 20;
static const int64_t BLOCK = 1024;  // ids of one piece of work

INLINE void copy_row(char* out, const char* row, int64_t bytes) { std::memcpy(out, row, size_t(bytes)); }

INLINE void stream_row(char* out, const char* row, int64_t bytes) {
  for (int64_t b = 0; b < bytes; b += sizeof(Vec)) stream((float*)(out + b), load((const float*)(row + b)));
}

// out [count rows] = table[ids], whatever the type of the numbers; answers the first bad id's place, or `count`.
static int64_t lookup_block(const char* table, int64_t num_rows, int64_t bytes, const int64_t* ids, int64_t count,
                            int64_t known, char* out, bool past_cache) {
  int64_t bad = count;
  past_cache = past_cache && streams(out, bytes);
  for (int64_t i = 0; i < count; i++) {
    if (i + AHEAD < known) prefetch_row((const float*)(table + ids[i + AHEAD] * bytes), (bytes + 3) / 4);
    if (uint64_t(ids[i]) >= uint64_t(num_rows)) {
      bad = std::min(bad, i);
    } else if (past_cache) {
      stream_row(out + i * bytes, table + ids[i] * bytes, bytes);
    } else {
      copy_row(out + i * bytes, table + ids[i] * bytes, bytes);
    }
  }
  if (past_cache) end_of_stream();
  return bad;
}

// outs[t] [n_t rows of sizes[t] bytes] = tables[t][ids[offsets[t] .. offsets[t + 1]]] for every table at once; the work
// is cut into blocks of ids, whichever table they belong to. `bad` becomes the place of the first id that its table
// does not have, or the number of ids.
EXPORT void embedding_lookup(int64_t num_tables, const char* const* tables, const int64_t* num_rows,
                             const int64_t* sizes, const int64_t* offsets, const int64_t* ids, char* const* outs,
                             int64_t* bad, int threads) {
  std::vector<int64_t> first_block(1, 0);
  int64_t bytes = 0, first_bad = offsets[num_tables];
  for (int64_t t = 0; t < num_tables; t++) {
    int64_t count = offsets[t + 1] - offsets[t];
    first_block.push_back(first_block.back() + (count + BLOCK - 1) / BLOCK);
    bytes += count * sizes[t];
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic, 4) reduction(min : first_bad)
  for (int64_t block = 0; block < first_block.back(); block++) {
    int64_t t = std::upper_bound(first_block.begin(), first_block.end(), block) - first_block.begin() - 1;
    int64_t begin = (block - first_block[t]) * BLOCK, known = offsets[t + 1] - offsets[t] - begin;
    int64_t count = std::min(known, BLOCK);
    int64_t found = lookup_block(tables[t], num_rows[t], sizes[t], ids + offsets[t] + begin, count, known,
                                 outs[t] + begin * sizes[t], bytes > CACHED);
    if (found < count) first_bad = std::min(first_bad, offsets[t] + begin + found);
  }
  *bad = first_bad;
}

// 64 rows of a table: which of them occur, and how many occurring rows come before them.
struct Word {
  uint64_t marks;
  int64_t before;
};

// unique [U] = the distinct ids ascending, inverse [n] = the place of every id among them, counts = {U, place of the
// first id that the table does not have or n}. Nothing but `counts` is of use where there is such an id.
EXPORT void embedding_distinct(int64_t n, int64_t num_rows, const int64_t* ids, int64_t* unique, int64_t* inverse,
                               int64_t* counts, int threads) {
  int64_t num_words = (num_rows + 63) / 64, bad = n;
  std::vector<Word> words(size_t(num_words), Word{0, 0});
#pragma omp parallel for num_threads(threads) schedule(static) reduction(min : bad)
  for (int64_t i = 0; i < n; i++) {
    uint64_t id = uint64_t(ids[i]);
    if (id >= uint64_t(num_rows)) {
      bad = std::min(bad, i);
      continue;
    }
    uint64_t mark = uint64_t(1) << id % 64, *at = &words[id / 64].marks;
    // a hot row is marked once and only read from then on: threads do not take the word from one another
    if (!(__atomic_load_n(at, __ATOMIC_RELAXED) & mark)) __atomic_fetch_or(at, mark, __ATOMIC_RELAXED);
  }
  int64_t blocks = (num_words + BLOCK - 1) / BLOCK;
  std::vector<int64_t> before(size_t(blocks + 1), 0);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t block = 0; block < blocks; block++)
    for (int64_t w = block * BLOCK; w < std::min((block + 1) * BLOCK, num_words); w++)
      before[block + 1] += __builtin_popcountll(words[w].marks);
  for (int64_t block = 0; block < blocks; block++) before[block + 1] += before[block];
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t block = 0; block < blocks; block++) {
    int64_t place = before[block];
    for (int64_t w = block * BLOCK; w < std::min((block + 1) * BLOCK, num_words); w++) {
      words[w].before = place;
      for (uint64_t left = words[w].marks; left; left &= left - 1) unique[place++] = w * 64 + __builtin_ctzll(left);
    }
  }
  counts[0] = before[blocks];
  counts[1] = bad;
  if (bad < n) return;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < n; i++) {
    uint64_t id = uint64_t(ids[i]);
    const Word& word = words[id / 64];
    inverse[i] = word.before + __builtin_popcountll(word.marks & ((uint64_t(1) << id % 64) - 1));
  }
}

// What one thread finds of the distinct ids: those of its share of the hashes, in the order of their first occurrence.
struct Share {
  std::vector<int64_t> ids;
  std::vector<int32_t> cells;  // place in `ids` + 1, or 0

  int64_t place(int64_t id, uint64_t hash, uint64_t mask) {
    uint64_t cell = hash & mask;
    while (cells[cell] && ids[cells[cell] - 1] != id) cell = (cell + 1) & mask;
    if (!cells[cell]) {
      ids.push_back(id);
      cells[cell] = int32_t(ids.size());
    }
    return cells[cell] - 1;
  }
};

struct Entry {
  uint64_t key;  // rises as the id does
  int64_t from;
};

// Ascending by key: 11 bits at a time, those digits left out that all keys share.
static void sort_entries(std::vector<Entry>& entries) {
  std::vector<Entry> other(entries.size());
  uint64_t differ = 0;
  for (const Entry& entry : entries) differ |= entry.key ^ entries[0].key;
  for (int shift = 0; shift < 64; shift += 11) {
    if (!(differ >> shift & 2047)) continue;
    int64_t starts[2049] = {};
    for (const Entry& entry : entries) starts[(entry.key >> shift & 2047) + 1]++;
    for (int digit = 0; digit < 2048; digit++) starts[digit + 1] += starts[digit];
    for (const Entry& entry : entries) other[starts[entry.key >> shift & 2047]++] = entry;
    entries.swap(other);
  }
}

// As embedding_distinct, of ids of any size: by hashing, then sorting what is distinct. counts = {U}.
EXPORT void embedding_distinct_any(int64_t n, const int64_t* ids, int64_t* unique, int64_t* inverse, int64_t* counts,
                                   int threads) {
  int64_t num_shares = std::max(1, std::min(threads, 8));
  std::vector<Share> shares(static_cast<size_t>(num_shares));
  std::vector<int64_t> first(size_t(num_shares + 1), 0);
  uint64_t cells = 64;
  while (int64_t(cells) < 2 * n) cells *= 2;
  auto share_of = [=](uint64_t hash) { return int64_t((hash >> 32) * uint64_t(num_shares) >> 32); };
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t s = 0; s < num_shares; s++) {
    shares[s].cells.assign(cells, 0);
    for (int64_t i = 0; i < n; i++) {
      uint64_t hash = id_hash(ids[i]);
      if (share_of(hash) == s) inverse[i] = shares[s].place(ids[i], hash, cells - 1);
    }
  }
  for (int64_t s = 0; s < num_shares; s++) first[s + 1] = first[s] + int64_t(shares[s].ids.size());
  std::vector<Entry> entries;
  entries.reserve(size_t(first[num_shares]));
  for (const Share& share : shares)
    for (int64_t id : share.ids) entries.push_back({uint64_t(id) ^ uint64_t(1) << 63, int64_t(entries.size())});
  sort_entries(entries);
  std::vector<int64_t> ranks(entries.size());
  for (int64_t u = 0; u < int64_t(entries.size()); u++) {
    unique[u] = int64_t(entries[u].key ^ uint64_t(1) << 63);
    ranks[entries[u].from] = u;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < n; i++) inverse[i] = ranks[first[share_of(id_hash(ids[i]))] + inverse[i]];
  counts[0] = first[num_shares];
}

// Counting sort of places [n] in [0, U): `order` [n] are the occurrences by place, in their own order within one;
// those of place u are order[starts[u] .. starts[u + 1]].
EXPORT void embedding_group(int64_t n, int64_t distinct, const int64_t* places, int32_t* order, int64_t* starts,
                            int threads) {
  // every chunk of occurrences counts on its own; their number changes the work, not the answer
  int64_t chunks = std::max<int64_t>(1, std::min<int64_t>(threads, 8 * n / std::max<int64_t>(distinct, 1)));
  std::vector<int32_t> next(size_t(chunks * distinct), 0);  // [chunks, U]
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t chunk = 0; chunk < chunks; chunk++)
    for (int64_t i = n * chunk / chunks; i < n * (chunk + 1) / chunks; i++) next[chunk * distinct + places[i]]++;
  int64_t blocks = (distinct + BLOCK - 1) / BLOCK;
  std::vector<int64_t> before(size_t(blocks + 1), 0);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t block = 0; block < blocks; block++)
    for (int64_t chunk = 0; chunk < chunks; chunk++)
      for (int64_t u = block * BLOCK; u < std::min((block + 1) * BLOCK, distinct); u++)
        before[block + 1] += next[chunk * distinct + u];
  for (int64_t block = 0; block < blocks; block++) before[block + 1] += before[block];
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t block = 0; block < blocks; block++) {
    int64_t place = before[block];
    for (int64_t u = block * BLOCK; u < std::min((block + 1) * BLOCK, distinct); u++) {
      starts[u] = place;
      for (int64_t chunk = 0; chunk < chunks; chunk++) {
        int32_t count = next[chunk * distinct + u];
        next[chunk * distinct + u] = int32_t(place);
        place += count;
      }
    }
  }
  starts[distinct] = n;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t chunk = 0; chunk < chunks; chunk++)
    for (int64_t i = n * chunk / chunks; i < n * (chunk + 1) / chunks; i++)
      order[next[chunk * distinct + places[i]]++] = int32_t(i);
}

// out [U, D] = the sums of values [n, D] by group.
EXPORT void embedding_sum(int64_t distinct, int64_t dim, const float* values, const int32_t* order,
                          const int64_t* starts, float* out, int threads) {
  Gradients gradients(values, dim, order, starts, distinct, threads);
  bool past_cache = distinct * dim * 4 > CACHED && streams(out, dim * 4);
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room(size_t(dim) + VW);
    float* scratch = room.data();
#pragma omp for schedule(dynamic, 64)
    for (int64_t u = 0; u < distinct; u++) {
      const float* row = gradients.row(u, past_cache ? scratch : out + u * dim);
      if (past_cache) {
        stream_row((char*)(out + u * dim), (const char*)row, dim * 4);
      } else if (row != out + u * dim) {
        copy_row((char*)(out + u * dim), (const char*)row, dim * 4);
      }
    }
    if (past_cache) end_of_stream();
  }
}

// out [U, D] = the sum of several lists of distinct rows, in the lists' order; places[k] ascending in [0, U) says where
// the rows values[k] [counts[k], D] belong.
EXPORT void embedding_merge(int64_t lists, const int64_t* counts, const int64_t* const* places,
                            const float* const* values, int64_t distinct, int64_t dim, float* out, int threads) {
  const int64_t rows = 64;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t begin = 0; begin < distinct; begin += rows) {
    int64_t end = std::min(begin + rows, distinct);
    std::fill(out + begin * dim, out + end * dim, 0.0f);
    for (int64_t k = 0; k < lists; k++) {
      int64_t i = std::lower_bound(places[k], places[k] + counts[k], begin) - places[k];
      for (; i < counts[k] && places[k][i] < end; i++) {
        float* __restrict__ to = out + places[k][i] * dim;
        const float* from = values[k] + i * dim;
        for (int64_t d = 0; d < dim; d++) to[d] += from[d];
      }
    }
  }
}

// answer = whether none of n values is infinite or NaN.
EXPORT void embedding_finite(int64_t n, const float* values, int32_t* answer, int threads) {
  int32_t bad = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : bad)
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    int32_t seen = 0;
    for (int64_t i = begin; i < std::min(begin + BLOCK, n); i++) {
      int32_t bits;
      std::memcpy(&bits, values + i, 4);
      seen |= (bits & 0x7F800000) == 0x7F800000;
    }
    bad |= seen;
  }
  *answer = !bad;
}
