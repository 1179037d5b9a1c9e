// What every operator shares: the export macro, vectors of VW floats, and the functions on them.
//
// One source serves every instruction set: vectors are GCC/Clang vector extensions of VW lanes, and VW follows the
// flags that the file is compiled with (see ../build.py). Intrinsics stay in small blocks where they were measured to pay.
#pragma once
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#define VW 16
#elif defined(__AVX2__)
#define VW 8
#else
#define VW 4
#endif

typedef float Vec __attribute__((vector_size(VW * 4)));
typedef int32_t VecI __attribute__((vector_size(VW * 4)));
typedef float VecU __attribute__((vector_size(VW * 4), aligned(4)));  // in memory, at any address

INLINE Vec load(const float* p) { return *(const VecU*)p; }
INLINE void store(float* p, Vec x) { *(VecU*)p = x; }
INLINE Vec splat(float x) { return x - Vec{}; }
INLINE VecI splat(int32_t x) { return x - VecI{}; }

// The first `count` lanes from memory, the others 0; count < VW.
INLINE Vec load_first(const float* p, int count) {
  Vec x{};
  std::memcpy(&x, p, size_t(count) * 4);
  return x;
}
INLINE void store_first(float* p, Vec x, int count) { std::memcpy(p, &x, size_t(count) * 4); }

INLINE float sum(Vec x) {
  float lanes[VW], total = 0;
  store(lanes, x);
  for (int i = 0; i < VW; i++) total += lanes[i];
  return total;
}

// exp(x), relative error below 2e-7 for x in [-87, 88], clamped outside.
INLINE Vec exp(Vec x) {
  x *= 1.44269504088896f;
  x = x < 127.0f ? x : splat(127.0f);
  x = x > -126.0f ? x : splat(-126.0f);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
  Vec shifted = x + magic;
  Vec f = x - (shifted - magic);
  Vec p = splat(1.540353039338161e-4f);
  p = p * f + 1.333355814642844e-3f;
  p = p * f + 9.618129107628477e-3f;
  p = p * f + 5.550410866482158e-2f;
  p = p * f + 2.402265069591007e-1f;
  p = p * f + 6.931471805599453e-1f;
  p = p * f + 1.0f;
  return (Vec)((VecI)p + ((VecI)shifted << 23));
}

INLINE Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }
