// HyPE for the CPU engine: the term of term.py on one register of pairs. It reads positions and no product.
#pragma once

#include "../../engines/cpu/score.h"

namespace hype {

using namespace hyper;

constexpr float kFarthest = 60.0f, kLarge = 1e9f;

inline Vec argument(const Pair& p) {
  return smaller(larger((p.column[0] - p.row[0]) * p.head[0], splat(-kFarthest)), splat(kFarthest));
}

// cosh x of sinh x.
inline Vec cosine_of(Vec sine) {
  const Vec size = magnitude(sine), kept = smaller(size, splat(kLarge));
  return size > splat(kLarge) ? size : root(1.0f + kept * kept);
}

template <bool Cosh>
struct Hype {
  static constexpr int rows = 1, columns = 1, heads = 2;
  struct State {
    Vec logit, sine;  // of the argument, of half of it for cosh
  };

  static State open(const Pair& p) {
    const Vec x = argument(p), sine = hyperbolic_sine(Cosh ? 0.5f * x : x);
    return {p.head[1] * (Cosh ? -2.0f * sine * sine : sine), sine};
  }

  static Slopes<rows, columns, heads> pull(const Pair& p, const State& state, Vec) {
    Slopes<rows, columns, heads> s;
    const Vec sine = state.sine, cosine = cosine_of(sine);
    const Vec unit = Cosh ? -2.0f * sine * sine : sine, slope = Cosh ? -2.0f * sine * cosine : cosine;
    s.head[0] = slope * (p.column[0] - p.row[0]) * p.head[1];
    s.head[1] = unit;
    return s;
  }
};

}  // namespace hype
