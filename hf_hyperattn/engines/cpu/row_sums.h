// Sums over the numbers of each row of the keys: products, squares, squared differences.
#pragma once

#include "product.h"

namespace hyper {

// to[j] = the sum over registers of term(row j of the keys, j, e, whether it is the last), for `count` rows of
// `registers` each (Known: how many, or 0). What is read next, `ahead` of each row, is asked for meanwhile: there is
// little else to do than to wait for memory.
template <int Known, class Term, class Ahead>
inline void sum_known_rows(const float* keys, int64_t step, int64_t count, int64_t registers, Term term, Ahead ahead,
                           float* to) {
  const int64_t n = Known ? Known : registers;
  for (int64_t j = 0; j < count; j += kLanes) {
    Vec sums[kLanes] = {};
    const int64_t there = std::min<int64_t>(kLanes, count - j);
    for (int64_t i = 0; i < there; ++i) {
      const float* key = keys + (j + i) * step;
      ahead(j + i);
      Vec even = term(key, j + i, 0, n == 1), odd = {};
#pragma GCC unroll 8
      for (int64_t e = 1; e < n; ++e) (e % 2 ? odd : even) += term(key, j + i, e * kLanes, e == n - 1);
      sums[i] = even + odd;
    }
    transpose(sums);
    Vec total = sums[0];
#pragma GCC unroll 16
    for (int i = 1; i < kLanes; ++i) total += sums[i];
    store(to + j, total);
  }
}

template <class Term, class Ahead>
inline void sum_rows(const float* keys, int64_t step, int64_t count, int64_t dim, Term term, Ahead ahead, float* to) {
  const int64_t n = dim / kLanes;
  if (n == 4) sum_known_rows<4>(keys, step, count, n, term, ahead, to);
  else if (n == 8) sum_known_rows<8>(keys, step, count, n, term, ahead, to);
  else sum_known_rows<0>(keys, step, count, n, term, ahead, to);
}

}  // namespace hyper
