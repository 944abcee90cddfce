// Cone scores for the CPU engine: the terms of terms.py on one register of pairs (formulas and statistics there).
#pragma once

#include "../../engines/cpu/score.h"

namespace cone {

using namespace hyper;

constexpr float kSmallest = 1e-15f, kLowest = 1e-6f;  // of a distance and a height that are divided by
constexpr float kEpsilon = 1.1920929e-07f, kBlur = 16.0f * kEpsilon * kEpsilon;
constexpr float kNear = 1e-3f, kNearest = 0.0625f, kExact = 1.42e-6f;  // as in terms.py

// Squared distances from the product or, where that cancels, from differences. Statistics, after the `Own` of the score:
// |X|², and where the product is the host's, the stretch and the last coordinate. D² is `weight` times the square.
template <int Own, bool OnProduct>
struct Distance {
  static constexpr int count = Own + (OnProduct ? 3 : 1);
  Vec square, gap, inner, clear;  // |X_q - X_k|² and D²
  Ints near;  // pairs that were taken from differences
  float weight;
  bool some;  // of them

  Distance() = default;

  Distance(const Pair& p, float times) : square{}, clear{}, near{}, weight(times), some(false) {
    if (p.gap) {
      gap = *p.gap;
      return;
    }
    inner = p.dot;
    Vec last = {}, size = splat(p.row[Own]);
    if constexpr (OnProduct) last = p.row[Own + 2] * p.column[Own + 2], inner = inner - last;
    Vec twice = inner * -2.0f;
    if constexpr (OnProduct) {
      const Vec stretch = p.column[Own + 1] * p.row[Own + 1];
      twice = twice * stretch, size = size + magnitude(last * stretch);
    }
    square = twice + p.column[Own] + p.row[Own], gap = weight * square;
    clear = square - size * larger(splat(kNear), smaller(kExact * weight * size, splat(kNearest)));
    if (!p.exact) return;
    near = clear < Vec{}, some = any(near);
    if (some) [[unlikely]] {
      square = p.gap_from_differences(splat(query_factor(p)), key_factor(p), p.dim - OnProduct);
      square = square <= kBlur * size ? Vec{} : square;  // points that coincide but for rounding
      gap = weight * square;
    }
  }

  static float query_factor(const Pair& p) { return OnProduct ? p.row[Own + 1] : 1.0f; }
  static Vec key_factor(const Pair& p) { return OnProduct ? p.column[Own + 1] : splat(1.0f); }

  // From the logit's gradient and its slope by D².
  template <class S>
  void pull(const Pair& p, Vec grad, Vec slope, S& s) const {
    slope = gap <= Vec{} ? Vec{} : slope;
    s.head[S::heads - 1] = slope * square;
    const Vec d_square = grad * slope * weight, by_product = near ? Vec{} : d_square;
    s.row[Own] = s.column[Own] = by_product;
    s.dot = -2.0f * by_product;
    if constexpr (OnProduct) {
      const Vec change = s.dot * inner;
      s.row[Own + 1] = change * p.column[Own + 1];
      s.column[Own + 1] = change * p.row[Own + 1];
      s.dot = s.dot * p.column[Own + 1] * p.row[Own + 1];
      s.row[Own + 2] = -s.dot * p.column[Own + 2];
      s.column[Own + 2] = -s.dot * p.row[Own + 2];
    }
    if (some) [[unlikely]] pull_differences(p, near ? d_square : Vec{}, s);
  }

  template <class S>
  [[gnu::noinline, gnu::cold]] static void pull_differences(const Pair& p, Vec d_square, S& s) {
    const float q = query_factor(p);
    const Vec factors = key_factor(p);
    for (int i = 0; i < kLanes; ++i) {
      if (d_square[i] == 0) continue;
      const float k = factors[i], slope = 2.0f * d_square[i];
      p.add_difference(i, q, k, p.dim - OnProduct, slope * q, -slope * k);
      if constexpr (OnProduct) {
        const auto inner = p.inner_of_difference(i, q, k, p.dim - OnProduct);
        s.row[Own + 1][i] = slope * inner.query;
        s.column[Own + 1][i] = -slope * inner.key;
      }
    }
  }
};

template <bool OnProduct>
struct Umbral {
  using Gap = Distance<1, OnProduct>;
  static constexpr int rows = Gap::count, columns = Gap::count, heads = 1;
  struct State {
    Vec logit, w;
    Gap distance;
  };

  static State open(const Pair& p) {
    const Gap distance(p, p.head[0]);
    const Vec u = p.row[0] - p.column[0], w = root(larger(distance.gap, u * u));
    return {-p.column[0] - w - p.row[0], w, distance};
  }

  static Vec clearance(const State& state) { return state.distance.clear; }

  static Slopes<rows, columns, heads> pull(const Pair& p, const State& state, Vec grad) {
    Slopes<rows, columns, heads> s;
    const Vec u = p.row[0] - p.column[0];
    const Ints near = state.distance.gap <= u * u;
    const Vec slope = near ? Vec{} : -0.5f / larger(state.w, splat(kSmallest));
    const Vec d_u = near ? (u > Vec{} ? -grad : (u < Vec{} ? grad : Vec{})) : Vec{};
    state.distance.pull(p, grad, slope, s);
    s.row[0] = d_u - grad;
    s.column[0] = -d_u - grad;
    return s;
  }
};

template <bool OnProduct, bool Squared>
struct Penumbral {
  using Gap = Distance<2, OnProduct>;
  static constexpr int rows = Gap::count, columns = Gap::count, heads = 2;
  struct State {
    Vec logit, ratio, distance, half;
    Ints outside, between;  // no cone holds the other point; one of neither's own height holds both
    Gap from;
  };

  static State open(const Pair& p) {
    const Gap from(p, p.head[1]);
    const Vec gap = larger(from.gap, splat(kSmallest * kSmallest)), distance = root(gap);
    const Vec pq = splat(p.row[0]), pk = p.column[0], a = splat(p.row[1]), b = p.column[1];
    const Vec half = 0.5f * (a + b - (from.gap <= Vec{} ? Vec{} : distance)), difference = pk - pq;
    const Ints outside = half < Vec{}, between = ~outside & ~(half >= smaller(a, b));  // NaN is between
    const Vec ratio = larger(smaller(difference / gap, splat(1.0f)), splat(-1.0f));  // is between where it counts, outside
    const Vec apart = 0.25f * (gap + 2.0f * (pq + pk) + difference * ratio);
    const Vec height2 = outside ? apart : (between ? p.head[0] - half * half : larger(pq, pk));
    const Vec logit = Squared ? -height2 : -root(larger(height2, splat(kLowest * kLowest)));
    return {logit, ratio, distance, half, outside, between, from};
  }

  static Vec clearance(const State& state) { return state.from.clear; }

  static Slopes<rows, columns, heads> pull(const Pair& p, const State& state, Vec grad) {
    Slopes<rows, columns, heads> s;
    const Vec slope = Squared ? splat(-1.0f) : 0.5f / state.logit, d_h2 = slope * grad;  // of the squared height
    const Vec out = state.outside ? d_h2 : Vec{}, both = state.between ? d_h2 : Vec{}, higher = d_h2 - out - both;
    const Vec ratio = state.ratio, pq = splat(p.row[0]), pk = p.column[0];
    const Vec by_q = pq > pk ? higher : (pq < pk ? Vec{} : 0.5f * higher);  // equal heights share it evenly
    const Vec d_half = -both * state.half;  // of each half width; the distance counts as much, less
    const Vec by_gap = state.outside ? 0.25f * (1.0f - ratio * ratio) : 0.5f * state.half / state.distance;
    state.from.pull(p, grad, state.outside | state.between ? slope * by_gap : Vec{}, s);
    s.row[0] = 0.5f * out * (1.0f - ratio) + by_q;
    s.row[1] = s.column[1] = d_half;
    s.column[0] = 0.5f * out * (1.0f + ratio) + higher - by_q;
    s.head[0] = state.between ? slope : Vec{};
    return s;
  }
};

// Statistics of vectors from the vectors themselves, as features.py makes them, for pairs whose gap is known: of the
// distance only that is read. Parameters: gamma and the radius.
enum Mapping { kXi, kPsi };

template <Mapping Map, bool IsPenumbral, bool Squared, bool Clamped, bool OnProduct>
struct Vectors {
  static constexpr int own = IsPenumbral ? 2 : 1, columns = own + (OnProduct ? 3 : 1), left_out = 1;
  static constexpr bool norms = false;

  static Vec read(Vec last, Vec, float dim, const float* head, Vec* statistic) {
    const float gamma = head[0], unit = Map == kPsi ? head[1] : 1.0f;
    Vec stretch;
    if constexpr (Map == kXi) stretch = exponential(smaller(larger(last / dim, splat(-10.0f)), splat(10.0f)));
    else stretch = 1.0f / (1.0f + exponential(-last));
    for (int i = own; i < columns; ++i) statistic[i] = Vec{};
    if constexpr (!IsPenumbral) {
      statistic[0] = stretch * (unit * gamma / 2);
      return stretch * (unit * gamma / 2 / std::sinh(head[1]));
    }
    const float weight = Squared ? std::sqrt(gamma) : gamma, radius = head[1] * weight, square = radius * radius;
    Vec h = stretch * (unit * weight);
    if constexpr (Clamped) h = smaller(h, splat((1.0f - 1e-3f) * radius));
    statistic[0] = h * h;
    statistic[IsPenumbral] = root(larger(square - h * h, splat(1e-6f * square)));
    return stretch * (unit * weight);
  }
};

}  // namespace cone
