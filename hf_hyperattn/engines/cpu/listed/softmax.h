// The two running softmaxes over listed rows: of one query, whose logits lie in a row, and of kShared queries side by side.
#pragma once

#include "engines/cpu/listed/products.h"

namespace hyper {

// The largest logit so far, and the sum of e^(logit - largest). A logit that is no number makes the sum none.
struct Running {
  float top = -kInf, sum = 0;

  // Of an output that is the weighted sum so far.
  float share() const { return sum == 0 ? 0.0f : 1.0f / sum; }  // NaN stays
};

// `count` more logits of one query become weights; the last register is filled up with -inf. Returns what the weighted sum so
// far is multiplied with.
inline float take(float* x, int64_t count, Running& all) {
  std::fill(x + count, x + padded(count), -kInf);
  Vec most = splat(-kInf), sum = {};
  for (int64_t j = 0; j < count; j += kLanes) most = larger(most, load(x + j));
  const float top = std::max(all.top, largest_of(most)), base = top == -kInf ? 0.0f : top;
  for (int64_t j = 0; j < count; j += kLanes) {
    const Vec e = exponential<true>(load(x + j) - base);
    store(x + j, e);
    sum += e;
  }
  const float factor = all.top == top ? 1.0f : all.top == -kInf ? 0.0f : std::exp(all.top - top);
  all.sum = all.sum * factor + sum_of(sum), all.top = top;
  return factor;
}

// `count` more rows of logits [kShared] become weights; factors [kShared] are what `take` returns. Whether one of them is
// not 1.
inline bool take_lanes(float* x, int64_t count, float* top, float* sum, float* factors) {
  bool changed = false;
  for (int64_t r = 0; r < kShared; r += kLanes) {
    const Vec old = load(top + r);
    Vec most = old, added = {};
    for (int64_t j = 0; j < count; ++j) most = larger(most, load(x + j * kShared + r));
    const Vec base = most == -kInf ? Vec{} : most, factor = exponential<true>(old - base);
    for (int64_t j = 0; j < count; ++j) {
      const Vec e = exponential<true>(load(x + j * kShared + r) - base);
      store(x + j * kShared + r, e);
      added += e;
    }
    store(factors + r, factor), store(top + r, most), store(sum + r, load(sum + r) * factor + added);
    changed = changed || any(most != old);
  }
  return changed;
}

}  // namespace hyper
