// Products of queries with rows that are listed for them, and weighted sums of such rows. A list holds numbers of rows; a
// row is read where it lies, and half precision is widened in registers.
#pragma once

#include "engines/cpu/bf16.h"

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

// Rows as operands of products with queries that are made of E: where these are pairs of bfloat16, the rows are, too, and are
// read where they lie; where they are floats, rows in half precision are widened into `room`.
template <class E, typename T>
inline const E* operands(const T* row, int64_t dim, float* room) {
  if constexpr (paired<E>) {
    return reinterpret_cast<const E*>(row);
  } else if constexpr (std::is_same_v<T, float>) {
    return row;
  } else {
    copy_rows(Rows<T>{row, 0, nullptr, 0}, 1, 0, dim, padded(dim), room);
    return room;
  }
}

// to[j][lane] = row keys[j] · the query of that lane, times `scale`, for `Keys` rows; queries are [terms<E>(dim)][kShared].
// `room` holds `Keys` rows of `dim` floats, whole registers each.
template <int Keys, class E, typename T>
inline void multiply_rows(const E* queries, int64_t dim, float scale, Listed<T> table, const int32_t* keys, float* room,
                          float* to) {
  const E* key[Keys];
  for (int k = 0; k < Keys; ++k) key[k] = operands<E>(table.row(keys[k]), dim, room + k * padded(dim));
  Vec sum[Keys][kRegisters] = {};
  for (int64_t e = 0; e < terms<E>(dim); ++e) {
    decltype(load(queries)) query[kRegisters];
#pragma GCC unroll 4
    for (int w = 0; w < kRegisters; ++w) query[w] = load(queries + e * kShared + w * kLanes);
#pragma GCC unroll 8
    for (int k = 0; k < Keys; ++k) {
      const auto number = splat(key[k][e]);
#pragma GCC unroll 4
      for (int w = 0; w < kRegisters; ++w) sum[k][w] = add_products(sum[k][w], number, query[w]);
    }
  }
#pragma GCC unroll 8
  for (int k = 0; k < Keys; ++k)
#pragma GCC unroll 4
    for (int w = 0; w < kRegisters; ++w)
      store(to + k * kShared + w * kLanes, paired<E> ? sum[k][w] * scale : sum[k][w]);
}

constexpr int kRowsAtOnce = 8;  // sums that hide how long an addition takes

// The same for `count` rows. `room` holds kRowsAtOnce rows. Floats are scaled already.
template <class E, typename T>
void multiply_rows(const E* queries, int64_t dim, float scale, Listed<T> table, const int32_t* keys, int64_t count,
                   float* room, float* to) {
  int64_t j = 0;
  for (; j + kRowsAtOnce <= count; j += kRowsAtOnce)
    multiply_rows<kRowsAtOnce>(queries, dim, scale, table, keys + j, room, to + j * kShared);
  for (; j < count; ++j) multiply_rows<1>(queries, dim, scale, table, keys + j, room, to + j * kShared);
}

// Whole registers of operands, from number e of a row on.
inline Vec load_operands(const float*, const auto* row, int64_t e) { return load_numbers(row + e); }
#if defined(__AVX512BF16__) && !defined(HYPER_PLAIN)
inline __m512bh load_operands(const Two*, const Bfloat* row, int64_t e) { return load(reinterpret_cast<const Two*>(row + e)); }
#endif

// to[j] = row keys[j] · one query, for `count` rows of whole registers; as many products in a register as it has lanes.
// `to` has room for whole registers.
template <class E, typename T>
void multiply_one(const E* query, int64_t dim, float scale, Listed<T> table, const int32_t* keys, int64_t count, float* to) {
  constexpr int kAtOnce = kLanes < 8 ? kLanes : 8;
  constexpr int64_t kStep = paired<E> ? 2 * kLanes : kLanes;
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
      for (int64_t e = 0; e < dim; e += kStep) {
        const auto number = load(query + terms<E>(e));
#pragma GCC unroll 8
        for (int i = 0; i < kAtOnce; ++i) part[i] = add_products(part[i], number, load_operands(query, row[i], e));
      }
#pragma GCC unroll 8
      for (int i = 0; i < kAtOnce; ++i) sums[start + i] = part[i];
    }
    const Vec found = sums_of(sums);
    store(to + j, paired<E> ? found * scale : found);
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

#if defined(__AVX512BF16__) && !defined(HYPER_PLAIN)
// Rows of bfloat16 and their weights [kShared] as pairs of neighbours; a last one alone is with 0.
template <class Row>
inline void pair_rows(Row row, int64_t count, int64_t wide, Two* to) {
  for (int64_t k = 0; k < count; k += 2)
    for (int64_t e = 0; e < wide; e += kPairs) {
      const __m512i a = load_first(row(k) + e, wide - e);
      const __m512i b = k + 1 < count ? load_first(row(k + 1) + e, wide - e) : __m512i{};
      store(to + k / 2 * wide + e, in_pairs<false>(a, b));
      if (e + kLanes < wide) store(to + k / 2 * wide + e + kLanes, in_pairs<true>(a, b));
    }
}
inline void pair_weights(const float* weight, int64_t count, Two* to) {
  for (int64_t k = 0; k < count; k += 2) {
    const Vec b = k + 1 < count ? load(weight + (k + 1) * kShared) : Vec{};
    store(to + k / 2 * kShared, halves_in_pairs(rounded_pair(load(weight + k * kShared), b)));
  }
}

// `row_sums` of rows of bfloat16, with weights [kShared] a row that are rounded. `pairs` and `paired_weights` are room for both.
template <class Row>
inline void row_sums_of_pairs(const float* weight, int64_t rows, Row row, int64_t count, int64_t wide, Two* pairs,
                              Two* paired_weights, float* to) {
  pair_rows(row, count, wide, pairs);
  pair_weights(weight, count, paired_weights);
  in_pieces(rows, [&](int64_t r, auto n) {
    const auto columns = [&](int64_t e, auto registers) {
      micro_product<n(), registers()>(paired_weights + r, 1, kShared, pairs + e, wide, terms<Two>(count), to + r * wide + e,
                                      wide, true);
    };
    int64_t e = 0;
    for (; e + kPanel <= wide; e += kPanel) columns(e, std::integral_constant<int, kWide>{});
    for (; e < wide; e += kLanes) columns(e, std::integral_constant<int, 1>{});
  });
}
#endif

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
