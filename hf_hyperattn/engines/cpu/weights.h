// Softmax weights as bfloat16 numbers.
#pragma once

#include "vectors.h"

namespace hyper {

// What the weights of a row are counted from: the largest logit so far, e^top, of which the largest weights lose least by
// rounding. `Aligned`, it is a power of two at or above that: to round a weight, and to bring it to a new largest logit, do
// not disturb each other then, and the backward pass can have the very weights of the forward pass. Only with those do the
// gradients of a row's logits add up to 0, as they must where a steep score multiplies them.
struct Base {
  float top;
  bool aligned;
  float power = 0, rest = 0;  // aligned: e^top = 2^(power + rest), rest in (-1, 0]

  Base(float largest, bool is_aligned = false) : top(largest), aligned(is_aligned) {
    const double binary = 1.4426950408889634 * top;
    if (!aligned || !std::isfinite(binary)) return;
    power = static_cast<float>(std::ceil(binary));
    rest = static_cast<float>(binary - std::ceil(binary));
  }
  float of_top() const { return aligned ? std::exp2(rest) : 1.0f; }  // the weight of the largest logit
  // What weights that were counted from an older one are multiplied with.
  float change(float old) const {
    if (old == -kInf) return 0.0f;
    return aligned ? std::exp2(Base(old, true).power - power) : std::exp(old - top);
  }

#if defined(__AVX512BF16__) && !defined(HYPER_PLAIN)
  // e^x over the base for x up to about top, relative error 3e-6, which is nothing beside the rounding that follows.
  Vec weights(Vec x) const {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    const Vec z = (x - top) * 1.44269504f + rest, n = _mm512_roundscale_ps(z, nearest);
    const Vec r = _mm512_reduce_ps(z, nearest);  // 0, not NaN, at -inf
    const Vec p = 1.0f + r * (0.69312419f + r * (0.24024099f + r * (0.05590643f + r * 0.00958285f)));
    return _mm512_scalef_ps(p, n);
  }

  Vec rounded_weights(Vec x) const { return _mm512_cvtpbh_ps(_mm512_cvtneps_pbh(weights(x))); }
#else
  Vec rounded_weights(Vec x) const { return x; }  // not met: no features in pairs
#endif
};

}  // namespace hyper
