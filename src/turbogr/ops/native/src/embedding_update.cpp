// Row optimizers on (distinct ids, gradients); the gradients of an id may still be apart, one per occurrence: then they
// are summed here, row by row, and no [U, D] tensor of sums exists. Formulas: turbogr/ops/embedding/reference.py.
//
// Weights are fp32 or bf16, everything else is fp32: a bf16 row is widened, updated, and rounded when it is stored.
#include <cmath>

#include "embedding.h"
#include "rounding.h"

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

// The weights [N, D]: `open` answers row r as fp32, where it lies or in `room` [D]; `close` stores what it has become.
struct Single {
  float* rows;
  int64_t dim;
  void touch(int64_t r) const { prefetch_row(rows + r * dim, dim); }
  float* open(int64_t r, float*) const { return rows + r * dim; }
  void close(int64_t, const float*) const {}
};

struct Half {
  Bf16* rows;
  int64_t dim;
  Rounding rounding;
  void touch(int64_t r) const { prefetch_row((const float*)(rows + r * dim), (dim + 1) / 2); }
  float* open(int64_t r, float* room) const {
    widen_row(rows + r * dim, dim, room);
    return room;
  }
  void close(int64_t r, const float* row) const { round_row(rounding, r, row, dim, rows + r * dim); }
};

enum Kind : int32_t { SINGLE = 0, HALF_NEAREST = 1, HALF_BY_CHANCE = 2 };

// body(weights of the kind that they are).
template <class Body>
static void with_weights(void* weight, int64_t dim, int32_t kind, Rounding rounding, Body body) {
  rounding.nearest = kind == HALF_NEAREST;
  if (kind == SINGLE)
    body(Single{(float*)weight, dim});
  else
    body(Half{(Bf16*)weight, dim, rounding});
}

// update(id, gradient [D], factor, room [D]) for every distinct id; `touch(id)` says what it will read.
template <class Update, class Touch>
static void every_touched_row(const Given& given, const Gradients& gradients, int threads, Touch touch, Update update) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch(size_t(given.dim) + VW), room(size_t(given.dim) + VW);
#pragma omp for schedule(dynamic, 64)
    for (int64_t u = 0; u < given.distinct; u++) {
      if (u + AHEAD < given.distinct) touch(given.ids[u + AHEAD]);
      const float* g = gradients.row(u, scratch.data());
      update(given.ids[u], g, factor(given, g), room.data());
    }
  }
}

EXPORT void embedding_adagrad(int64_t distinct, int64_t dim, const int64_t* ids, const float* values,
                              const int32_t* order, const int64_t* starts, float scale, float row_clip, void* weight,
                              int32_t kind, uint64_t seed, uint32_t step, uint32_t purpose, const int64_t* names,
                              float* total, float lr, float eps, int threads) {
  Given given{distinct, dim, ids, scale, row_clip};
  Gradients gradients(values, dim, order, starts, distinct, threads);
  with_weights(weight, dim, kind, {seed, step, purpose, names, false}, [&](auto rows) {
    auto touch = [=](int64_t id) {
      rows.touch(id);
      __builtin_prefetch(total + id);
    };
    every_touched_row(given, gradients, threads, touch, [=](int64_t id, const float* g, float factor, float* room) {
      float sum = total[id] + factor * factor * sum_of_squares(g, dim) / float(dim);
      float rate = factor * lr / (std::sqrt(sum) + eps);
      total[id] = sum;
      float* __restrict__ w = rows.open(id, room);
      for (int64_t d = 0; d < dim; d++) w[d] -= rate * g[d];
      rows.close(id, w);
    });
  });
}

// The moments' shares and the step's bias corrections.
struct Adam {
  float beta1, beta2, eps, rate, unbias2;  // rate = lr / (1 - beta1^step), unbias2 = 1 / (1 - beta2^step)
};

EXPORT void embedding_lazy_adam(int64_t distinct, int64_t dim, const int64_t* ids, const float* values,
                                const int32_t* order, const int64_t* starts, float scale, float row_clip, void* weight,
                                int32_t kind, uint64_t seed, uint32_t step, uint32_t purpose, const int64_t* names,
                                float* moment1, float* moment2, float beta1, float beta2, float eps, float rate,
                                float unbias2, int threads) {
  Given given{distinct, dim, ids, scale, row_clip};
  Adam adam{beta1, beta2, eps, rate, unbias2};
  Gradients gradients(values, dim, order, starts, distinct, threads);
  with_weights(weight, dim, kind, {seed, step, purpose, names, false}, [&](auto rows) {
    auto touch = [=](int64_t id) {
      rows.touch(id);
      for (const float* moments : {moment1, moment2}) prefetch_row(moments + id * dim, dim);
    };
    every_touched_row(given, gradients, threads, touch, [=](int64_t id, const float* g, float factor, float* room) {
      float *__restrict__ w = rows.open(id, room), *__restrict__ m1 = moment1 + id * dim;
      float* __restrict__ m2 = moment2 + id * dim;
      for (int64_t d = 0; d < dim; d++) {
        float x = factor * g[d];
        m1[d] += (x - m1[d]) * (1 - adam.beta1);
        m2[d] += (x * x - m2[d]) * (1 - adam.beta2);
        w[d] -= adam.rate * m1[d] / (std::sqrt(m2[d] * adam.unbias2) + adam.eps);
      }
      rows.close(id, w);
    });
  });
}

// AdamW on all N rows, those without a gradient included; decay = 1 - lr * weight decay.
EXPORT void embedding_adamw(int64_t num_rows, int64_t distinct, int64_t dim, const int64_t* ids, const float* values,
                            const int32_t* order, const int64_t* starts, float scale, float row_clip, void* weight,
                            int32_t kind, uint64_t seed, uint32_t step, uint32_t purpose, const int64_t* names,
                            float* moment1, float* moment2, float beta1, float beta2, float eps, float rate,
                            float unbias2, float decay, int threads) {
  Given given{distinct, dim, ids, scale, row_clip};
  Adam adam{beta1, beta2, eps, rate, unbias2};
  Gradients gradients(values, dim, order, starts, distinct, threads);
  const int64_t block = 64;
  with_weights(weight, dim, kind, {seed, step, purpose, names, false}, [&](auto rows) {
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> scratch(size_t(dim) + VW), room(size_t(dim) + VW), none(size_t(dim), 0.0f);
#pragma omp for schedule(static)
      for (int64_t begin = 0; begin < num_rows; begin += block) {
        int64_t u = std::lower_bound(ids, ids + distinct, begin) - ids;
        for (int64_t id = begin; id < std::min(begin + block, num_rows); id++) {
          bool touched = u < distinct && ids[u] == id;
          const float* g = touched ? gradients.row(u++, scratch.data()) : none.data();
          float times = touched ? factor(given, g) : 0.0f;
          float *__restrict__ w = rows.open(id, room.data()), *__restrict__ m1 = moment1 + id * dim;
          float* __restrict__ m2 = moment2 + id * dim;
          for (int64_t d = 0; d < dim; d++) {
            float x = times * g[d];
            m1[d] = adam.beta1 * m1[d] + (1 - adam.beta1) * x;
            m2[d] = adam.beta2 * m2[d] + (1 - adam.beta2) * x * x;
            w[d] = decay * w[d] - adam.rate * m1[d] / (std::sqrt(m2[d] * adam.unbias2) + adam.eps);
          }
          rows.close(id, w);
        }
      }
    }
  });
}

// out [n, D] = rows [n, D] rounded as those called names[0], names[1], ...
EXPORT void embedding_round(int64_t n, int64_t dim, const float* rows, uint64_t seed, uint32_t step, uint32_t purpose,
                            const int64_t* names, Bf16* out, int threads) {
  Rounding rounding{seed, step, purpose, names, false};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < n; i++) round_row(rounding, i, rows + i * dim, dim, out + i * dim);
}
