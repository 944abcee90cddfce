// A call of the engine as kernels.py writes it down, and the blocks in which it is computed.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "bf16.h"
#include "tile.h"

namespace hyper {

constexpr int64_t kTileRows = 48;   // queries of a tile
constexpr int64_t kTileKeys = 256;  // keys of a tile, whole panels
constexpr int64_t kTaskRows = 480;  // queries that use a block of keys once it is packed

constexpr int64_t kWhole = 2;       // see Call::half

// A tensor's address and how far its batch elements, heads and rows lie apart.
struct Matrix {
  const void* at;
  int64_t batch, head, row;
};

// The same for what is broadcast to [B, H, N, M].
struct Pairs {
  const void* at;
  int64_t batch, head, row, column;
};

// A statistic [B, H or Hkv, L], consecutive in a row; `group` query heads share a head of it.
struct Numbers {
  const float* at;
  int64_t batch, head, group;

  const float* of(int64_t b, int64_t h) const { return at + b * batch + h / group * head; }
};

struct Call {
  const ScoreTable* score;
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  Matrix query, key, value;           // float or, where `half`, bfloat16
  int64_t half;                       // kWhole: bfloat16, but gradients of queries and keys are wanted in float
  const float *query_factor, *key_factor;  // contiguous [B, H, N] and [B, Hkv, M], or null
  const Numbers *row, *column;
  const float* const* head;           // [H] each
  Pairs mask, bias;                   // bool (`mask_is_bool`) or float; null where there is none
  int64_t mask_is_bool, is_causal, window, offset, threads;
  const float* sinks;
  float scale, softcap;
  uint32_t drop_below, seed;
  float drop_factor;
  float* out;                         // contiguous [B, H, N, dv]
  // Contiguous [2, B, H, N]: the largest logit of a row, and 1 over its sum of e^(logit - largest). One number for both
  // would be rounded where logits are large, and gradients of steep scores multiply that. Decoding writes such a one.
  float* lse;

  int64_t group() const { return heads / kv_heads; }
  // The keys that row i may see, by position alone.
  int64_t first_of(int64_t i) const { return window ? std::clamp<int64_t>(i + offset - window + 1, 0, keys) : 0; }
  int64_t last_of(int64_t i) const {
    int64_t last = keys;
    if (is_causal) last = std::min(last, i + offset + 1);
    else if (window) last = std::min(last, i + offset + window);
    return std::max<int64_t>(last, 0);
  }
  Dropout dropout(int64_t b, int64_t h) const {
    return {drop_below, drop_factor, Dropout::mixed_number(seed + static_cast<uint32_t>(b * heads + h))};
  }
};

template <typename T>
const T* at(const Matrix& m, int64_t b, int64_t h, int64_t r) {
  return static_cast<const T*>(m.at) + b * m.batch + h * m.head + r * m.row;
}

template <typename T>
Rows<T> queries_of(const Call& c, int64_t b, int64_t h, int64_t r) {
  const float* factor = c.query_factor ? c.query_factor + (b * c.heads + h) * c.queries + r : nullptr;
  return {at<T>(c.query, b, h, r), c.query.row, factor, 1, c.scale};
}

template <typename T>
Rows<T> keys_of(const Call& c, int64_t b, int64_t h, int64_t r) {
  const float* factor = c.key_factor ? c.key_factor + (b * c.kv_heads + h) * c.keys + r : nullptr;
  return {at<T>(c.key, b, h, r), c.key.row, factor, 1, 1.0f};
}

template <typename T>
Rows<T> values_of(const Call& c, int64_t b, int64_t h, int64_t r) {
  return {at<T>(c.value, b, h, r), c.value.row, nullptr, 0, 1.0f};
}

// Memory of one thread, handed out in pieces; each starts on a line of the cache.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : memory_(static_cast<float*>(std::aligned_alloc(64, padded(floats, 16) * 4))) {}
  template <class E = float>  // no larger than a float
  E* take(int64_t count) {
    float* found = memory_.get() + used_;
    used_ += padded(count, 16);
    return reinterpret_cast<E*>(found);
  }

 private:
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  int64_t used_ = 0;
};

// What a tile needs beside its products: visible ranges, statistics, masks.
struct Frame {
  int32_t first[kTileRows], last[kTileRows];
  int64_t lowest, highest;  // over the rows: tile columns [lowest, highest) are seen by some of them
  const float* row[kMostNumbers];
  const float* column[kMostNumbers];
  float head[kMostNumbers];
  float* columns;           // [numbers][kTileKeys]

  static int64_t size(const Call& c) { return c.score->columns * kTileKeys; }

  // The ranges of these rows among the keys from `key` on; false where nothing is visible.
  bool see(const Call& c, int64_t row0, int64_t rows, int64_t key, int64_t count) {
    lowest = count, highest = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t a = std::clamp<int64_t>(c.first_of(row0 + r) - key, 0, count);
      const int64_t b = std::clamp<int64_t>(c.last_of(row0 + r) - key, a, count);
      first[r] = static_cast<int32_t>(a), last[r] = static_cast<int32_t>(b);
      if (a < b) lowest = std::min(lowest, a), highest = std::max(highest, b);
    }
    return lowest < highest;
  }

  // The columns that some of the rows [r, r + rows) see.
  std::pair<int64_t, int64_t> seen(int64_t r, int64_t rows) const {
    int64_t low = highest, high = lowest;
    for (int64_t i = r; i < r + rows; ++i)
      if (first[i] < last[i]) low = std::min<int64_t>(low, first[i]), high = std::max<int64_t>(high, last[i]);
    return {low, std::max(low, high)};
  }

  void load_head(const Call& c, int64_t h) {
    for (int i = 0; i < c.score->heads; ++i) head[i] = c.head[i][h];
  }

  void load_columns(const Call& c, int64_t b, int64_t h, int64_t key, int64_t count) {
    for (int i = 0; i < c.score->columns; ++i) {
      float* to = columns + i * kTileKeys;
      std::copy_n(c.column[i].of(b, h) + key, count, to);
      std::fill(to + count, to + padded(count, kPanel), 0.0f);
      column[i] = to;
    }
  }

  void load_rows(const Call& c, int64_t b, int64_t h, int64_t row0) {
    for (int i = 0; i < c.score->rows; ++i) row[i] = c.row[i].of(b, h) + row0;
  }
};

// Bias and mask of a tile, added up; -inf hides. Null where there are neither.
inline const float* extra_of(const Call& c, int64_t b, int64_t h, int64_t row0, int64_t rows, int64_t key,
                             int64_t columns, int64_t step, float* to) {
  if (!c.mask.at && !c.bias.at) return nullptr;
  for (int64_t r = 0; r < rows; ++r) {
    float* line = to + r * step;
    std::fill_n(line, padded(columns), 0.0f);
    for (const Pairs* p : {&c.bias, &c.mask}) {
      if (!p->at) continue;
      const int64_t start = b * p->batch + h * p->head + (row0 + r) * p->row + key * p->column;
      if (p == &c.mask && c.mask_is_bool) {
        const uint8_t* from = static_cast<const uint8_t*>(p->at) + start;
        for (int64_t j = 0; j < columns; ++j) line[j] = from[j * p->column] ? line[j] : -kInf;
      } else {
        const float* from = static_cast<const float*>(p->at) + start;
        for (int64_t j = 0; j < columns; ++j) line[j] += from[j * p->column];
      }
    }
  }
  return to;
}

}  // namespace hyper
