// bfloat16 inputs as pairs of numbers (product.h: Two): how rows, panels and weights become what the instruction takes.
// Sums, logits, maxima and statistics are float32, as everywhere. What is rounded is what SDPA rounds too: weights, and in
// the backward pass the gradients of output and logits.
#pragma once

#include "tiles.h"
#include "weights.h"

namespace hyper {

// One row of the left side, from one to the next: whole registers of pairs, the ones past the sum 0.
template <class E>
constexpr int64_t left_step(int64_t width) {
  return paired<E> ? (terms<E>(width) + kLanes - 1) / kLanes * kLanes : width;
}

// Numbers of a row in panels: whole tiles, where products are of these.
template <class E>
int64_t panel_depth(int64_t width) {
  return paired<E> && has_tiles() ? left_step<E>(width) : terms<E>(width);
}

// Rows of the left side of a product, of the right side, and factors of the columns, of floats: these have theirs in them.
template <typename T>
void copy_left(Rows<T> from, int64_t rows, int64_t width, float* to, float*) {
  copy_rows(from, rows, 0, width, width, to);
}
template <typename T>
void pack_rows(Rows<T> from, int64_t rows, int64_t width, int64_t wide, float* to) {
  copy_rows(from, rows, 0, width, wide, to);
}
// Factors of columns, filled up to whole panels.
template <class E, typename T>
Factors factors_of(Rows<T> from, int64_t columns, float* to) {
  if (!paired<E> || !from.factor) return {};
  for (int64_t j = 0; j < columns; ++j) to[j] = from.weight(j);
  std::fill(to + columns, to + (columns + kPanel - 1) / kPanel * kPanel, 0.0f);
  return {nullptr, to};
}
inline float sum_in_turn(const float* a, const float* b, int64_t count, float) {
  float sum = 0;
  for (int64_t e = 0; e < count; ++e) sum = in_turn(a[e], b[e], sum);
  return sum;
}
inline void put_numbers(float* p, Vec x) { store(p, x); }

#if defined(__AVX512BF16__) && !defined(HYPER_PLAIN)
constexpr int kPairs = 2 * kLanes;  // numbers to a register of pairs

// The first `count` numbers, up to kPairs of them, and 0 for the others.
inline __m512i load_first(const Bfloat* p, int64_t count) {
  const int64_t there = std::clamp<int64_t>(count, 0, kPairs);
  return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((uint64_t{1} << there) - 1), p);
}
inline Vec load_first(const float* p, int64_t count) {
  const int64_t there = std::clamp<int64_t>(count, 0, kLanes);
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << there) - 1), p);
}
inline void put_numbers(Bfloat* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
inline void store(Two* p, __m512i x) { _mm512_storeu_si512(p, x); }

// Numbers of a, then of b, rounded.
inline __m512i rounded_pair(Vec a, Vec b) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)); }

// Numbers of a and of b in turn, from the first ones on or from the middle.
template <bool Upper>
inline __m512i in_pairs(__m512i a, __m512i b) {
  typedef int16_t Shorts __attribute__((vector_size(64)));
  constexpr auto pick = []<int... i>(std::integer_sequence<int, i...>) {
    return Shorts{(Upper * kLanes + i / 2 + i % 2 * kPairs)...};
  }(std::make_integer_sequence<int, kPairs>{});
  return _mm512_permutex2var_epi16(a, reinterpret_cast<__m512i>(pick), b);
}

// Numbers of the lower half of x and of the upper half in turn.
inline __m512i halves_in_pairs(__m512i x) {
  typedef int16_t Shorts __attribute__((vector_size(64)));
  constexpr auto pick = []<int... i>(std::integer_sequence<int, i...>) {
    return Shorts{(i / 2 + i % 2 * kLanes)...};
  }(std::make_integer_sequence<int, kPairs>{});
  return _mm512_permutexvar_epi16(reinterpret_cast<__m512i>(pick), x);
}

template <int Which>
inline Vec half_of(__m512i x) {
  return _mm512_cvtpbh_ps(reinterpret_cast<__m256bh>(_mm512_extracti64x4_epi64(x, Which)));
}

// Rows of a left side as they are, without their factors, which are written to `factors`.
inline void copy_left(Rows<Bfloat> from, int64_t rows, int64_t width, Two* to, float* factors) {
  const int64_t step = left_step<Two>(width);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t e = 0; e < width; e += kPairs)
      store(to + r * step + e / 2, load_first(from.at + r * from.step + e, width - e));
    factors[r] = from.weight(r);
  }
}

// The same of floats, `step` from one row to the next, times factors of the columns where there are such; what is lost
// by rounding goes to `rest`, if that is not null.
inline void round_left(const float* from, int64_t step, int64_t rows, int64_t width, const float* factor, Two* to,
                       Two* rest, int64_t to_step) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t e = 0; e < width; e += kPairs) {
      const float* at = from + r * step + e;
      Vec a = load_first(at, width - e), b = load_first(at + kLanes, width - e - kLanes);
      if (factor) a *= load_first(factor + e, width - e), b *= load_first(factor + e + kLanes, width - e - kLanes);
      const __m512i near = rounded_pair(a, b);
      store(to + r * to_step + e / 2, near);
      if (rest) store(rest + r * to_step + e / 2, rounded_pair(a - half_of<0>(near), b - half_of<1>(near)));
    }
}

// As for floats, of pairs, and without factors.
inline void pack_panels(Rows<Bfloat> from, int64_t rows, int64_t width, Two* to) {
  const int64_t depth = panel_depth<Two>(width);
  for (int64_t start = 0; start < (rows + kPanel - 1) / kPanel * kPanel; start += kLanes) {
    Two* out = to + start / kPanel * kPanel * depth + start % kPanel;
    for (int64_t e = 0; e < depth; e += kLanes) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i)
        square[i] = start + i < rows
                        ? reinterpret_cast<Vec>(load_first(from.at + (start + i) * from.step + 2 * e, width - 2 * e))
                        : Vec{};
      transpose(square);
      for (int64_t i = 0; i < std::min<int64_t>(kLanes, depth - e); ++i)
        store(out + (e + i) * kPanel, reinterpret_cast<__m512i>(square[i]));
    }
  }
}

// Rows of `step` pairs that are missing to a whole tile: 0.
inline void fill_rows(Two* to, int64_t rows, int64_t step) {
  std::fill(to + terms<Two>(rows) * step, to + (rows + kPairs - 1) / kPairs * kLanes * step, Two{0});
}

// Rows of a right side, `wide` pairs each: every pair is of two rows, one below the other. A last one alone is with 0.
inline void pack_rows(Rows<Bfloat> from, int64_t rows, int64_t width, int64_t wide, Two* to) {
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t e = 0; e < wide; e += kPairs) {
      const Bfloat* at = from.at + r * from.step + e;
      const __m512i a = load_first(at, width - e);
      const __m512i b = r + 1 < rows ? load_first(at + from.step, width - e) : __m512i{};
      store(to + r / 2 * wide + e, in_pairs<false>(a, b));
      if (e + kLanes < wide) store(to + r / 2 * wide + e + kLanes, in_pairs<true>(a, b));
    }
  fill_rows(to, rows, wide);
}

// The same of floats, as in `round_left`, times factors of the rows where there are such.
inline void round_rows(const float* from, int64_t step, int64_t rows, int64_t width, const float* factor, Two* to,
                       Two* rest, int64_t to_step) {
  for (int64_t r = 0; r < rows; r += 2)
    for (int64_t e = 0; e < width; e += kLanes) {
      const float* at = from + r * step + e;
      Vec a = load_first(at, width - e), b = r + 1 < rows ? load_first(at + step, width - e) : Vec{};
      if (factor) {
        a *= factor[r];
        if (r + 1 < rows) b *= factor[r + 1];
      }
      const __m512i near = rounded_pair(a, b);
      store(to + r / 2 * to_step + e, halves_in_pairs(near));
      if (rest)
        store(rest + r / 2 * to_step + e, halves_in_pairs(rounded_pair(a - half_of<0>(near), b - half_of<1>(near))));
    }
}

// The weights of one row of logits, rounded, 0 outside [first, last), for all registers that hold [lowest, highest).
// Logits beyond [first, last) in its registers are -inf. Returns the sum of the rounded ones.
inline float exponentials(const float* x, int32_t first, int32_t last, int64_t lowest, int64_t highest,
                          const Base& base, Bfloat* to) {
  const auto weigh = [&](int64_t j) { return j < last && j + kLanes > first ? base.weights(load(x + j)) : Vec{}; };
  Vec sum = {};
  for (int64_t j = lowest / kPairs * kPairs; j < highest; j += kPairs) {
    const __m512i pairs = rounded_pair(weigh(j), weigh(j + kLanes));
    _mm512_storeu_si512(to + j, pairs);
    sum = add_products(sum, reinterpret_cast<__m512bh>(pairs), splat(Two{0x3f803f80}));  // 1 each
  }
  return sum_of(sum);
}

// The sum of a · b, both rounded but for what b loses by that, in the order in which `product` adds up rounded numbers:
// tiles have a sum for the first numbers of their 16 pairs and one for the second ones.
inline float sum_in_turn(const float* a, const float* b, int64_t count, Two) {
  __m128 sum = _mm_setzero_ps();
  Vec rest = {};
  for (int64_t e = 0; e < count; e += kPairs) {
    Two left[kLanes], right[kLanes];
    Vec x[2], y[2];
    for (int i = 0; i < 2; ++i) {
      x[i] = load_first(a + e + i * kLanes, count - e - i * kLanes);
      y[i] = load_first(b + e + i * kLanes, count - e - i * kLanes);
    }
    store(left, rounded_pair(x[0], x[1])), store(right, rounded_pair(y[0], y[1]));
    for (int i = 0; i < 2; ++i)
      rest += x[i] * (y[i] - load_numbers(reinterpret_cast<const Bfloat*>(right) + i * kLanes));
    if (has_tiles()) {
      float both[2] = {};
      const auto number_of = [](const Two* x, int i) { return number(reinterpret_cast<const Bfloat*>(x)[i]); };
      for (int i = 0; i < kPairs; ++i) both[i % 2] = in_turn(number_of(left, i), number_of(right, i), both[i % 2]);
      sum[0] += as_it_is(splat(both[0] + both[1]))[0];
      continue;
    }
    for (int64_t i = 0; i < std::min<int64_t>(kLanes, terms<Two>(count - e)); ++i)
      sum = _mm_dpbf16_ps(sum, reinterpret_cast<__m128bh>(_mm_set1_epi32(left[i].bits)),
                          reinterpret_cast<__m128bh>(_mm_set1_epi32(right[i].bits)));
  }
  return sum[0] + sum_of(rest);
}
#endif

}  // namespace hyper
