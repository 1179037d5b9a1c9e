// AMX's tile instructions in plain C++: a program compiled with `-include` of this file takes the code for AMX and runs
// on a processor that has none, as long as it has what else that code uses (AVX512-BF16).
//
// TDPBF16PS is done as Intel's manual writes it: of each sum of pairs the even and the odd products are summed apart, by
// fused multiply-adds in fp32, then added to each other and to the tile; denormals count as 0 and become 0.
// Tiles hold NaN once they are configured. What a processor would refuse ends the program: a tile that is not configured,
// shapes that do not fit each other.
#pragma once
#include <immintrin.h>

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig amx_emulation::load_config
#define _tile_release amx_emulation::release
#define _tile_zero amx_emulation::zero
#define _tile_loadd amx_emulation::load
#define _tile_stored amx_emulation::store
#define _tile_dpbf16ps amx_emulation::multiply
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1

namespace amx_emulation {

struct Tile {
  int rows, bytes;  // 0: not configured
  float cells[16][16];
};
inline thread_local Tile tiles[8];

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX: %s\n", what);
  std::abort();
}

inline Tile& tile(int number) {
  require(tiles[number].rows > 0, "a tile that is not configured");
  return tiles[number];
}

inline void release() { std::memset(tiles, 0, sizeof tiles); }

inline void load_config(const void* from) {
  struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } shape;
  static_assert(sizeof shape == 64);
  std::memcpy(&shape, from, sizeof shape);
  require(shape.palette == 1 && shape.start_row == 0, "another palette than 1, or a start within a tile");
  for (int t = 0; t < 8; t++) {
    require(shape.rows[t] <= 16 && shape.bytes[t] <= 64 && shape.bytes[t] % 4 == 0, "a tile beyond 16 rows of 64 bytes");
    tiles[t].rows = shape.rows[t], tiles[t].bytes = shape.bytes[t];
    for (auto& row : tiles[t].cells)
      for (float& cell : row) cell = NAN;
  }
}

inline void zero(int to) { std::memset(tile(to).cells, 0, sizeof(Tile::cells)); }

inline void load(int to, const void* from, int64_t stride) {
  Tile& x = tile(to);
  zero(to);
  for (int r = 0; r < x.rows; r++) std::memcpy(x.cells[r], (const char*)from + r * stride, size_t(x.bytes));
}

inline void store(int from, void* to, int64_t stride) {
  const Tile& x = tile(from);
  for (int r = 0; r < x.rows; r++) std::memcpy((char*)to + r * stride, x.cells[r], size_t(x.bytes));
}

inline float flushed(float x) { return std::fabs(x) < FLT_MIN ? 0.0f : x; }

// The lower (0) or the upper (1) bf16 of a unit.
inline float half_of(float unit, int which) {
  uint32_t bits;
  std::memcpy(&bits, &unit, sizeof bits);
  bits = which ? bits & 0xffff0000 : bits << 16;
  std::memcpy(&unit, &bits, sizeof bits);
  return flushed(unit);
}

inline void multiply(int to, int left, int right) {
  Tile &c = tile(to), &a = tile(left), &b = tile(right);
  require(to != left && to != right && left != right, "a product of tiles that are not three");
  require(a.rows == c.rows && b.bytes == c.bytes && a.bytes == 4 * b.rows, "a product of shapes that do not fit");
  for (int m = 0; m < c.rows; m++) {
    float sums[2][16] = {};
    for (int k = 0; k < b.rows; k++)
      for (int which = 0; which < 2; which++)
        for (int n = 0; n < c.bytes / 4; n++)
          sums[which][n] = flushed(std::fma(half_of(a.cells[m][k], which), half_of(b.cells[k][n], which),
                                            sums[which][n]));
    for (int n = 0; n < c.bytes / 4; n++)
      c.cells[m][n] = flushed(flushed(c.cells[m][n]) + flushed(sums[0][n] + sums[1][n]));
  }
}

}  // namespace amx_emulation
