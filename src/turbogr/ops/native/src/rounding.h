// Stochastic rounding of fp32 rows to bf16: a pure function of (seed, step, purpose and table, name of the row, column).
#pragma once
#include "philox.h"
#include "rows.h"

struct Rounding {
  uint64_t seed;
  uint32_t step, purpose;  // the counter's first two words
  const int64_t* names;    // [N] what row r is called; null: its number
  bool nearest;            // nothing is drawn
};

// The counter has 32 bits for a row's name and 16 more, into which the upper half is folded: `row_counter` in
// turbogr/ops/philox says the same.
INLINE uint32_t upper_bits(int64_t name) {
  uint32_t upper = uint32_t(uint64_t(name) >> 32);
  return (upper ^ upper >> 16) & 0xFFFF;
}

// out [D] = row [D]; up with the probability of the bits that are cut off. Infinities and NaN stay what they are.
static void round_row(const Rounding& rounding, int64_t number, const float* row, int64_t dim, Bf16* out) {
  const int64_t drawn = 4 * VW;  // columns of one Philox vector: lane l draws the columns 4 l .. 4 l + 3
  int64_t name = rounding.names ? rounding.names[number] : number;
  uint32_t words[4][VW], chances[4 * VW];
  for (int64_t c = 0; c < dim; c += drawn) {
    int64_t count = dim - c < drawn ? dim - c : drawn;
    if (!rounding.nearest) {
      VecW lanes;
      for (int i = 0; i < VW; i++) lanes[i] = uint32_t(i);
      VecW low = (upper_bits(name) << 16 | uint32_t(c / 4)) + lanes;
      VecWords random = philox(rounding.seed, rounding.step, rounding.purpose, uint32_t(name) - VecW{}, low);
      std::memcpy(words, random.w, sizeof words);
      for (int i = 0; i < VW; i++)
        for (int j = 0; j < 4; j++) chances[4 * i + j] = words[j][i] >> 16;
    }
    for (int64_t i = 0; i < count; i++) {
      uint32_t bits;
      std::memcpy(&bits, row + c + i, 4);
      uint32_t up = bits + (rounding.nearest ? 0x7FFF + (bits >> 16 & 1) : chances[i]);
      bool finite = (bits & 0x7F800000) != 0x7F800000, nan = (bits & 0x7FFFFFFF) > 0x7F800000;
      out[c + i].bits = uint16_t(nan ? 0x7FC0 : (finite ? up : bits) >> 16);
    }
  }
}

INLINE void widen_row(const Bf16* row, int64_t dim, float* out) {
  for (int64_t d = 0; d < dim; d++) {
    uint32_t bits = uint32_t(row[d].bits) << 16;
    std::memcpy(out + d, &bits, 4);
  }
}
