// Dropout, and the encoders' input (scaled items plus positions) with it.
#include "dropout.h"

template <class E>
static void drop(int64_t tokens, int64_t width, const E* x, const Dropout* given, E* out, int threads) {
  const Dropout d = *given;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; t++)
    with_dropout(d, t, width, [&](int64_t c, int64_t left, Vec factor) {
      write(out + t * width + c, read(x + t * width + c, left) * factor, left);
    });
}

// out [T, D] = x * mask / (1 - rate)
EXPORT void dropout(int bf16, int64_t tokens, int64_t width, const void* x, const Dropout* d, void* out, int threads) {
  if (bf16)
    drop(tokens, width, (const Bf16*)x, d, (Bf16*)out, threads);
  else
    drop(tokens, width, (const float*)x, d, (float*)out, threads);
}

// out [T, D] = dropout(x * scale + table[positions])
EXPORT void position_input(int64_t tokens, int64_t width, const float* x, const float* table,
                           const int64_t* positions, float scale, const Dropout* given, float* out, int threads) {
  const Dropout d = *given;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; t++)
    with_dropout(d, t, width, [&](int64_t c, int64_t left, Vec factor) {
      Vec sum = read(x + t * width + c, left) * scale + read(table + positions[t] * width + c, left);
      write(out + t * width + c, sum * factor, left);
    });
}

// From dout [T, D]: dx [T, D] and dtable [rows, D] (given as zeros), whose sums run through the tokens in order.
EXPORT void position_input_backward(int64_t tokens, int64_t width, const float* dout, const int64_t* positions,
                                    float scale, const Dropout* given, float* dx, float* dtable, int threads) {
  const Dropout d = *given;
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++)
      with_dropout(d, t, width, [&](int64_t c, int64_t left, Vec factor) {
        write(dx + t * width + c, read(dout + t * width + c, left) * factor, left);
      });
    // a vector of columns belongs to one thread, so that no sum depends on how many there are
#pragma omp for schedule(static)
    for (int64_t c = 0; c < width; c += VW)
      for (int64_t t = 0; t < tokens; t++) {
        float *row = dx + t * width + c, *sum = dtable + positions[t] * width + c;
        Vec g = read(row, width - c);
        write(sum, read(sum, width - c) + g, width - c);
        write(row, g * scale, width - c);
      }
  }
}
