// The passes of an HSTU layer between its GEMMs and its attention, row by row.
//
//   xhat = norm(x)                       [u v q k] = SiLU(z),  z = xhat W           gated = dropout(norm(y) * SiLU(z_u))
//
// T tokens, D width; x and its gradient are fp32, everything else is fp32 or bf16. z and dz are [T, 4 D], u first.
#include "dropout.h"

// SiLU(z) and its derivative.
struct Silu {
  Vec value, slope;
};
INLINE Silu silu(Vec z) {
  Vec s = sigmoid(z);
  return {z * s, s + z * s * (1.0f - s)};
}

#define EACH_ROW _Pragma("omp parallel for num_threads(threads) schedule(static)") for (int64_t t = 0; t < tokens; t++)

template <class E>
static void norm(int64_t tokens, int64_t width, const float* x, float eps, E* out, int threads) {
  EACH_ROW {
    const float* row = x + t * width;
    Moments m = moments(row, width, eps);
    for (int64_t c = 0; c < width; c += VW)
      write(out + t * width + c, (read(row + c, width - c) - m.mean) * m.inverse, width - c);
  }
}

// dx = dout + gradient of x through xhat, whose gradient is dxhat
template <class E>
static void norm_backward(int64_t tokens, int64_t width, const float* x, const E* dxhat, const float* dout, float eps,
                          float* dx, int threads) {
  EACH_ROW {
    const float* row = x + t * width;
    const E* g = dxhat + t * width;
    Moments m = moments(row, width, eps);
    Vec along{}, total{};
    for (int64_t c = 0; c < width; c += VW) {
      Vec slope = read(g + c, width - c);
      total += slope;
      along += slope * (read(row + c, width - c) - m.mean);
    }
    float mean = fold(total) / float(width), project = fold(along) * m.inverse * m.inverse / float(width);
    for (int64_t c = 0; c < width; c += VW) {
      Vec change = read(g + c, width - c) - mean - (read(row + c, width - c) - m.mean) * project;
      write(dx + t * width + c, read(dout + t * width + c, width - c) + change * m.inverse, width - c);
    }
  }
}

// out [T, 3 D] = SiLU of v, q, k
template <class E>
static void activate(int64_t tokens, int64_t width, const E* z, E* out, int threads) {
  EACH_ROW {
    const E* row = z + t * 4 * width + width;
    for (int64_t c = 0; c < 3 * width; c += VW) {
      Vec x = read(row + c, 3 * width - c);
      write(out + t * 3 * width + c, x * sigmoid(x), 3 * width - c);
    }
  }
}

// dz of v, q, k from the gradients of their SiLU, in place
template <class E>
static void activate_backward(int64_t tokens, int64_t width, const E* z, E* dz, int threads) {
  EACH_ROW {
    const E* row = z + t * 4 * width + width;
    E* slopes = dz + t * 4 * width + width;
    for (int64_t c = 0; c < 3 * width; c += VW)
      write(slopes + c, read(slopes + c, 3 * width - c) * silu(read(row + c, 3 * width - c)).slope, 3 * width - c);
  }
}

template <class E>
static void gate(int64_t tokens, int64_t width, const E* z, const E* y, float eps, const Dropout* given, E* out,
                 int threads) {
  const Dropout d = *given;
  EACH_ROW {
    const E *row = y + t * width, *u = z + t * 4 * width;
    Moments m = moments(row, width, eps);
    with_dropout(d, t, width, [&](int64_t c, int64_t left, Vec factor) {
      Vec yhat = (read(row + c, left) - m.mean) * m.inverse;
      write(out + t * width + c, yhat * silu(read(u + c, left)).value * factor, left);
    });
  }
}

// From the gradient of `gated`: that of y in its place, that of z's first D columns, and `gated` again.
template <class E>
static void gate_backward(int64_t tokens, int64_t width, const E* z, const E* y, float eps, const Dropout* given,
                          E* dgated_dy, E* dz, E* gated, int threads) {
  const Dropout d = *given;
#pragma omp parallel num_threads(threads)
  {
    // gradient of yhat, and yhat, of one row
    float* const scratch = new float[2 * (width + BLOCK)];
    float *const dyhat = scratch, *const normed = scratch + width + BLOCK;
#pragma omp for schedule(static)
    for (int64_t t = 0; t < tokens; t++) {
      const E *row = y + t * width, *u = z + t * 4 * width;
      E* dy = dgated_dy + t * width;
      Moments m = moments(row, width, eps);
      Vec along{}, total{};
      with_dropout(d, t, width, [&](int64_t c, int64_t left, Vec factor) {
        Vec yhat = (read(row + c, left) - m.mean) * m.inverse, g = read(dy + c, left) * factor;
        Silu a = silu(read(u + c, left));
        write(gated + t * width + c, yhat * a.value * factor, left);
        write(dz + t * 4 * width + c, g * yhat * a.slope, left);
        Vec slope = g * a.value;
        total += slope;
        along += slope * yhat;
        store(dyhat + c, slope);
        store(normed + c, yhat);
      });
      float mean = fold(total) / float(width), project = fold(along) / float(width);
      for (int64_t c = 0; c < width; c += VW)
        write(dy + c, (load(dyhat + c) - mean - load(normed + c) * project) * m.inverse, width - c);
    }
    delete[] scratch;
  }
}

// out = x + product + bias; `out` may be `product` where both are fp32
template <class E>
static void residual(int64_t tokens, int64_t width, const float* x, const E* product, const float* bias, float* out,
                     int threads) {
  EACH_ROW {
    for (int64_t c = 0; c < width; c += VW) {
      int64_t left = width - c, at = t * width + c;
      write(out + at, read(x + at, left) + (read(product + at, left) + read(bias + c, left)), left);
    }
  }
}

// out [D] = sum of x's rows: blocks of rows, then the blocks in order, whatever the number of threads
#define ROWS 256
EXPORT void hstu_column_sums(int64_t tokens, int64_t width, const float* x, float* out, int threads) {
  int64_t blocks = (tokens + ROWS - 1) / ROWS;
  float* const part = new float[blocks * width];
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t b = 0; b < blocks; b++) {
    int64_t end = tokens < (b + 1) * ROWS ? tokens : (b + 1) * ROWS;
    for (int64_t c = 0; c < width; c += VW) {
      Vec total{};
      for (int64_t t = b * ROWS; t < end; t++) total += read(x + t * width + c, width - c);
      write(part + b * width + c, total, width - c);
    }
  }
  for (int64_t c = 0; c < width; c++) out[c] = 0;
  for (int64_t b = 0; b < blocks; b++)
    for (int64_t c = 0; c < width; c++) out[c] += part[b * width + c];
  delete[] part;
}

// Runs `pass` with an element of the type that the caller's arrays have.
template <class Pass>
static void typed(int bf16, Pass pass) {
  if (bf16)
    pass(Bf16{});
  else
    pass(float{});
}

EXPORT void hstu_norm(int bf16, int64_t tokens, int64_t width, const float* x, float eps, void* out, int threads) {
  typed(bf16, [&](auto e) { norm(tokens, width, x, eps, (decltype(e)*)out, threads); });
}

EXPORT void hstu_norm_backward(int bf16, int64_t tokens, int64_t width, const float* x, const void* dxhat,
                               const float* dout, float eps, float* dx, int threads) {
  typed(bf16, [&](auto e) { norm_backward(tokens, width, x, (const decltype(e)*)dxhat, dout, eps, dx, threads); });
}

EXPORT void hstu_activate(int bf16, int64_t tokens, int64_t width, const void* z, void* out, int threads) {
  typed(bf16, [&](auto e) { activate(tokens, width, (const decltype(e)*)z, (decltype(e)*)out, threads); });
}

EXPORT void hstu_activate_backward(int bf16, int64_t tokens, int64_t width, const void* z, void* dz, int threads) {
  typed(bf16, [&](auto e) { activate_backward(tokens, width, (const decltype(e)*)z, (decltype(e)*)dz, threads); });
}

EXPORT void hstu_gate(int bf16, int64_t tokens, int64_t width, const void* z, const void* y, float eps,
                      const Dropout* d, void* out, int threads) {
  typed(bf16, [&](auto e) {
    using E = decltype(e);
    gate(tokens, width, (const E*)z, (const E*)y, eps, d, (E*)out, threads);
  });
}

EXPORT void hstu_gate_backward(int bf16, int64_t tokens, int64_t width, const void* z, const void* y, float eps,
                               const Dropout* d, void* dgated_dy, void* dz, void* gated, int threads) {
  typed(bf16, [&](auto e) {
    using E = decltype(e);
    gate_backward(tokens, width, (const E*)z, (const E*)y, eps, d, (E*)dgated_dy, (E*)dz, (E*)gated, threads);
  });
}

EXPORT void hstu_residual(int bf16, int64_t tokens, int64_t width, const float* x, const void* product,
                          const float* bias, float* out, int threads) {
  typed(bf16, [&](auto e) { residual(tokens, width, x, (const decltype(e)*)product, bias, out, threads); });
}
