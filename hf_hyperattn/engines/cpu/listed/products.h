// Products of queries with rows that are listed for them, and weighted sums of such rows. A list holds numbers of rows; a
// row is read where it lies, and half precision is widened in registers.
#pragma once

#include "engines/cpu/product.h"

namespace hyper {

constexpr int64_t kShared = 16;  // queries that stand side by side, a lane each
constexpr int kRegisters = kShared / kLanes;
static_assert(kShared % kLanes == 0);

// Rows of one table for one (batch element, key head).
template <typename T>
struct Listed {
  const T* at;
  int64_t step;

  const T* row(int64_t i) const { return at + i * step; }
};

// to[j][lane] = row keys[j] · the query of that lane, for `Keys` rows; queries are [dim][kShared]. `room` holds `Keys` rows
// of `dim` floats, whole registers each.
template <int Keys, typename T>
inline void multiply_rows(const float* queries, int64_t dim, Listed<T> table, const int32_t* keys, float* room, float* to) {
  const float* key[Keys];
  for (int k = 0; k < Keys; ++k) {
    const T* row = table.row(keys[k]);
    if constexpr (std::is_same_v<T, float>) {
      key[k] = row;
    } else {
      float* wide = room + k * padded(dim);
      copy_rows(Rows<T>{row, 0, nullptr, 0}, 1, 0, dim, padded(dim), wide);
      key[k] = wide;
    }
  }
  Vec sum[Keys][kRegisters] = {};
  for (int64_t e = 0; e < dim; ++e) {
    Vec query[kRegisters];
#pragma GCC unroll 4
    for (int w = 0; w < kRegisters; ++w) query[w] = load(queries + e * kShared + w * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < Keys; ++k) {
      const Vec number = splat(key[k][e]);
#pragma GCC unroll 4
      for (int w = 0; w < kRegisters; ++w) sum[k][w] += number * query[w];
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < Keys; ++k)
#pragma GCC unroll 4
    for (int w = 0; w < kRegisters; ++w) store(to + k * kShared + w * kLanes, sum[k][w]);
}

constexpr int kRowsAtOnce = 8;  // sums that hide how long an addition takes

// The same for `count` rows. `room` holds kRowsAtOnce rows.
template <typename T>
void multiply_rows(const float* queries, int64_t dim, Listed<T> table, const int32_t* keys, int64_t count, float* room,
                   float* to) {
  int64_t j = 0;
  for (; j + kRowsAtOnce <= count; j += kRowsAtOnce)
    multiply_rows<kRowsAtOnce>(queries, dim, table, keys + j, room, to + j * kShared);
  for (; j < count; ++j) multiply_rows<1>(queries, dim, table, keys + j, room, to + j * kShared);
}

// to[j] = row keys[j] · one query, for `count` rows of whole registers; as many products in a register as it has lanes.
// `to` has room for whole registers.
template <typename T>
void multiply_one(const float* query, int64_t dim, Listed<T> table, const int32_t* keys, int64_t count, float* to) {
  constexpr int kAtOnce = kLanes < 8 ? kLanes : 8;
  for (int64_t j = 0; j < count; j += kLanes) {
    int32_t last[kLanes];
    const int32_t* of = keys + j;
    if (j + kLanes > count) {
      for (int i = 0; i < kLanes; ++i) last[i] = keys[std::min(j + i, count - 1)];
      of = last;
    }
    Vec sums[kLanes];
#pragma GCC unroll 2
    for (int start = 0; start < kLanes; start += kAtOnce) {
      const T* row[kAtOnce];
      Vec part[kAtOnce] = {};
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) row[i] = table.row(of[start + i]);
      for (int64_t e = 0; e < dim; e += kLanes) {
        const Vec number = load(query + e);
#pragma GCC unroll 8
        for (int i = 0; i < kAtOnce; ++i) part[i] += number * load_numbers(row[i] + e);
      }
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) sums[start + i] = part[i];
    }
    store(to + j, sums_of(sums));
  }
}

// f(rows from, how many as a constant) for rows in pieces of about the same size.
template <class Body>
inline void in_pieces(int64_t rows, Body body) {
  const int64_t pieces = (rows + kRows - 1) / kRows;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t from = rows * i / pieces, count = rows * (i + 1) / pieces - from;
    [&]<int... n>(std::integer_sequence<int, n...>) {
      ((count == n + 1 ? body(from, std::integral_constant<int, n + 1>{}) : void()), ...);
    }(std::make_integer_sequence<int, kRows>{});
  }
}

// to[r] += sum over `count` rows of their weight times them, Wide registers of each: row k is at row(k), its weight for r at
// weight[r · weight_step + k · next].
template <int Rows, int Wide, class Row>
inline void row_sum(const float* weight, int64_t weight_step, int64_t next, Row row, int64_t count, int64_t column,
                    float* to, int64_t to_step) {
  Vec sum[Rows][Wide];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) sum[r][w] = load(to + r * to_step + column + w * kLanes);
  for (int64_t k = 0; k < count; ++k) {
    const auto* from = row(k) + column;
    Vec b[Wide];
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) b[w] = load_numbers(from + w * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec a = splat(weight[r * weight_step + k * next]);
#pragma GCC unroll 4
      for (int w = 0; w < Wide; ++w) sum[r][w] += a * b[w];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) store(to + r * to_step + column + w * kLanes, sum[r][w]);
}

// Weighted sums of `count` rows, `wide` numbers each, added to `rows` rows.
template <class Row>
inline void row_sums(const float* weight, int64_t weight_step, int64_t next, int64_t rows, Row row, int64_t count,
                     int64_t wide, float* to, int64_t to_step) {
  in_pieces(rows, [&](int64_t r, auto n) {
    const float* own = weight + r * weight_step;
    int64_t e = 0;
    for (; e + kPanel <= wide; e += kPanel)
      row_sum<n(), kWide>(own, weight_step, next, row, count, e, to + r * to_step, to_step);
    for (; e < wide; e += kLanes) row_sum<n(), 1>(own, weight_step, next, row, count, e, to + r * to_step, to_step);
  });
}

// to += the weighted sum of `count` rows, for one query and `Wide` registers of columns. Of two rows at once: each sum waits
// for the one before.
template <int Wide, typename T>
inline void add_columns(const float* weights, Listed<T> table, const int32_t* rows, int64_t count, int64_t column,
                        float* to) {
  Vec sum[2][Wide] = {};
  int64_t j = 0;
  for (; j + 2 <= count; j += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i)
#pragma GCC unroll 4
      for (int w = 0; w < Wide; ++w)
        sum[i][w] += weights[j + i] * load_numbers(table.row(rows[j + i]) + column + w * kLanes);
  for (int w = 0; j < count && w < Wide; ++w)
    sum[0][w] += weights[j] * load_numbers(table.row(rows[j]) + column + w * kLanes);
  for (int w = 0; w < Wide; ++w) {
    float* at = to + column + w * kLanes;
    store(at, load(at) + as_it_is(as_it_is(sum[0][w]) + sum[1][w]));  // in the same order for every type
  }
}

template <typename T>
void add_to_one(const float* weights, Listed<T> table, const int32_t* rows, int64_t count, int64_t width, float* to) {
  int64_t e = 0;
  for (; e + 4 * kLanes <= width; e += 4 * kLanes) add_columns<4>(weights, table, rows, count, e, to);
  for (; e < width; e += kLanes) add_columns<1>(weights, table, rows, count, e, to);
}

// rows[j] += sum over q of weights[j][q] · vectors[q], for `count` rows and `lanes` queries.
inline void spread(const float* weights, const float* vectors, int64_t dim, int64_t lanes, int64_t count, float* rows) {
  product(weights, kShared, 1, vectors, dim, lanes, rows, dim, count, dim, true);
}

// Whether all numbers of a row are finite.
template <typename T>
bool is_finite(const T* row, int64_t width) {
  Ints largest = {};  // the numbers' bits without their signs
  for (int64_t e = 0; e < width; e += kLanes) {
    const Ints bits = as_bits(load_numbers(row + e)) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return !any(largest >= 0x7f800000);
}

}  // namespace hyper
