// A map from ids, any 64-bit numbers, to slots: open addressing with linear probing in arrays that the caller keeps.
//
// index [2^bits] holds slot + 1, or 0 where nothing is; names [C] the id of every slot. An id stands at the first free
// cell from the leading bits of its hash on, so there is no cell with 0 between the two.
#include <algorithm>
#include <vector>

#include "common.h"
#include "id_hash.h"

static const int64_t BLOCK = 32;  // ids whose cells are on their way from memory together

// slots [n] = the slot of every id, or -1.
EXPORT void id_map_find(int64_t n, const int64_t* ids, const int32_t* index, int32_t bits, const int64_t* names,
                        int64_t* slots, int threads) {
  const uint64_t mask = (uint64_t(1) << bits) - 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    uint64_t cells[BLOCK];
    int64_t count = std::min(n - begin, BLOCK);
    for (int64_t i = 0; i < count; i++) {
      cells[i] = id_hash(ids[begin + i]) >> (64 - bits);
      __builtin_prefetch(index + cells[i]);
    }
    for (int64_t i = 0; i < count; i++)
      if (int32_t found = index[cells[i]]) __builtin_prefetch(names + found - 1);
    for (int64_t i = 0; i < count; i++) {
      uint64_t cell = cells[i];
      while (index[cell] && names[index[cell] - 1] != ids[begin + i]) cell = (cell + 1) & mask;
      slots[begin + i] = int64_t(index[cell]) - 1;
    }
  }
}

// Enter ids that are not there; names of their slots are set already. One thread: cells depend on one another.
EXPORT void id_map_insert(int64_t n, const int64_t* ids, const int64_t* slots, int32_t* index, int32_t bits) {
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  for (int64_t i = 0; i < n; i++) {
    if (i + 8 < n) __builtin_prefetch(index + (id_hash(ids[i + 8]) >> (64 - bits)), 1);
    uint64_t cell = id_hash(ids[i]) >> (64 - bits);
    while (index[cell]) cell = (cell + 1) & mask;
    index[cell] = int32_t(slots[i] + 1);
  }
}

// Take out ids that are there, while their slots still have their names. What stands behind a freed cell moves up, so
// that no tombstones gather.
EXPORT void id_map_remove(int64_t n, const int64_t* ids, int32_t* index, int32_t bits, const int64_t* names) {
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  for (int64_t i = 0; i < n; i++) {
    uint64_t hole = id_hash(ids[i]) >> (64 - bits);
    while (names[index[hole] - 1] != ids[i]) hole = (hole + 1) & mask;
    for (uint64_t cell = (hole + 1) & mask; index[cell]; cell = (cell + 1) & mask) {
      uint64_t home = id_hash(names[index[cell] - 1]) >> (64 - bits);
      if (((cell - home) & mask) < ((cell - hole) & mask)) continue;  // it begins behind the hole and stays
      index[hole] = index[cell];
      hole = cell;
    }
    index[hole] = 0;
  }
}
