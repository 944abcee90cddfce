// Cone scores for the CPU engine: the terms of terms.py on one register of pairs (formulas and statistics there).
#pragma once

#include "../../engines/cpu/score.h"

namespace cone {

using namespace hyper;

constexpr float kSmallest = 1e-15f, kLowest = 1e-6f;  // of a distance and a height that are divided by
constexpr float kEpsilon = 1.1920929e-07f, kBlur = 16.0f * kEpsilon * kEpsilon;
constexpr float kNear = 1e-3f, kNearest = 0.0625f, kExact = 1.42e-6f;  // as in terms.py

// Squared distances from the product or, where that cancels, from differences. Statistics, after the `Own` of the score:
// |X|², and where the product is the host's, the stretch and the last coordinate. `weight` is what |X_q - X_k|² is
// multiplied with; query features and the stretch of queries have it as a factor.
template <int Own, bool OnProduct>
struct Distance {
  static constexpr int count = Own + (OnProduct ? 3 : 1);
  Vec gap, inner, clear;
  Ints near;  // pairs that were taken from differences
  float weight;
  bool some;  // of them

  Distance() = default;

  Distance(const Pair& p, float times) : clear{}, near{}, weight(times), some(false) {
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
    gap = twice + p.column[Own] + p.row[Own];
    clear = gap - size * larger(splat(kNear), smaller(kExact * size, splat(kNearest)));
    if (!p.exact) return;
    near = clear < Vec{}, some = any(near);
    if (some) [[unlikely]] {
      gap = weight * p.gap_from_differences(splat(query_factor(p)), key_factor(p), p.dim - OnProduct);
      gap = gap <= kBlur * size ? Vec{} : gap;  // points that coincide but for rounding
    }
  }

  float query_factor(const Pair& p) const { return (OnProduct ? p.row[Own + 1] : 1.0f) / weight; }
  static Vec key_factor(const Pair& p) { return OnProduct ? p.column[Own + 1] : splat(1.0f); }

  template <class S>
  void pull(const Pair& p, Vec d_gap, S& s) const {
    const Vec by_product = near ? Vec{} : d_gap;
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
    if (some) [[unlikely]] pull_differences(p, near ? d_gap : Vec{}, s);
  }

  // The gradient by weight, d_gap · |X_q - X_k|², comes about upstream: by the query's features as
  // 2 d_gap (X_q - X_k)·X_q, and the rest, d_gap (|X_k|² - |X_q|²), by the key's |X|², which has weight as a factor; what
  // else that does to the key is taken off there.
  template <class S>
  [[gnu::noinline, gnu::cold]] void pull_differences(const Pair& p, Vec d_gap, S& s) const {
    const float q = query_factor(p);
    const Vec factors = key_factor(p);
    for (int i = 0; i < kLanes; ++i) {
      if (d_gap[i] == 0) continue;
      const float k = factors[i], slope = 2.0f * d_gap[i] * weight;
      const auto inner = p.inner_of_difference(i, q, k, p.dim - OnProduct);
      const float square = k * k * inner.square, longer = -(q * inner.query + k * inner.key);
      const float d_norm = square > 0 ? d_gap[i] * longer / square : 0.0f, rest = -2.0f * d_norm * weight * k;
      p.add_difference(i, q, k, p.dim - OnProduct, slope * q, -slope * k, rest * k);
      s.column[Own][i] = d_norm;
      if constexpr (OnProduct) {
        s.row[Own + 1][i] = slope * inner.query / weight;
        s.column[Own + 1][i] = rest * inner.square - slope * inner.key;
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
    const Vec d_gap = near ? Vec{} : -0.5f * grad / larger(state.w, splat(kSmallest));
    const Vec d_u = near ? (u > Vec{} ? -grad : (u < Vec{} ? grad : Vec{})) : Vec{};
    state.distance.pull(p, d_gap, s);
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
    const Vec d_gap = 0.25f * out * (1.0f - ratio * ratio) - d_half * (0.5f / state.distance);
    state.from.pull(p, state.from.gap <= Vec{} ? Vec{} : d_gap, s);
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
