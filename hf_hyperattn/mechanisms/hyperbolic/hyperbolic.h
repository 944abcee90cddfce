// Hyperbolic-distance scores for the CPU engine: the terms of terms.py on one register of pairs (formulas, statistics
// and the meaning of the constants there). Pairs whose distance the product form loses are taken from differences.
#pragma once

#include "../../engines/cpu/score.h"

namespace hyperbolic {

using namespace hyper;

constexpr float kEpsilon = 1.1920929e-07f, kNoise = 4.0f * kEpsilon, kBlur = 256.0f * kEpsilon * kEpsilon;
constexpr float kExact = 2e-4f, kSteep = 2048.0f, kRelative = 1e-5f;
constexpr float kFarthest = 6.1030338f;  // artanh(1 - 1e-5), as in points.py

// w = sinh² of half the distance, and what its gradient needs.
template <bool OnProduct>
struct Separation {
  static constexpr int count = OnProduct ? 3 : 2;
  Vec opening, x, w, p_q, p_k, noise;
  Ints near;  // pairs that were taken from differences, of features times these factors
  float query_factor;
  Vec key_factor;

  Separation() = default;
  explicit Separation(const Pair& p) : near{}, query_factor(0), key_factor{} {
    Vec cosine = p.dot;
    if constexpr (OnProduct) cosine = cosine * p.column[2] * p.row[2];
    p_q = splat(p.row[0] * p.row[1]), p_k = p.column[0] * p.column[1];
    // sinh(a_q - a_k) in a form that is exactly 0 for equal radii, however products are rounded
    x = (p.row[0] - p.column[0]) * p.column[1] - (p.row[1] - p.column[1]) * p.column[0];
    noise = kNoise * p_q * p_k;
    set_opening(p.gap ? *p.gap : larger(2.0f - 2.0f * cosine, Vec{}));
    if (p.gap) noise = kBlur * p_q * p_k;
  }

  void set_opening(Vec to) {
    opening = to;
    w = opening * p_k * p_q + x * x;
  }

  // The squared distance of the two directions from differences, where these pairs need it.
  void use_differences(const Pair& p, Ints pairs) {
    Vec square_k = {};
    float square_q = 0;
    for (int64_t e = 0; e < p.dim; ++e) {
      const Vec k = load(p.keys + e * kPanel);
      square_k += k * k, square_q += p.query[e] * p.query[e];
    }
    const Vec least = splat(1e-30f);
    const Vec factor_q = 1.0f / root(larger(splat(square_q), least));
    near = pairs, query_factor = factor_q[0], key_factor = 1.0f / root(larger(square_k, least));
    set_opening(p.gap_from_differences(factor_q, key_factor, p.dim));
    noise = kBlur * p_q * p_k;
  }

  // What rounding leaves of the distance of coinciding points must not steer a gradient that is steep there.
  Vec without_noise(Vec d_w) const { return w <= noise ? Vec{} : d_w; }

  template <class S>
  void pull(const Pair& p, Vec d_w, S& s) const {
    const Vec d_x = 2.0f * x * d_w, inner = d_w * opening, by_row = inner * p_k, by_column = inner * p_q;
    s.row[0] = d_x * p.column[1] + p.row[1] * by_row;
    s.row[1] = p.row[0] * by_row - d_x * p.column[0];
    s.column[0] = p.column[1] * by_column - p.row[1] * d_x;
    s.column[1] = p.row[0] * d_x + p.column[0] * by_column;
    s.dot = near ? Vec{} : -2.0f * d_w * p_k * p_q;
    if constexpr (OnProduct) {
      const Vec turned = s.dot * p.dot;
      s.row[2] = turned * p.column[2];
      s.column[2] = turned * p.row[2];
      s.dot = s.dot * p.column[2] * p.row[2];
    }
    if (query_factor > 0) [[unlikely]] pull_differences(p, near ? d_w * p_k * p_q : Vec{}, s);
  }

  // From the gradient of the squared distance of the directions.
  template <class S>
  void pull_differences(const Pair& p, Vec d_opening, S& s) const {
    for (int i = 0; i < kLanes; ++i) {
      if (d_opening[i] == 0) continue;
      const float q = query_factor, k = key_factor[i], slope = 2.0f * d_opening[i];
      p.add_difference(i, q, k, p.dim, slope * q, -slope * k);
      if constexpr (OnProduct) {
        const auto inner = p.inner_of_difference(i, q, k, p.dim);
        s.row[2][i] = slope * inner.query;
        s.column[2][i] = -slope * inner.key;
      }
    }
  }
};

template <bool OnProduct>
struct Geodesic {
  static constexpr int rows = Separation<OnProduct>::count, columns = rows, heads = 1;
  struct State {
    Vec logit, slope, distance;
    Separation<OnProduct> from;
  };

  static State open(const Pair& p) {
    Separation<OnProduct> from(p);
    Vec slope = root(from.w + from.w * from.w);
    const Ints near = (p.head[0] * from.noise > kExact * slope) | (from.w < kSteep * from.noise);
    if (!p.gap && any(near)) [[unlikely]] {
      from.use_differences(p, near);
      slope = root(from.w + from.w * from.w);
    }
    const Vec distance = log_of_one_plus(2.0f * (from.w + slope));
    return {-p.head[0] * distance, slope, distance, from};
  }

  static Slopes<rows, columns, heads> pull(const Pair& p, const State& state, Vec grad) {
    Slopes<rows, columns, heads> s;
    const Vec d_w = -p.head[0] * grad / larger(state.slope, splat(1e-30f));
    state.from.pull(p, state.from.without_noise(d_w), s);
    s.head[0] = -state.distance;
    return s;
  }
};

template <bool OnProduct>
struct SquaredLorentz {
  static constexpr int rows = Separation<OnProduct>::count, columns = rows, heads = 1;
  struct State {
    Vec logit;
    Separation<OnProduct> from;
  };

  static State open(const Pair& p) {
    Separation<OnProduct> from(p);
    const Ints near = (p.head[0] * from.noise > splat(kExact)) & (from.noise > kRelative * from.w);
    if (!p.gap && any(near)) [[unlikely]] from.use_differences(p, near);
    return {-p.head[0] * from.w, from};
  }

  static Slopes<rows, columns, heads> pull(const Pair& p, const State& state, Vec grad) {
    Slopes<rows, columns, heads> s;
    // by the product there is nothing to leave out: the slope by w is the same everywhere
    const Ints coincide = state.from.near & (state.from.w <= state.from.noise);
    state.from.pull(p, coincide ? Vec{} : -p.head[0] * grad, s);
    s.head[0] = -state.from.w;
    return s;
  }
};

// Statistics of vectors from the vectors themselves, as features.py makes them, for pairs whose gap is known. Parameters:
// the curvature, and what vectors are scaled with.
template <bool OnProduct>
struct Vectors {
  static constexpr int columns = Separation<OnProduct>::count, left_out = 0;
  static constexpr bool norms = true;

  static Vec read(Vec, Vec square, float, const float* head, Vec* statistic) {
    const Vec norm = larger(head[1] * root(square), splat(1e-15f));
    const Vec sine = hyperbolic_sine(smaller(std::sqrt(head[0]) * norm, splat(kFarthest)));
    statistic[0] = sine;
    statistic[1] = root(1.0f + sine * sine);
    if constexpr (OnProduct) statistic[2] = Vec{};  // the product is not read
    return head[1] / norm;
  }
};

}  // namespace hyperbolic
