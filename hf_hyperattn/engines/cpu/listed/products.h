// What windows.cpp multiplies: rows of tables with the queries of a tile, which lie across the lanes of a vector, and rows
// that one query has chosen.
#pragma once

#include "engines/cpu/product.h"

namespace {

using namespace hyper;

// logits[c][lane] for `count` rows of a table; queries are [dim][lane].
void logits_of(const float* key, int64_t step, int64_t count, const float* queries, int64_t dim, float* logits) {
  constexpr int kAtOnce = 8;  // sums of one register each, enough of them to hide the latency of adding
  int64_t c = 0;
  for (; c + kAtOnce <= count; c += kAtOnce)
    micro_product<kAtOnce, 1>(key + c * step, step, 1, queries, kLanes, dim, logits + c * kLanes, kLanes, false);
  column_product<1>(key + c * step, step, 1, queries, kLanes, dim, logits + c * kLanes, kLanes, count - c, false);
}

// out[q] += sum over c of weights[c][q] value[c], for `lanes` queries.
void add_values(const float* weights, const float* value, int64_t step, int64_t count, int lanes, float* out,
                int64_t width) {
  product(weights, 1, kLanes, value, step, count, out, width, lanes, width, true);
}

// rows[c] += sum over q of weights[c][q] vectors[q]: `add_values` transposed. Both have `dim` numbers a row.
void spread(const float* weights, const float* vectors, int64_t dim, int lanes, int64_t count, float* rows) {
  product(weights, kLanes, 1, vectors, dim, lanes, rows, dim, count, dim, true);
}

// Whether all numbers of `count` rows are finite.
bool finite(const float* rows, int64_t step, int64_t count, int64_t width) {
  Ints largest = {};  // the numbers' bits without their signs
  for (int64_t c = 0; c < count; ++c)
    for (int64_t w = 0; w < width; w += kLanes) {
      const Ints bits = as_bits(load(rows + c * step + w)) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
  return !any(largest >= 0x7f800000);
}

// The products of one query with the rows `ids` of a table, a register of them at a time; `ids` and `out` have room for
// whole registers.
template <typename T>
void dots(const float* query, const T* table, int64_t step, const int32_t* ids, int64_t count, int64_t dim,
          float* out) {
  constexpr int kAtOnce = kLanes < 8 ? kLanes : 8;
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec sums[kLanes];
#pragma GCC unroll 2
    for (int start = 0; start < kLanes; start += kAtOnce) {
      const T* row[kAtOnce];
      Vec part[kAtOnce] = {};
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) row[i] = table + ids[c + start + i] * step;
      for (int64_t e = 0; e < dim; e += kLanes) {
        const Vec q = load(query + e);
#pragma GCC unroll 8
        for (int i = 0; i < kAtOnce; ++i) part[i] += q * load_numbers(row[i] + e);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) sums[start + i] = part[i];
    }
    store(out + c, sums_of(sums));
  }
}

// out += sum over c of weights[c] times row ids[c] of a table, for one query and `Wide` registers of columns.
template <int Wide, typename T>
inline void add_columns(const float* weights, const T* table, int64_t step, const int32_t* ids, int64_t count,
                        float* out) {
  Vec sum[2][Wide] = {};
  int64_t c = 0;
  for (; c + 2 <= count; c += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
      for (int w = 0; w < Wide; ++w) sum[i][w] += weights[c + i] * load_numbers(table + ids[c + i] * step + w * kLanes);
  for (int w = 0; c < count && w < Wide; ++w) sum[0][w] += weights[c] * load_numbers(table + ids[c] * step + w * kLanes);
  for (int w = 0; w < Wide; ++w) store(out + w * kLanes, load(out + w * kLanes) + (sum[0][w] + sum[1][w]));
}

template <typename T>
void add_rows(const float* weights, const T* table, int64_t step, const int32_t* ids, int64_t count, float* out,
              int64_t width) {
  int64_t w = 0;
  for (; w + 4 * kLanes <= width; w += 4 * kLanes) add_columns<4>(weights, table + w, step, ids, count, out + w);
  for (; w < width; w += kLanes) add_columns<1>(weights, table + w, step, ids, count, out + w);
}

}  // namespace
