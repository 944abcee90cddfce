// What emitted functors (engines/emit_cpp.py) call beside vectors.h and score.h.
#pragma once

#include "score.h"

namespace hyper {

// As torch's maximum and minimum: NaN where either is.
inline Vec larger_or_nan(Vec a, Vec b) { return b == b ? larger(a, b) : b; }
inline Vec smaller_or_nan(Vec a, Vec b) { return b == b ? smaller(a, b) : b; }

// log x, relative error about 1e-7; -inf at 0.
inline Vec logarithm(Vec x) {
  const Ints power = (as_bits(x) - 0x3f3504f3) >> 23;  // leaves a number from sqrt(1/2) to sqrt(2)
  const Vec near = log_of_one_plus(as_floats(as_bits(x) - (power << 23)) - 1.0f);
  const Vec log = rounded(power) * 0.693359375f + (near - rounded(power) * 2.12194440e-4f);
  return x > Vec{} ? (x < splat(kInf) ? log : x) : (x == Vec{} ? splat(-kInf) : splat(std::nanf("")));
}

// e^x - 1, relative error about 2e-7 however small x is.
inline Vec exponential_less_one(Vec x) {
  const Vec tanh = hyperbolic_tangent(0.5f * x);
  return magnitude(x) < splat(1.0f) ? 2.0f * tanh / (1.0f - tanh) : exponential(x) - 1.0f;
}

inline Vec hyperbolic_cosine(Vec x) {
  const Vec e = exponential(magnitude(x));
  return 0.5f * e + 0.5f / e;
}

// cosh x of sinh x.
inline Vec cosine_of_sine(Vec sine) {
  const Vec size = magnitude(sine), kept = smaller(size, splat(1e9f));
  return size > splat(1e9f) ? size : root(1.0f + kept * kept);
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

// |query_factor · q - key_factor · k|² over the first `width` features; 0 for points that coincide but for rounding.
inline Vec exact_squared_distance(const Pair& p, Vec query_factor, Vec key_factor, int64_t width) {
  Vec sum = {}, size = {};
  for (int64_t e = 0; e < width; ++e) {
    const Vec x = p.query[e] * query_factor, apart = x - load(p.keys + e * kPanel) * key_factor;
    sum += apart * apart, size += x * x;
  }
  constexpr float kBlur = 4.0f * 1.1920929e-07f;
  return sum <= kBlur * kBlur * size ? Vec{} : sum;
}

struct FactorGradients {
  Vec query = {}, key = {};
};

// From the gradient of that distance, 0 where it was not taken: adds those of the features, and returns the slopes of
// the distance by the factors.
[[gnu::noinline, gnu::cold]] inline FactorGradients add_differences(Pair p, Vec query_factor, Vec key_factor,
                                                                    int64_t width, Vec grad) {
  FactorGradients to;
  for (int i = 0; i < kLanes; ++i) {
    if (grad[i] == 0) continue;
    const int64_t start = (p.at_column + i) * p.tile->key_step;
    const float q = query_factor[i], k = key_factor[i], twice = 2.0f * grad[i], *key = p.tile->key_rows + start;
    float *d_q = p.tile->d_query + p.at_row * p.tile->query_step, *d_k = p.tile->d_keys + start;
    float by_query = 0, by_key = 0;
    for (int64_t e = 0; e < width; ++e) {
      const float apart = q * p.query[e] - k * key[e];
      by_query += apart * p.query[e], by_key += apart * key[e];
      d_q[e] += twice * q * apart, d_k[e] -= twice * k * apart;
    }
    to.query[i] = 2.0f * by_query, to.key[i] = -2.0f * by_key;
  }
  return to;
}

}  // namespace hyper
