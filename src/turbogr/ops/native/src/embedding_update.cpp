// Row optimizers on (distinct ids, gradients); the gradients of an id may still be apart, one per occurrence: then they
// are summed here, row by row, and no [U, D] tensor of sums exists. Formulas: turbogr/ops/embedding/reference.py.
#include <cmath>

#include "embedding.h"

// What every update is given. A gradient counts `scale` times, and a row of it is cut to the norm `row_clip` (0: not).
struct Given {
  int64_t distinct, dim;
  const int64_t* ids;  // [U] ascending
  float scale, row_clip;
};

static float sum_of_squares(const float* x, int64_t dim) {
  Vec total{};
  int64_t d = 0;
  for (; d + VW <= dim; d += VW) total += load(x + d) * load(x + d);
  if (d < dim) {
    Vec rest = load_first(x + d, int(dim - d));
    total += rest * rest;
  }
  return sum(total);
}

// What the gradient g [D] is multiplied by.
static float factor(const Given& given, const float* g) {
  if (given.row_clip <= 0) return given.scale;
  float norm = std::sqrt(sum_of_squares(g, given.dim)) * std::fabs(given.scale);
  return norm > given.row_clip ? given.scale * (given.row_clip / norm) : given.scale;
}

// update(id, gradient [D], factor) for every distinct id; `touch(id)` says what it will read.
template <class Update, class Touch>
static void every_touched_row(const Given& given, const Gradients& gradients, int threads, Touch touch, Update update) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch(size_t(given.dim) + VW);
#pragma omp for schedule(dynamic, 64)
    for (int64_t u = 0; u < given.distinct; u++) {
      if (u + AHEAD < given.distinct) touch(given.ids[u + AHEAD]);
      const float* g = gradients.row(u, scratch.data());
      update(given.ids[u], g, factor(given, g));
    }
  }
}

EXPORT void embedding_adagrad(int64_t distinct, int64_t dim, const int64_t* ids, const float* values,
                              const int32_t* order, const int64_t* starts, float scale, float row_clip, float* weight,
                              float* total, float lr, float eps, int threads) {
  Given given{distinct, dim, ids, scale, row_clip};
  Gradients gradients(values, dim, order, starts, distinct, threads);
  auto touch = [=](int64_t id) {
    prefetch_row(weight + id * dim, dim);
    __builtin_prefetch(total + id);
  };
  every_touched_row(given, gradients, threads, touch, [=](int64_t id, const float* g, float factor) {
    float sum = total[id] + factor * factor * sum_of_squares(g, dim) / float(dim);
    float rate = factor * lr / (std::sqrt(sum) + eps);
    total[id] = sum;
    float* __restrict__ w = weight + id * dim;
    for (int64_t d = 0; d < dim; d++) w[d] -= rate * g[d];
  });
}

// The moments' shares and the step's bias corrections.
struct Adam {
  float beta1, beta2, eps, rate, unbias2;  // rate = lr / (1 - beta1^step), unbias2 = 1 / (1 - beta2^step)
};

EXPORT void embedding_lazy_adam(int64_t distinct, int64_t dim, const int64_t* ids, const float* values,
                                const int32_t* order, const int64_t* starts, float scale, float row_clip, float* weight,
                                float* moment1, float* moment2, float beta1, float beta2, float eps, float rate,
                                float unbias2, int threads) {
  Given given{distinct, dim, ids, scale, row_clip};
  Adam adam{beta1, beta2, eps, rate, unbias2};
  Gradients gradients(values, dim, order, starts, distinct, threads);
  auto touch = [=](int64_t id) {
    for (const float* rows : {weight, moment1, moment2}) prefetch_row(rows + id * dim, dim);
  };
  every_touched_row(given, gradients, threads, touch, [=](int64_t id, const float* g, float factor) {
    float *__restrict__ w = weight + id * dim, *__restrict__ m1 = moment1 + id * dim;
    float* __restrict__ m2 = moment2 + id * dim;
    for (int64_t d = 0; d < dim; d++) {
      float x = factor * g[d];
      m1[d] += (x - m1[d]) * (1 - adam.beta1);
      m2[d] += (x * x - m2[d]) * (1 - adam.beta2);
      w[d] -= adam.rate * m1[d] / (std::sqrt(m2[d] * adam.unbias2) + adam.eps);
    }
  });
}

// AdamW on all N rows, those without a gradient included; decay = 1 - lr * weight decay.
EXPORT void embedding_adamw(int64_t num_rows, int64_t distinct, int64_t dim, const int64_t* ids, const float* values,
                            const int32_t* order, const int64_t* starts, float scale, float row_clip, float* weight,
                            float* moment1, float* moment2, float beta1, float beta2, float eps, float rate,
                            float unbias2, float decay, int threads) {
  Given given{distinct, dim, ids, scale, row_clip};
  Adam adam{beta1, beta2, eps, rate, unbias2};
  Gradients gradients(values, dim, order, starts, distinct, threads);
  const int64_t rows = 64;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch(size_t(dim) + VW), none(size_t(dim), 0.0f);
#pragma omp for schedule(static)
    for (int64_t begin = 0; begin < num_rows; begin += rows) {
      int64_t u = std::lower_bound(ids, ids + distinct, begin) - ids;
      for (int64_t id = begin; id < std::min(begin + rows, num_rows); id++) {
        bool touched = u < distinct && ids[u] == id;
        const float* g = touched ? gradients.row(u++, scratch.data()) : none.data();
        float times = touched ? factor(given, g) : 0.0f;
        float *__restrict__ w = weight + id * dim, *__restrict__ m1 = moment1 + id * dim;
        float* __restrict__ m2 = moment2 + id * dim;
        for (int64_t d = 0; d < dim; d++) {
          float x = times * g[d];
          m1[d] = adam.beta1 * m1[d] + (1 - adam.beta1) * x;
          m2[d] = adam.beta2 * m2[d] + (1 - adam.beta2) * x * x;
          w[d] = decay * w[d] - adam.rate * m1[d] / (std::sqrt(m2[d] * adam.unbias2) + adam.eps);
        }
      }
    }
  }
}
