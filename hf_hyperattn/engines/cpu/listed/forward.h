// Causal attention in which every head has a rule of its own: the first keys, the nearest ones, and pages of keys that a
// chunk of queries has chosen. Heads without pages go by blocks of keys (blocks.h). Heads with pages: keys are
// listed one by one and read where they lie, and the queries stand side by side in registers, those of one chunk, or
// neighbours of several chunks, since most of their pages are the same.
#pragma once

#include <bit>

#include "engines/cpu/listed/blocks.h"

namespace hyper {

static_assert(kShared <= kTileRows);

template <typename T>
class SelectedTask {
 public:
  SelectedTask(const Selected& call, const Packed& packed)
      : c(call), packed_(packed), wide(packed.wide), blocks_(c.blocks()),
        scratch_(kTileRows * (kTileKeys + c.dim + wide + 2) + (kShared + kAtOnce) * (c.dim + kLanes) + 256) {
    dots_ = scratch_.take(kTileRows * kTileKeys);
    queries_ = scratch_.take(kTileRows * c.dim);
    turned_ = scratch_.take(kShared * c.dim);
    rows_ = scratch_.take(kAtOnce * padded(c.dim));
    out_ = scratch_.take(kTileRows * wide);
    top_ = scratch_.take(kTileRows);
    sum_ = scratch_.take(kTileRows);
  }

  // Queries [row, end) of a head.
  void run(int64_t b, int64_t h, int64_t row, int64_t end) {
    const Rule& rule = c.rules[h];
    const auto body = [&](int64_t r, int64_t p, int64_t rows) { tile(b, h, r, p, rows); };
    if (rule.page) over_tiles(c, b, row, end, std::max(rule.chunk, kShared), kShared, body);
    else over_tiles(c, b, row, end, kSpan, kTileRows, body);
  }

 private:
  static constexpr int kAtOnce = 8;     // keys whose products are summed at once
  static constexpr int64_t kNear = 64;  // keys whose values stay in the first cache

  void tile(int64_t b, int64_t h, int64_t row, int64_t p, int64_t rows) {
    const int64_t start = start_of(b, h, row);
    if (p < 0) {  // padding sees nothing
      std::fill_n(c.out + start * c.value_dim, rows * c.value_dim, 0.0f);
      std::fill_n(c.lse + start, rows, -kInf);
      std::fill_n(c.lse + c.batch * c.heads * c.queries + start, rows, 0.0f);
      return;
    }
    const bool pages = c.rules[h].page;
    if (pages && !list_keys(b, h, p, rows)) {
      for (int64_t r = 0; r < rows; ++r) tile(b, h, row + r, p + r, 1);
      return;
    }
    auto queries = c.rows_of<T>(c.query, b, h, row);
    queries.scale = c.scale;
    copy_rows(queries, rows, 0, c.dim, c.dim, queries_);
    std::fill_n(out_, rows * wide, 0.0f);
    std::fill_n(top_, kTileRows, -kInf);
    std::fill_n(sum_, kTileRows, 0.0f);
    pages ? over_keys(b, h, p, rows) : over_blocks(b, h, p, rows);
    finish(start, rows);
  }

  int64_t start_of(int64_t b, int64_t h, int64_t row) const { return (b * c.heads + h) * c.queries + row; }

  void over_blocks(int64_t b, int64_t h, int64_t p, int64_t rows) {
    const int64_t head = b * c.kv_heads + h / c.group();
    blocks_.list(c, b, h, p, rows);
    const float *keys[kListed], *values[kListed];
    for (int64_t from = 0, all = blocks_.listed.size(); from < all; from += kListed) {
      const int64_t count = std::min(kListed, all - from);
      for (int64_t i = 0; i < count; ++i) {
        const int32_t block = blocks_.listed[from + i];
        keys[i] = packed_.keys(head, block), values[i] = packed_.values(head, block);
      }
      products(queries_, c.dim, rows, keys, count, c.dim, dots_);
      for (int64_t i = 0; i < count; ++i)
        if (!blocks_.whole[from + i]) hide(from + i, i, p, rows);
      for (int64_t r = 0; r < rows; ++r) weigh(r, count * kLanes);
      sums(dots_, rows, values, count, wide, out_, wide);
    }
  }

  // Queries whose keys are listed, at most kShared.
  void over_keys(int64_t b, int64_t h, int64_t p, int64_t rows) {
    const bool few = rows <= kFew && takes_few() && !several_;
    if (!few)
      for (int64_t r = 0; r < kShared; r += kLanes)
        put_block([&](int64_t i) { return queries_ + (r + i) * c.dim; }, std::clamp<int64_t>(rows - r, 0, kLanes), c.dim,
                  turned_ + r, kShared);
    kv_ = h / c.group(), head_ = b * c.kv_heads + kv_;
    from_ = c.rows_of<T>(c.key, b, kv_, c.starts[b]);
    for (int64_t i = 0; i < all_; i += kTileKeys) {
      const int64_t count = std::min(kTileKeys, all_ - i);
      few ? by_rows(&listed_[i], p, rows, count) : by_lanes(i, p, rows, count);
      add_values(b, &listed_[i], few ? kTileKeys : 1, few ? 1 : kShared, rows, count);
    }
  }

  // Whether `by_rows` can compute a few queries.
  bool takes_few() const { return c.dim % kLanes == 0; }

  // Lists the keys that any query at positions [p, p + rows) sees. Those later than p come last, in order, as `by_lanes` and
  // `by_rows` need them. Of queries of several chunks all are in order, each with the queries that see it, a bit each.
  // Returns false where such queries had better go one by one.
  bool list_keys(int64_t b, int64_t h, int64_t p, int64_t rows) {
    const Rule& rule = c.rules[h];
    const int64_t last = p + rows - 1, seen = std::min(last + 1, c.length(b)), opening = std::min(rule.opening(last), seen);
    several_ = p / rule.chunk != last / rule.chunk;
    const int64_t most = several_ ? seen : std::min(rule.sinks, opening) + rule.most * rule.page + seen - opening;
    if (static_cast<int64_t>(listed_.size()) < most) listed_.resize(most), seen_by_.resize(most);
    int32_t* to = listed_.data();
    uint16_t* by = seen_by_.data();
    int64_t pairs = 0;  // that are seen, those of keys later than their query too
    const auto add = [&](int64_t from, int64_t end, uint16_t bits = kEvery) {
      const int64_t count = std::max<int64_t>(0, end - from);
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(from + i);
      if (several_) by = std::fill_n(by, count, bits), pairs += count * std::min<int64_t>(std::popcount(bits), rows);
      to += count;
    };
    const auto add_page = [&](int64_t page, uint16_t bits = kEvery) {
      add(std::max(page * rule.page, rule.sinks), std::min((page + 1) * rule.page, opening), bits);
    };
    add(0, std::min(rule.sinks, opening));
    if (!several_) {
      const int32_t* pages = c.pages(b, h, p);
      for (int64_t i = 0; i < rule.most; ++i)
        if (pages[i] >= 0) add_page(pages[i]);
      add(opening, seen);
      all_ = to - listed_.data();
      return true;
    }
    const int64_t pages = (opening + rule.page - 1) / rule.page;
    page_by_.assign(pages, 0);
    for (int64_t r = 0; r < rows; ++r) {
      const auto open = [&](int64_t page) { page_by_[page] |= uint16_t{1} << r; };
      const int32_t* chosen = c.pages(b, h, p + r);
      for (int64_t i = 0; i < rule.most; ++i)
        if (chosen[i] >= 0 && chosen[i] < pages) open(chosen[i]);
      for (int64_t page = rule.opening(p + r) / rule.page; page < pages; ++page) open(page);
    }
    for (int64_t page = 0; page < pages; ++page)
      if (page_by_[page]) add_page(page, page_by_[page]);
    add(opening, seen);
    all_ = to - listed_.data();
    return !takes_few() || all_ * kShared <= kWaste * pairs;
  }

  // A few queries of one chunk, one after the other: as many keys in a register as it has lanes.
  void by_rows(const int32_t* keys, int64_t p, int64_t rows, int64_t count) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* query = queries_ + r * c.dim;
      float* to = dots_ + r * kTileKeys;
      int64_t seen = count;  // by this query
      while (seen > 0 && keys[seen - 1] > p + r) --seen;
      for (int64_t j = 0; j < seen; j += kLanes) {
        const int64_t there = std::min<int64_t>(kLanes, seen - j);
        store(to + j, c.dim == 4 * kLanes ? dots_of<4>(query, keys + j, there, 4)
                                          : dots_of<0>(query, keys + j, there, c.dim / kLanes));
      }
      std::fill(to + seen, to + padded(count), -kInf);
      weigh(r, padded(count));
    }
  }

  // Products of a query with `there` keys of `registers` each (Known: how many, or 0).
  template <int Known>
  Vec dots_of(const float* query, const int32_t* keys, int64_t there, int64_t registers) const {
    Vec sums[kLanes] = {};
    for (int k = 0; k < there; ++k) {
      const T* key = from_.at + keys[k] * from_.step;
      Vec even = {}, odd = {};
#pragma GCC unroll 4
      for (int64_t e = 0; e < (Known ? Known : registers); ++e)
        (e % 2 ? odd : even) += load_numbers(key + e * kLanes) * load(query + e * kLanes);
      sums[k] = even + odd;
    }
    return sums_of(sums);
  }

  // Queries side by side: of every key that is listed from i on kShared logits, one for each.
  void by_lanes(int64_t i, int64_t p, int64_t rows, int64_t count) {
    const int32_t* keys = &listed_[i];
    int64_t j = 0;
    for (; j + kAtOnce <= count; j += kAtOnce) multiply<kAtOnce>(keys + j, j);
    for (; j < count; ++j) multiply<1>(keys + j, j);
    for (j = count; j > 0 && keys[j - 1] > p; --j)  // later than the first query
      for (int64_t r = 0; r < kShared; r += kLanes) {
        float* x = dots_ + (j - 1) * kShared + r;
        store(x, lane_numbers() + static_cast<int32_t>(p + r) < keys[j - 1] ? splat(-kInf) : load(x));
      }
    float factors[kShared];
    bool changed = false;
    for (int64_t r = 0; r < kShared; r += kLanes) {
      Vec most = load(top_ + r), sum = {};
      const Vec old = most;
      if (several_) {  // hidden from some queries
        const Ints bit = (Ints{} + 1) << (lane_numbers() + static_cast<int32_t>(r));
        const uint16_t* by = &seen_by_[i];
        for (j = 0; j < count; ++j) {
          float* x = dots_ + j * kShared + r;
          const Vec dots = (bit & static_cast<int32_t>(by[j])) != 0 ? load(x) : splat(-kInf);
          store(x, dots);
          most = larger(most, dots);
        }
      } else {
        for (j = 0; j < count; ++j) most = larger(most, load(dots_ + j * kShared + r));
      }
      const Vec base = most == -kInf ? Vec{} : most, factor = exponential<true>(old - base);
      for (j = 0; j < count; ++j) {
        float* x = dots_ + j * kShared + r;
        const Vec e = exponential<true>(load(x) - base);
        store(x, e);
        sum += e;
      }
      store(factors + r, factor), store(top_ + r, most), store(sum_ + r, load(sum_ + r) * factor + sum);
      changed = changed || any(most != old);
    }
    for (int64_t r = 0; r < rows * changed; ++r)
      for (int64_t e = 0; e < wide; e += kLanes) store(out_ + r * wide + e, load(out_ + r * wide + e) * factors[r]);
  }

  // Products of `Keys` keys with all queries, in place j and those after it.
  template <int Keys>
  void multiply(const int32_t* keys, int64_t j) {
    const float* key[Keys];
    for (int k = 0; k < Keys; ++k) {
      const T* row = from_.at + keys[k] * from_.step;
      if constexpr (std::is_same_v<T, float>) {
        key[k] = row;
      } else {
        key[k] = rows_ + k * padded(c.dim);
        copy_rows(Rows<T>{row, 0, nullptr, 0}, 1, 0, c.dim, padded(c.dim), rows_ + k * padded(c.dim));
      }
    }
    Vec sum[Keys][kRegisters] = {};
    for (int64_t e = 0; e < c.dim; ++e) {
      Vec query[kRegisters];
#pragma GCC unroll 4
      for (int w = 0; w < kRegisters; ++w) query[w] = load(turned_ + e * kShared + w * kLanes);
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
      for (int w = 0; w < kRegisters; ++w) store(dots_ + (j + k) * kShared + w * kLanes, sum[k][w]);
  }

  // A few keys at a time: what one piece of rows has read is near for the next.
  void add_values(int64_t b, const int32_t* keys, int64_t weight_step, int64_t next, int64_t rows, int64_t count) {
    const auto add = [&](auto value) {
      for (int64_t j = 0; j < count; j += kNear) {
        const auto row = [=, first = keys + j](int64_t k) { return value(first[k]); };
        row_sums(dots_ + j * next, weight_step, next, rows, row, std::min(kNear, count - j), wide, out_, wide);
      }
    };
    if constexpr (std::is_same_v<T, float>)
      if (reads_values_in_place<T>(c)) {
        const Rows<T> from = c.rows_of<T>(c.value, b, kv_, c.starts[b]);
        return add([=](int64_t key) { return from.at + key * from.step; });
      }
    add([this](int64_t key) { return packed_.value(head_, key); });
  }

  void hide(int64_t listed, int64_t slot, int64_t p, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      float* x = dots_ + r * kTileKeys + slot * kLanes;
      store(x, blocks_.hidden(listed, p + r) ? splat(-kInf) : load(x));
    }
  }

  // One row of logits becomes weights; what was summed before is brought to the new maximum.
  void weigh(int64_t r, int64_t count) {
    float* x = dots_ + r * kTileKeys;
    Vec most = splat(-kInf), sum = {};
    for (int64_t j = 0; j < count; j += kLanes) most = larger(most, load(x + j));
    const float old = top_[r], top = std::max(old, largest_of(most)), base = top == -kInf ? 0.0f : top;
    for (int64_t j = 0; j < count; j += kLanes) {
      const Vec e = exponential<true>(load(x + j) - base);
      store(x + j, e);
      sum += e;
    }
    if (top != old) {
      const float factor = old == -kInf ? 0.0f : std::exp(old - top);
      for (int64_t e = 0; e < wide; e += kLanes) store(out_ + r * wide + e, load(out_ + r * wide + e) * factor);
      sum_[r] *= factor, top_[r] = top;
    }
    sum_[r] += sum_of(sum);
  }

  void finish(int64_t start, int64_t rows) {
    const int64_t all = c.batch * c.heads * c.queries;
    for (int64_t r = 0; r < rows; ++r) {
      const float factor = sum_[r] == 0 ? 0.0f : 1.0f / sum_[r];  // NaN stays
      float* to = c.out + (start + r) * c.value_dim;
      for (int64_t e = 0; e < c.value_dim; ++e) to[e] = out_[r * wide + e] * factor;
      c.lse[start + r] = top_[r], c.lse[all + start + r] = factor;
    }
  }

  const Selected& c;
  const Packed& packed_;
  const int64_t wide;
  Blocks blocks_;
  Scratch scratch_;
  // Keys, the queries that see each where `several_` choices are listed at once, and those that open a page, a bit each.
  std::vector<int32_t> listed_;
  std::vector<uint16_t> seen_by_, page_by_;
  int64_t all_ = 0;  // that are listed
  bool several_ = false;
  int64_t kv_ = 0, head_ = 0;
  Rows<T> from_{};  // keys
  float *dots_, *queries_, *turned_, *rows_, *out_, *top_, *sum_;
};

}  // namespace hyper
