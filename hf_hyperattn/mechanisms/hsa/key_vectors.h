// Vectors of 16 floats, and the products that key.cpp makes of them. The compiler turns a vector into what the CPU has.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace {

typedef float Vec __attribute__((vector_size(64)));
typedef float LooseVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef int32_t LooseIntVec __attribute__((vector_size(64), aligned(4), may_alias));

constexpr int kLanes = 16;
constexpr IntVec kCount = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr float kInf = std::numeric_limits<float>::infinity();
// One register, and the sums that the products keep in registers at once: keys, or rows by columns.
#if defined(__AVX512F__)
constexpr int kReg = 16, kKeys = 16, kRows = 4, kWide = 4;
#elif defined(__AVX__)
constexpr int kReg = 8, kKeys = 4, kRows = 4, kWide = 2;
#else
constexpr int kReg = 4, kKeys = 2, kRows = 4, kWide = 2;
#endif
constexpr int kParts = kLanes / kReg;
typedef float Reg __attribute__((vector_size(4 * kReg)));
typedef float LooseReg __attribute__((vector_size(4 * kReg), aligned(4), may_alias));

inline Reg load_reg(const float* p) { return *reinterpret_cast<const LooseReg*>(p); }
inline void store_reg(float* p, Reg v) { *reinterpret_cast<LooseReg*>(p) = v; }
inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
inline Vec splat(float x) { return Vec{} + x; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// e^x for x <= 0, relative error about 1e-7; exactly 0 below the smallest normal number; NaN stays.
inline Vec exponential(Vec x) {
  const Vec low = splat(-87.3f);
  Vec y = larger(low, x);
  IntVec bits = __builtin_convertvector(y * 1.44269504f - 0.5f, IntVec);  // to the nearest integer; y is not positive
  const Vec n = __builtin_convertvector(bits, Vec);
  Vec r = y - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  bits = (bits << 23) + (127 << 23);
  Vec scale = reinterpret_cast<Vec>(bits);
  return x < low ? Vec{} : p * scale;
}

// logits[c][lane] for `Keys` rows of a table.
template <int Keys>
inline void keys_times_queries(const float* key, int64_t step, const float* queries, int64_t dim, float* logits) {
  Reg sum[Keys][kParts] = {};
  for (int64_t e = 0; e < dim; ++e)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      const Reg q = load_reg(queries + e * kLanes + p * kReg);
#pragma GCC unroll 16
      for (int c = 0; c < Keys; ++c) sum[c][p] += key[c * step + e] * q;
    }
#pragma GCC unroll 16
  for (int c = 0; c < Keys; ++c)
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) store_reg(logits + c * kLanes + p * kReg, sum[c][p]);
}

void logits_of(const float* key, int64_t step, int64_t count, const float* queries, int64_t dim, float* logits) {
  int64_t c = 0;
  for (; c + kKeys <= count; c += kKeys)
    keys_times_queries<kKeys>(key + c * step, step, queries, dim, logits + c * kLanes);
  for (; c + 2 <= count; c += 2)
    keys_times_queries<2>(key + c * step, step, queries, dim, logits + c * kLanes);
  for (; c < count; ++c) keys_times_queries<1>(key + c * step, step, queries, dim, logits + c * kLanes);
}

// to[r] += sum over c of weights[c · major + r · minor] from[c], for `Rows` rows and `Width` registers of columns.
template <int Rows, int Width>
inline void product(const float* weights, int64_t major, int64_t minor, const float* from, int64_t from_step,
                    int64_t count, float* to, int64_t to_step) {
  Reg sum[Rows][Width];
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < Width; ++w) sum[r][w] = load_reg(to + r * to_step + w * kReg);
  for (int64_t c = 0; c < count; ++c) {
    Reg v[Width];
#pragma GCC unroll 4
    for (int w = 0; w < Width; ++w) v[w] = load_reg(from + c * from_step + w * kReg);
#pragma GCC unroll 4
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int w = 0; w < Width; ++w) sum[r][w] += weights[c * major + r * minor] * v[w];
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < Width; ++w) store_reg(to + r * to_step + w * kReg, sum[r][w]);
}

template <int Width>
void columns(const float* weights, int64_t major, int64_t minor, const float* from, int64_t from_step, int64_t count,
             float* to, int64_t to_step, int64_t rows) {
  int64_t r = 0;
  for (; r + kRows <= rows; r += kRows)
    product<kRows, Width>(weights + r * minor, major, minor, from, from_step, count, to + r * to_step, to_step);
  for (; r < rows; ++r)
    product<1, Width>(weights + r * minor, major, minor, from, from_step, count, to + r * to_step, to_step);
}

// out[q] += sum over c of weights[c][q] value[c], for `lanes` queries.
void add_values(const float* weights, const float* value, int64_t step, int64_t count, int lanes, float* out,
                int64_t width) {
  int64_t w = 0;
  for (; w + kWide * kReg <= width; w += kWide * kReg)
    columns<kWide>(weights, kLanes, 1, value + w, step, count, out + w, width, lanes);
  for (; w < width; w += kReg) columns<1>(weights, kLanes, 1, value + w, step, count, out + w, width, lanes);
}

// Whether all numbers of `count` rows are finite.
bool finite(const float* rows, int64_t step, int64_t count, int64_t width) {
  IntVec largest = {};  // the numbers' bits without their signs
  for (int64_t c = 0; c < count; ++c)
    for (int64_t w = 0; w < width; w += kLanes) {
      const IntVec bits = reinterpret_cast<IntVec>(load(rows + c * step + w)) & 0x7fffffff;
      largest = bits > largest ? bits : largest;
    }
  for (int i = 0; i < kLanes; ++i)
    if (largest[i] >= 0x7f800000) return false;
  return true;
}

// rows[c] += sum over q of weights[c][q] vectors[q]: `add_values` transposed. Both have `dim` numbers a row.
void spread(const float* weights, const float* vectors, int64_t dim, int lanes, int64_t count, float* rows) {
  int64_t w = 0;
  for (; w + kWide * kReg <= dim; w += kWide * kReg)
    columns<kWide>(weights, 1, kLanes, vectors + w, dim, lanes, rows + w, dim, count);
  for (; w < dim; w += kReg) columns<1>(weights, 1, kLanes, vectors + w, dim, lanes, rows + w, dim, count);
}

#ifdef __AVX512F__
// Lane i of the result is the sum over the lanes of rows[i].
inline Vec sums_of(Vec* r) {
  typedef int32_t I __attribute__((vector_size(64)));
  const I low8 = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}, high8 = low8 + 8;
  const I low4 = {0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}, high4 = low4 + 4;
  const I low2 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}, high2 = low2 + 2;
  const I low1 = {0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}, high1 = low1 + 1;
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i] = __builtin_shuffle(r[i], r[i + 8], low8) + __builtin_shuffle(r[i], r[i + 8], high8);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) r[i] = __builtin_shuffle(r[i], r[i + 4], low4) + __builtin_shuffle(r[i], r[i + 4], high4);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) r[i] = __builtin_shuffle(r[i], r[i + 2], low2) + __builtin_shuffle(r[i], r[i + 2], high2);
  return __builtin_shuffle(r[0], r[1], low1) + __builtin_shuffle(r[0], r[1], high1);
}
#endif

// The products of one query with the rows `ids` of a table, 16 at a time; `out` has room for whole vectors.
void dots(const float* query, const float* table, int64_t step, const int32_t* ids, int64_t count, int64_t dim,
          float* out) {
#ifdef __AVX512F__
  for (int64_t c = 0; c < count; c += kLanes) {
    Vec sum[kLanes];
#pragma GCC unroll 2
    for (int half = 0; half < kLanes; half += 8) {
      const float* row[8];
      Vec part[8] = {};
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) row[i] = table + ids[c + half + i] * step;
      for (int64_t e = 0; e < dim; e += kLanes) {
        const Vec q = load(query + e);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) part[i] += q * load(row[i] + e);
      }
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) sum[half + i] = part[i];
    }
    store(out + c, sums_of(sum));
  }
#else
  for (int64_t c = 0; c < count; ++c) {
    const float* row = table + ids[c] * step;
    float sum = 0;
    for (int64_t e = 0; e < dim; ++e) sum += query[e] * row[e];
    out[c] = sum;
  }
#endif
}

// out += sum over c of weights[c] times row ids[c] of a table, for one query and `Width` registers of columns.
template <int Width>
inline void add_columns(const float* weights, const float* table, int64_t step, const int32_t* ids, int64_t count,
                        float* out) {
  Reg sum[2][Width] = {};
  int64_t c = 0;
  for (; c + 2 <= count; c += 2)
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const float* row = table + ids[c + i] * step;
#pragma GCC unroll 4
      for (int w = 0; w < Width; ++w) sum[i][w] += weights[c + i] * load_reg(row + w * kReg);
    }
  for (int w = 0; c < count && w < Width; ++w)
    sum[0][w] += weights[c] * load_reg(table + ids[c] * step + w * kReg);
  for (int w = 0; w < Width; ++w) store_reg(out + w * kReg, load_reg(out + w * kReg) + (sum[0][w] + sum[1][w]));
}

void add_rows(const float* weights, const float* table, int64_t step, const int32_t* ids, int64_t count, float* out,
              int64_t width) {
  int64_t w = 0;
  for (; w + 4 * kReg <= width; w += 4 * kReg) add_columns<4>(weights, table + w, step, ids, count, out + w);
  for (; w < width; w += kReg) add_columns<1>(weights, table + w, step, ids, count, out + w);
}

}  // namespace
