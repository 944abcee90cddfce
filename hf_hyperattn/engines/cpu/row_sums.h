// Few queries: sums over the numbers of each row of the keys (products, squares, squared differences), and of values.
#pragma once

#include "product.h"

namespace hyper {

// to[j] = the sum over registers of term(register e of row j, j, e, whether it is among the last that are read at once),
// for `count` rows of `registers` each (Known: how many, or 0), in the order of `load_split`. What is read next, `ahead` of
// each row, is asked for meanwhile: there is little else to do than to wait for memory.
template <int Known, typename T, class Term, class Ahead>
inline void sum_known_rows(const T* keys, int64_t step, int64_t count, int64_t registers, Term term, Ahead ahead,
                           float* to) {
  const int64_t n = Known ? Known : registers;
  for (int64_t j = 0; j < count; j += kLanes) {
    Vec sums[kLanes] = {};
    const int64_t there = std::min<int64_t>(kLanes, count - j);
    for (int64_t i = 0; i < there; ++i) {
      const T* key = keys + (j + i) * step;
      ahead(j + i);
      Vec even = {}, odd = {};
#pragma GCC unroll 8
      for (int64_t e = 0; e < n; ++e)
        (e % 2 ? odd : even) += term(load_split(key, e * kLanes), j + i, e * kLanes, e >= n - kTogether<T> / kLanes);
      sums[i] = even + odd;
    }
    store(to + j, sums_of(sums));
  }
}

template <typename T, class Term, class Ahead>
inline void sum_rows(const T* keys, int64_t step, int64_t count, int64_t dim, Term term, Ahead ahead, float* to) {
  const int64_t n = dim / kLanes;
  if (n == 4) sum_known_rows<4>(keys, step, count, n, term, ahead, to);
  else if (n == 8) sum_known_rows<8>(keys, step, count, n, term, ahead, to);
  else sum_known_rows<0>(keys, step, count, n, term, ahead, to);
}

// to[e] += the sum over j of weights[j] · row j, for `count` rows, in the order of `load_split`. Of two rows at once: each
// sum waits for the one before, and a single chain of them takes longer than reading.
template <int Wide, typename T>
inline void add_known_rows(const float* weights, const T* rows, int64_t step, int64_t count, float* to) {
  Vec even[Wide], odd[Wide] = {};
#pragma GCC unroll 4
  for (int w = 0; w < Wide; ++w) even[w] = load(to + w * kLanes);
  int64_t j = 0;
  for (; j + 2 <= count; j += 2)
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) {
      even[w] += weights[j] * load_split(rows + j * step, w * kLanes);
      odd[w] += weights[j + 1] * load_split(rows + (j + 1) * step, w * kLanes);
    }
#pragma GCC unroll 4
  for (int w = 0; w < Wide; ++w) {
    if (j < count) even[w] += weights[j] * load_split(rows + j * step, w * kLanes);
    store(to + w * kLanes, even[w] + odd[w]);
  }
}

template <typename T>
inline void add_rows(const float* weights, const T* rows, int64_t step, int64_t count, int64_t width, float* to) {
  int64_t e = 0;
  for (; e + 4 * kLanes <= width; e += 4 * kLanes) add_known_rows<4>(weights, rows + e, step, count, to + e);
  for (; e + 2 * kLanes <= width; e += 2 * kLanes) add_known_rows<2>(weights, rows + e, step, count, to + e);
  if (e < width) add_known_rows<1>(weights, rows + e, step, count, to + e);
}

}  // namespace hyper
