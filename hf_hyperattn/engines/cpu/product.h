// Products of small matrices that stay in a core's cache, and the packing that they need.
#pragma once

#include <algorithm>
#include <utility>

#include "vectors.h"

namespace hyper {

// Two bfloat16 numbers, neighbours in a sum: one instruction multiplies 16 such pairs and adds up in float32. Where the
// CPU has it, bfloat16 inputs are multiplied as they are (bf16.h); elsewhere they become floats.
struct [[gnu::may_alias]] Two {
  uint32_t bits;
};
template <typename T>
struct OperandOf {
  using type = float;
};
inline Vec add_products(Vec sum, Vec a, Vec b) { return sum + a * b; }
#if defined(__AVX512BF16__) && !defined(HYPER_PLAIN)
template <>
struct OperandOf<Bfloat> {
  using type = Two;
};
inline __m512bh load(const Two* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }
inline __m512bh splat(Two x) { return reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(x.bits))); }
inline Vec add_products(Vec sum, __m512bh a, __m512bh b) { return _mm512_dpbf16_ps(sum, a, b); }
#endif

// What products of vectors of T are made of, and how many of these a sum over `count` numbers has.
template <typename T>
using Operand = typename OperandOf<T>::type;
template <class E>
constexpr bool paired = std::is_same_v<E, Two>;
template <class E>
constexpr int64_t terms(int64_t count) {
  return paired<E> ? (count + 1) / 2 : count;
}

// What products are multiplied with, rows and columns: pairs are kept as they came, without factors. Null: 1.
struct Factors {
  const float *row = nullptr, *column = nullptr;

  // First by the column's, then by the row's, wherever this is inlined: the logits of both passes are the same numbers.
  Vec times(Vec sum, int64_t r, int64_t w) const {
    if (column) sum = as_it_is(sum * load(column + w));
    return row ? sum * row[r] : sum;
  }
  Factors from(int64_t r, int64_t j) const { return {row ? row + r : nullptr, column ? column + j : nullptr}; }
};

// to[r][w] (+)= sum over k of left[r · left_row + k · left_sum] · right[k · right_step + w]
template <int Rows, int Wide, class E>
inline void micro_product(const E* left, int64_t left_row, int64_t left_sum, const E* right, int64_t right_step,
                          int64_t count, float* to, int64_t to_step, bool add, Factors by = {}) {
  Vec sum[Rows][Wide];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) sum[r][w] = add ? load(to + r * to_step + w * kLanes) : Vec{};
  for (int64_t k = 0; k < count; ++k) {
    decltype(load(right)) b[Wide];
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) b[w] = load(right + k * right_step + w * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const auto a = splat(left[r * left_row + k * left_sum]);
#pragma GCC unroll 4
      for (int w = 0; w < Wide; ++w) sum[r][w] = add_products(sum[r][w], a, b[w]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) {
      store(to + r * to_step + w * kLanes, paired<E> ? by.times(sum[r][w], r, w * kLanes) : sum[r][w]);
    }
}

template <int Wide, class E>
inline void column_product(const E* left, int64_t left_row, int64_t left_sum, const E* right, int64_t right_step,
                           int64_t count, float* to, int64_t to_step, int64_t rows, bool add, Factors by = {}) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    micro_product<kRows, Wide>(left + r * left_row, left_row, left_sum, right, right_step, count, to + r * to_step,
                               to_step, add, by.from(r, 0));
  for (; r + 2 <= rows; r += 2)
    micro_product<2, Wide>(left + r * left_row, left_row, left_sum, right, right_step, count, to + r * to_step,
                           to_step, add, by.from(r, 0));
  for (; r < rows; ++r)
    micro_product<1, Wide>(left + r * left_row, left_row, left_sum, right, right_step, count, to + r * to_step,
                           to_step, add, by.from(r, 0));
}

// The same for a right side of `width` columns, a multiple of kLanes, in plain rows.
template <class E>
inline void product(const E* left, int64_t left_row, int64_t left_sum, const E* right, int64_t right_step,
                    int64_t count, float* to, int64_t to_step, int64_t rows, int64_t width, bool add) {
  int64_t w = 0;
  for (; w + kPanel <= width; w += kPanel)
    column_product<kWide>(left, left_row, left_sum, right + w, right_step, count, to + w, to_step, rows, add);
  for (; kWide > 2 && w + 2 * kLanes <= width; w += 2 * kLanes)
    column_product<2>(left, left_row, left_sum, right + w, right_step, count, to + w, to_step, rows, add);
  for (; w + kLanes <= width; w += kLanes)
    column_product<1>(left, left_row, left_sum, right + w, right_step, count, to + w, to_step, rows, add);
}

// A product with the first `registers` of a panel's registers.
template <int Wide = kWide, class E>
inline void panel_product(int64_t registers, const E* left, int64_t left_row, const E* panel, int64_t count, float* to,
                          int64_t to_step, int64_t rows, Factors by) {
  if (Wide == 1 || registers >= Wide)
    column_product<Wide>(left, left_row, 1, panel, kPanel, count, to, to_step, rows, false, by);
  else
    panel_product<std::max(1, Wide - 1)>(registers, left, left_row, panel, count, to, to_step, rows, by);
}

// to[r][j] = left row r · row j of what was packed in panels of kPanel rows, `count` numbers a row, for j in
// [low, high); of each kRows rows from r on only j in seen(r, kRows) count, whole registers.
template <class E, class Seen>
inline void product_of_panels(const E* left, int64_t left_row, const E* packed, int64_t count, float* to,
                              int64_t to_step, int64_t rows, int64_t low, int64_t high, Seen seen, Factors by = {}) {
  for (int64_t j = low / kPanel * kPanel; j < high; j += kPanel)
    for (int64_t r = 0; r < rows; r += kRows) {
      const auto [first, last] = seen(r, kRows);
      if (first < j + kPanel && j < last)
        panel_product((last - j + kLanes - 1) / kLanes, left + r * left_row, left_row, packed + j * count, count,
                      to + r * to_step + j, to_step, std::min<int64_t>(kRows, rows - r), by.from(r, j));
    }
}

// to[r][w] += sum over j of left[r][j] · right[j][w]; of each kRows rows from r on only j in seen(r, kRows) count.
template <class E, class Seen>
inline void product_of_seen(const E* left, int64_t left_row, const E* right, int64_t right_step, float* to,
                            int64_t to_step, int64_t rows, int64_t width, Seen seen) {
  for (int64_t r = 0; r < rows; r += kRows) {
    const auto [first, last] = seen(r, kRows);
    const int64_t skipped = paired<E> ? first / 2 : first;  // pairs
    product(left + r * left_row + skipped, left_row, 1, right + skipped * right_step, right_step,
            terms<E>(last) - skipped, to + r * to_step, to_step, std::min<int64_t>(kRows, rows - r), width, true);
  }
}

// Lanes of a and b in turn, the lower halves or the upper ones.
template <bool Upper>
inline Vec interleaved(Vec a, Vec b) {
  constexpr int from = Upper ? kLanes / 2 : 0;
#ifdef __clang__
  return [&]<int... i>(std::integer_sequence<int, i...>) {
    return __builtin_shufflevector(a, b, (from + i / 2 + (i % 2) * kLanes)...);
  }(std::make_integer_sequence<int, kLanes>{});
#else
  constexpr auto pick = []<int... i>(std::integer_sequence<int, i...>) {
    return Ints{(from + i / 2 + (i % 2) * kLanes)...};
  }(std::make_integer_sequence<int, kLanes>{});
  return __builtin_shuffle(a, b, pick);
#endif
}

// Transposes a square of registers: interleaving the halves log2(kLanes) times moves lane j of row i to lane i of row j.
inline void transpose(Vec (&square)[kLanes]) {
#pragma GCC unroll 4
  for (int step = kLanes; step > 1; step /= 2) {
    Vec next[kLanes];
#pragma GCC unroll 8
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleaved<false>(square[i], square[i + kLanes / 2]);
      next[2 * i + 1] = interleaved<true>(square[i], square[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) square[i] = next[i];
  }
}

// Lane i is the sum of all lanes of x[i]: as in `transpose`, but what would stand side by side is added up at once.
inline Vec sums_of(Vec (&x)[kLanes]) {
#pragma GCC unroll 4
  for (int count = kLanes / 2; count; count /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i)
      x[i] = interleaved<false>(x[i], x[i + count]) + interleaved<true>(x[i], x[i + count]);
  return x[0];
}

// Asks memory for what is read soon.
inline void ask_for(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(row) + i);
}

// Rows of a caller's matrix, each times a number of its own where there are such.
template <typename T>
struct Rows {
  const T* at;
  int64_t step;
  const float* factor;  // one a row, or null
  int64_t factor_step;
  float scale = 1.0f;

  float weight(int64_t r) const { return factor ? scale * factor[r * factor_step] : scale; }
};

// Rows as floats, `padded` columns each, the ones past `width` 0; rows past `rows` up to `fill` are 0.
template <typename T>
void copy_rows(Rows<T> from, int64_t rows, int64_t fill, int64_t width, int64_t padded, float* to) {
  for (int64_t r = 0; r < rows; ++r) {
    const float weight = from.weight(r);
    const T* row = from.at + r * from.step;
    float* out = to + r * padded;
    int64_t e = 0;
    for (; e + kLanes <= width; e += kLanes) store(out + e, load_numbers(row + e) * weight);
    for (; e < width; ++e) out[e] = number(row[e]) * weight;
    for (; e < padded; ++e) out[e] = 0.0f;
  }
  std::fill(to + rows * padded, to + std::max(rows, fill) * padded, 0.0f);
}

// Rows in panels: of kPanel rows the first numbers side by side, then the second ones, and so on.
template <typename T>
void pack_panels(Rows<T> from, int64_t rows, int64_t width, float* to) {
  for (int64_t base = 0; base < rows; base += kPanel)
    for (int64_t lane = 0; lane < kPanel; lane += kLanes) {
      const int64_t start = base + lane, there = std::clamp<int64_t>(rows - start, 0, kLanes);
      float* out = to + base * width + lane;
      int64_t e = 0;
      for (; e + kLanes <= width; e += kLanes) {
        Vec square[kLanes];
        for (int i = 0; i < kLanes; ++i)
          square[i] = i < there ? load_numbers(from.at + (start + i) * from.step + e) * from.weight(start + i) : Vec{};
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(out + (e + i) * kPanel, square[i]);
      }
      for (; e < width; ++e)
        for (int i = 0; i < kLanes; ++i)
          out[e * kPanel + i] = i < there ? number(from.at[(start + i) * from.step + e]) * from.weight(start + i) : 0.0f;
    }
}

}  // namespace hyper
