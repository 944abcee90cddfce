// Causal attention in which every head has a rule of its own: the first keys, the nearest ones, and pages of keys that a
// chunk of queries has chosen. Heads without pages go by blocks of keys (blocks.h). Heads with pages go by lists of keys
// (tile.h), for the queries of one chunk, or for neighbours of several chunks, since most of their pages are the same. A call
// with a few queries goes by decode.h.
#pragma once

#include "engines/cpu/listed/blocks.h"

namespace hyper {

static_assert(kShared <= kTileRows);

template <typename T>
class SelectedTask {
 public:
  SelectedTask(const Selected& call, const Packed& packed)
      : c(call), packed_(packed), wide(packed.wide), tile_(c.dim, c.value_dim), blocks_(c.blocks()),
        scratch_(kTileRows * (kTileKeys + c.dim + wide) + 256) {
    dots_ = scratch_.take(kTileRows * kTileKeys);
    queries_ = scratch_.take(kTileRows * c.dim);
    out_ = scratch_.take(kTileRows * wide);
  }

  // Queries [row, end) of a head.
  void run(int64_t b, int64_t h, int64_t row, int64_t end) {
    const Rule& rule = c.rules[h];
    const auto over = [&](int64_t together, int64_t most, auto attend) {
      over_tiles(c, b, row, end, together, most, [&](int64_t r, int64_t p, int64_t rows) {
        p < 0 ? clear(start_of(b, h, r), rows) : attend(r, p, rows);
      });
    };
    if (rule.page) over(std::max(rule.chunk, kShared), kShared, [&](auto... at) { by_list(b, h, at...); });
    else over(kSpan, kTileRows, [&](auto... at) { by_blocks(b, h, at...); });
  }

 private:
  int64_t start_of(int64_t b, int64_t h, int64_t row) const { return (b * c.heads + h) * c.queries + row; }

  // Padding sees nothing.
  void clear(int64_t start, int64_t rows) const {
    std::fill_n(c.out + start * c.value_dim, rows * c.value_dim, 0.0f);
    std::fill_n(c.lse + start, rows, -kInf);
    std::fill_n(c.lse + c.batch * c.heads * c.queries + start, rows, 0.0f);
  }

  void save(int64_t at, const Running& all) const {
    c.lse[at] = all.top, c.lse[c.batch * c.heads * c.queries + at] = all.share();
  }

  void by_blocks(int64_t b, int64_t h, int64_t row, int64_t p, int64_t rows) {
    const int64_t head = b * c.kv_heads + h / c.group(), start = start_of(b, h, row);
    auto queries = c.rows_of<T>(c.query, b, h, row);
    queries.scale = c.scale;
    copy_rows(queries, rows, 0, c.dim, c.dim, queries_);
    std::fill_n(out_, rows * wide, 0.0f);
    std::fill_n(running_, rows, c.start(h));
    const float* bias = c.biases(b, h);
    blocks_.list(c, b, h, p, rows);
    const float *keys[kListed], *values[kListed];
    for (int64_t from = 0, all = blocks_.listed.size(); from < all; from += kListed) {
      const int64_t count = std::min(kListed, all - from);
      for (int64_t i = 0; i < count; ++i) {
        const int32_t block = blocks_.listed[from + i];
        keys[i] = packed_.keys(head, block), values[i] = packed_.values(head, block);
      }
      products(queries_, c.dim, rows, keys, count, c.dim, dots_);
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t r = 0; r < rows && (c.softcap || bias); ++r) {
          float* x = dots_ + r * kTileKeys + i * kLanes;
          store(x, logits_of(c, load(x), bias, blocks_.listed[from + i], c.length(b)));
        }
        if (!blocks_.whole[from + i]) hide(from + i, i, p, rows);
      }
      for (int64_t r = 0; r < rows; ++r) weigh(r, count * kLanes);
      sums(dots_, rows, values, count, wide, out_, wide);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const float share = running_[r].share();
      for (int64_t e = 0; e < c.value_dim; ++e) c.out[(start + r) * c.value_dim + e] = out_[r * wide + e] * share;
      save(start + r, running_[r]);
    }
  }

  void hide(int64_t listed, int64_t slot, int64_t p, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      float* x = dots_ + r * kTileKeys + slot * kLanes;
      store(x, blocks_.hidden(listed, p + r) ? splat(-kInf) : load(x));
    }
  }

  void weigh(int64_t r, int64_t count) {
    const float factor = take(dots_ + r * kTileKeys, count, running_[r]);
    if (factor == 1.0f) return;
    for (int64_t e = r * wide; e < (r + 1) * wide; e += kLanes) store(out_ + e, load(out_ + e) * factor);
  }

  // Queries whose keys are listed, at most kShared.
  void by_list(int64_t b, int64_t h, int64_t row, int64_t p, int64_t rows) {
    if (!list_keys(b, h, p, rows)) {
      for (int64_t r = 0; r < rows; ++r) by_list(b, h, row + r, p + r, 1);
      return;
    }
    attend(b, h, row, rows, false);
    if (tile_.has_nonfinite()) attend(b, h, row, rows, true);
    const int64_t start = start_of(b, h, row);
    for (int64_t r = 0; r < rows; ++r) {
      tile_.write(r, c.value_dim, c.out + (start + r) * c.value_dim);
      save(start + r, tile_.running(r));
    }
  }

  // `guarded`: values that some queries do not see may be NaN or infinite.
  void attend(int64_t b, int64_t h, int64_t row, int64_t rows, bool guarded) {
    auto queries = c.rows_of<T>(c.query, b, h, row);
    queries.scale = c.scale;
    tile_.start(queries, rows, true, c.start(h).top);
    const float* bias = c.biases(b, h);
    const int64_t kv = h / c.group(), head = b * c.kv_heads + kv;
    const Listed<T> keys{at<T>(c.key, b, kv, c.starts[b]), c.key.row}, values{at<T>(c.value, b, kv, c.starts[b]), c.value.row};
    for (int64_t from = 0; from < list_.count; from += kTileKeys) {
      const int64_t count = std::min(kTileKeys, list_.count - from);
      const int32_t* listed = list_.rows.data() + from;
      const uint16_t* seen_by = list_.seen_by.data() + from;
      const Logits logits = tile_.logits_in(dots_, count);
      tile_.multiply(keys, listed, count, logits);
      if (c.softcap) tile_.cap(logits, count, c.softcap);
      if (bias) tile_.shift_rows(logits, listed, count, bias);
      tile_.hide(logits, seen_by, std::clamp<int64_t>(list_.whole - from, 0, count), count);
      tile_.weigh(logits, count);
      const auto add = [&](auto value) {
        guarded ? tile_.add_guarded(value, logits, seen_by, count) : tile_.add(value, logits, count);
      };
      if (reads_values_in_place(c)) add([=](int64_t j) { return values.row(listed[j]); });
      else add([=, this](int64_t j) { return packed_.value(head, listed[j]); });
    }
  }

  // Lists the keys that any query at positions [p, p + rows) sees. Returns false where queries of several chunks had better
  // go one by one.
  bool list_keys(int64_t b, int64_t h, int64_t p, int64_t rows) {
    const Rule& rule = c.rules[h];
    const int64_t last = p + rows - 1, seen = std::min(last + 1, c.length(b)), opening = std::min(rule.opening(last), seen);
    const Sight sight{p, rows, true, c.reach()};
    const bool several = p / rule.chunk != last / rule.chunk;
    const int64_t sinks = std::min(rule.sinks, opening);
    parts_.clear(), list_.clear();
    if (several) {
      find_pages(b, h, p, rows, (opening + rule.page - 1) / rule.page);
      if (rows > 1 && c.dim % kLanes == 0 && wastes(rule, sinks + seen - opening, rows)) return false;
    }
    list_.reserve(several ? seen : sinks + rule.most * rule.page + seen - opening);
    const auto add = [&](int64_t first, int64_t end, uint16_t by) {  // what all see goes to the list at once
      if (!c.window && by == sight.all() && end <= p + 1) list_.add(first, end, by);
      else parts_.push_back({first, end, by});
    };
    const auto add_page = [&](int64_t page, uint16_t by) {
      add(std::max(page * rule.page, rule.sinks), std::min((page + 1) * rule.page, opening), by);
    };
    add(0, sinks, sight.all());
    if (several) {
      for (const int64_t page : pages_) add_page(page, page_by_[page]);
    } else {
      const int32_t* pages = c.pages(b, h, p);
      for (int64_t i = 0; i < rule.most; ++i)
        if (pages[i] >= 0) add_page(pages[i], sight.all());
    }
    parts_.push_back({opening, seen, sight.all()});
    const int64_t whole = list_.count;
    list_.whole = whole + sight.over(parts_, [&](const Interval& keys) { list_.add(keys.first, keys.last, keys.by); });
    return true;
  }

  // Whether queries of several chunks share too little of their pages; `common` keys are seen by all of them.
  bool wastes(const Rule& rule, int64_t common, int64_t rows) const {
    int64_t pairs = common * rows;
    for (const int64_t page : pages_) pairs += std::popcount(page_by_[page]) * rule.page;
    const int64_t count = common + static_cast<int64_t>(pages_.size()) * rule.page;
    return count * kShared > kWaste * pairs;
  }

  // The pages before `end` that queries of several chunks see, and of each these queries, a bit each.
  void find_pages(int64_t b, int64_t h, int64_t p, int64_t rows, int64_t end) {
    const Rule& rule = c.rules[h];
    page_by_.assign(end, 0), pages_.clear();
    for (int64_t r = 0; r < rows; ++r) {
      const auto open = [&](int64_t page) { page_by_[page] |= uint16_t{1} << r; };
      const int32_t* chosen = c.pages(b, h, p + r);
      for (int64_t i = 0; i < rule.most; ++i)
        if (chosen[i] >= 0 && chosen[i] < end) open(chosen[i]);
      for (int64_t page = rule.opening(p + r) / rule.page; page < end; ++page) open(page);
    }
    for (int64_t page = 0; page < end; ++page)
      if (page_by_[page]) pages_.push_back(page);
  }

  const Selected& c;
  const Packed& packed_;
  const int64_t wide;
  QueryTile tile_;
  List list_;
  std::vector<Interval> parts_;
  std::vector<uint16_t> page_by_;
  std::vector<int64_t> pages_;
  Blocks blocks_;
  Running running_[kTileRows];
  Scratch scratch_;
  float *dots_, *queries_, *out_;
};

}  // namespace hyper
