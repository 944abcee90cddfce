// Cone scores for the CPU engine: the terms of terms.py on one register of pairs (formulas and statistics there).
#pragma once

#include "../../engines/cpu/score.h"

namespace cone {

using namespace hyper;

constexpr float kSmallest = 1e-6f;  // of a distance that is divided by
constexpr float kEpsilon = 1.1920929e-07f, kNoise = 8.0f * kEpsilon;  // of a product; taken off, so that ties are ties

// Squared distances from the product. Statistics, after the `Own` of the score: |X|², and where the product is the
// host's, the stretch and the last coordinate.
template <int Own, bool OnProduct>
struct Distance {
  static constexpr int count = Own + (OnProduct ? 3 : 1);
  Vec gap, inner;

  Distance() = default;

  explicit Distance(const Pair& p) {
    inner = p.dot;
    if constexpr (OnProduct) inner = inner - (1.0f - 0.5f * kNoise) * p.row[Own + 2] * p.column[Own + 2];
    Vec twice = inner * -2.0f;
    if constexpr (OnProduct) twice = twice * p.column[Own + 1] * p.row[Own + 1];
    gap = p.gap ? *p.gap : twice + p.column[Own] + (1.0f - kNoise) * p.row[Own];
  }

  // What expansion leaves of the distance of coinciding points is noise; it must not steer a gradient.
  Vec without_noise(const Pair& p, Vec d_gap) const { return gap <= kEpsilon * p.row[Own] ? Vec{} : d_gap; }

  template <class S>
  void pull(const Pair& p, Vec d_gap, S& s) const {
    s.row[Own] = s.column[Own] = d_gap;
    s.dot = -2.0f * d_gap;
    if constexpr (OnProduct) {
      const Vec change = s.dot * inner;
      s.row[Own + 1] = change * p.column[Own + 1];
      s.column[Own + 1] = change * p.row[Own + 1];
      s.dot = s.dot * p.column[Own + 1] * p.row[Own + 1];
      s.row[Own + 2] = -s.dot * p.column[Own + 2];
      s.column[Own + 2] = -s.dot * p.row[Own + 2];
    }
  }
};

template <bool OnProduct>
struct Umbral {
  using Gap = Distance<1, OnProduct>;
  static constexpr int rows = Gap::count, columns = Gap::count, heads = 0;
  struct State {
    Vec logit, w;
    Gap distance;
  };

  static State open(const Pair& p) {
    const Gap distance(p);
    const Vec u = p.row[0] - p.column[0], w = root(larger(distance.gap, u * u));
    return {-p.column[0] - w - p.row[0], w, distance};
  }

  static Slopes<rows, columns, heads> pull(const Pair& p, const State& state, Vec grad) {
    Slopes<rows, columns, heads> s;
    const Vec u = p.row[0] - p.column[0];
    const Ints near = state.distance.gap <= u * u;
    const Vec d_gap = near ? Vec{} : -0.5f * grad / larger(state.w, splat(kSmallest));
    const Vec d_u = near ? (u > Vec{} ? -grad : (u < Vec{} ? grad : Vec{})) : Vec{};
    state.distance.pull(p, state.distance.without_noise(p, d_gap), s);
    s.row[0] = d_u - grad;
    s.column[0] = -d_u - grad;
    return s;
  }
};

template <bool OnProduct, bool Squared>
struct Penumbral {
  using Gap = Distance<2, OnProduct>;
  static constexpr int rows = Gap::count, columns = Gap::count, heads = 1;
  struct State {
    Vec logit, gap, distance, half;
    Ints outside, between;  // no cone holds the other point; one of neither's own height holds both
    Gap from;
  };

  static State open(const Pair& p) {
    const Gap from(p);
    const Vec gap = larger(from.gap, splat(kSmallest * kSmallest)), distance = root(gap);
    const Vec pq = splat(p.row[0]), pk = p.column[0], a = splat(p.row[1]), b = p.column[1];
    const Vec half = 0.5f * (a + b - (from.gap <= Vec{} ? Vec{} : distance)), difference = pk - pq;
    const Ints outside = half < Vec{}, between = ~outside & ~(half >= smaller(a, b));  // NaN is between
    const Vec apart = 0.25f * (gap + 2.0f * (pq + pk) + difference * difference / gap);
    const Vec height2 = outside ? apart : (between ? p.head[0] - half * half : larger(pq, pk));
    const Vec logit = Squared ? -height2 : -root(larger(height2, splat(kSmallest * kSmallest)));
    return {logit, gap, distance, half, outside, between, from};
  }

  static Slopes<rows, columns, heads> pull(const Pair& p, const State& state, Vec grad) {
    Slopes<rows, columns, heads> s;
    const Vec slope = Squared ? splat(-1.0f) : 0.5f / state.logit, d_h2 = slope * grad;  // of the squared height
    const Vec out = state.outside ? d_h2 : Vec{}, both = state.between ? d_h2 : Vec{}, higher = d_h2 - out - both;
    const Vec ratio = (p.column[0] - p.row[0]) / state.gap, pq = splat(p.row[0]), pk = p.column[0];
    const Vec by_q = pq > pk ? higher : (pq < pk ? Vec{} : 0.5f * higher);  // equal heights share it evenly
    const Vec d_half = -both * state.half;  // of each half width; the distance counts as much, less
    const Vec d_gap = 0.25f * out * (1.0f - ratio * ratio) - d_half * (0.5f / state.distance);
    state.from.pull(p, state.from.without_noise(p, d_gap), s);
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
