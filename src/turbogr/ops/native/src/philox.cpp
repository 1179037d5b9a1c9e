// Philox over arrays of counters.
#include "philox.h"

// out [n, 4] int64 in [0, 2^32): counters (word0, word1, word2[i], word3[i]).
EXPORT void philox_words(int64_t n, uint64_t seed, uint32_t word0, uint32_t word1, const int64_t* word2,
                         const int64_t* word3, int64_t* out, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t begin = 0; begin < n; begin += VW) {
    int64_t count = n - begin < VW ? n - begin : VW;
    VecW c2{}, c3{};
    for (int64_t i = 0; i < count; i++) c2[i] = uint32_t(word2[begin + i]), c3[i] = uint32_t(word3[begin + i]);
    VecWords words = philox(seed, word0, word1, c2, c3);
    for (int64_t i = 0; i < count; i++)
      for (int j = 0; j < 4; j++) out[(begin + i) * 4 + j] = words.w[j][i];
  }
}
