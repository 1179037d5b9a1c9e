// The dropout mask: a pure function of (seed, step, purpose and layer, user, position, channel).
#pragma once
#include "philox.h"
#include "rows.h"

struct Dropout {
  uint64_t seed;
  uint32_t step, purpose;  // the counter's first two words
  uint32_t least;          // words below it are dropped
  float scale;             // of what is kept: 1 / (1 - rate)
  const int64_t *users, *positions;  // [T] the counter's other two words; null: nothing is dropped
};

#define BLOCK (4 * VW)  // channels of one Philox vector: lane l draws the channels 4 l .. 4 l + 3

// factors[i] = scale or 0 for the BLOCK channels of token t from channel c on, c a multiple of BLOCK.
INLINE void dropout_factors(const Dropout& d, int64_t t, int64_t c, float* factors) {
  VecW lanes;
  for (int i = 0; i < VW; i++) lanes[i] = uint32_t(i);
  VecW low = (uint32_t(d.positions[t]) << 16 | uint32_t(c / 4)) + lanes;
  VecWords words = philox(d.seed, d.step, d.purpose, uint32_t(d.users[t]) - VecW{}, low);
  float drawn[4][VW];
  for (int j = 0; j < 4; j++) store(drawn[j], words.w[j] >= d.least ? splat(d.scale) : Vec{});
  for (int i = 0; i < VW; i++)
    for (int j = 0; j < 4; j++) factors[4 * i + j] = drawn[j][i];
}

// For every vector of row t: body(channel, lanes left in the row, factor).
template <class Body>
INLINE void with_dropout(const Dropout& d, int64_t t, int64_t width, Body body) {
  float factors[BLOCK];
  for (int64_t block = 0; block < width; block += BLOCK) {
    if (d.users) dropout_factors(d, t, block, factors);
    int64_t end = width < block + BLOCK ? width : block + BLOCK;
    for (int64_t c = block; c < end; c += VW)
      body(c, width - c, d.users ? load(factors + c - block) : splat(1.0f));
  }
}
