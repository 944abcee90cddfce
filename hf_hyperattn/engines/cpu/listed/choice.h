// The choice of pages: of those before a chunk's opening that the sinks leave over, the `top` with the largest scores, of
// equal ones the first. A page's score is the product of what the chunk chooses by with the page's mean key, or the largest
// product that a key within the page's bounds could have, the sum of max(q_e least_e, q_e largest_e); of `channels` e alone,
// those of largest |q_e|, where these are not all.
#pragma once

#include <array>
#include <functional>

#include "engines/cpu/listed/largest.h"
#include "engines/cpu/listed/blocks.h"

namespace hyper {

// Each query, the first of its chunk, the mean of the one before, of its own; or what is there already stays.
enum By { kOwn, kFirst, kPrevious, kChunk, kKept };

struct Choice {
  int64_t earlier;   // the first queries of the call that are there for the choice alone
  int32_t* chosen;   // [B, places], see Selected; of chunks from that of query `earlier` on
  // [H], float [B, Hkv, pages, width] each, as `summarize` makes them; without address: they are made here.
  const Matrix* summaries;
};

// New summaries of some pages, for later choices: pages [from, to) of every row, counted from its first key.
struct Summaries {
  Matrix key, out;   // `out` is float
  int64_t half, batch, heads, dim, page, bounds, threads;
  const int64_t *starts, *from, *to;  // [B]
};

// Least and largest, or means, of `page` keys: the largest ones first, then the least, as they are multiplied.
template <typename T>
void summarize(Rows<T> keys, int64_t page, int64_t dim, bool bounds, float* to) {
  const float share = 1.0f / page;
  int64_t e = 0;
  for (; e + kLanes <= dim; e += kLanes) {
    Vec most = load_numbers(keys.at + e), least = most, sum = most;
    for (int64_t j = 1; j < page; ++j) {
      const Vec x = load_numbers(keys.at + j * keys.step + e);
      if (bounds) most = larger(most, x), least = smaller(least, x);
      else sum += x;
    }
    store(to + e, bounds ? most : sum * share);
    if (bounds) store(to + dim + e, least);
  }
  for (; e < dim; ++e) {
    float most = number(keys.at[e]), least = most, sum = most;
    for (int64_t j = 1; j < page; ++j) {
      const float x = number(keys.at[j * keys.step + e]);
      most = std::max(most, x), least = std::min(least, x), sum += x;
    }
    to[e] = bounds ? most : sum * share;
    if (bounds) to[dim + e] = least;
  }
}

template <typename T>
class ChoiceTask {
 public:
  ChoiceTask(const Selected& call, const Choice& choice) : c(call), s(choice), row_(kLanes * std::max(2 * c.dim, padded(c.dim))) {}

  void run(int64_t b, int64_t h) {
    const Rule& rule = c.rules[h];
    const int64_t chunk = rule.chunk, first = c.place(b, s.earlier), last = c.place(b, c.queries - 1);
    if (!rule.page || rule.by == kKept) return;
    int32_t* chosen = s.chosen + b * c.places + rule.at;
    std::fill_n(chosen, ((c.queries - s.earlier) / chunk + 2) * rule.most, -1);
    if (last < 0) return;
    const int64_t base = std::max<int64_t>(0, first) / chunk, chunks = last / chunk - base + 1;
    const int64_t pages = std::min(rule.opening(last), c.length(b)) / rule.page, from = rule.sinks / rule.page;
    if (pages <= from) return;
    width_ = rule.bounds ? 2 * c.dim : c.dim, blocks_ = (pages + kLanes - 1) / kLanes;
    step_ = (blocks_ | 1) * kLanes;  // rows a power of two apart would share what the CPU keeps of them
    few_ = 3 * rule.scoring(c.dim) <= c.dim;
    scores_.resize(2 * kRows * step_), queries_.assign(2 * kRows * width_ + kLanes, 0.0f);
    if (chunks == 1 && rule.page == 1 && !rule.bounds) {  // nothing to make of a key, and nobody to share it with
      read(b, h, base, queries_.data());
      score_keys(b, h, pages);
      largest_.find(scores_.data(), std::max(from, first_in_reach(rule, base)), pages, rule.top, chosen);
      return;
    }
    pack(b, h, pages);
    for (int64_t i = 0; i < chunks; i += 2 * kRows) {
      const int64_t count = std::min<int64_t>(2 * kRows, chunks - i), end = (base + i + count) * chunk - 1;
      const int64_t seen = std::min(pages, rule.opening(end) / rule.page);
      for (int64_t r = 0; r < count; ++r) read(b, h, base + i + r, &queries_[r * width_]);
      score(count, (seen + kLanes - 1) / kLanes);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t stop = std::min(pages, rule.opening((base + i + r) * chunk) / rule.page);
        const int64_t begin = std::max(from, first_in_reach(rule, base + i + r));
        largest_.find(&scores_[r * step_], begin, stop, rule.top, chosen + (i + r) * rule.most);
      }
    }
  }

 private:
  // The first page that is in the host's window until a chunk ends.
  int64_t first_in_reach(const Rule& rule, int64_t chunk) const {
    return std::max<int64_t>(0, (chunk + 1) * rule.chunk - c.reach() + rule.page - 1) / rule.page;
  }

  // Summaries of the pages, in blocks; where few channels count, each channel of all pages side by side. Those of the head
  // before where they are the same.
  void pack(int64_t b, int64_t h, int64_t pages) {
    const Rule& rule = c.rules[h];
    const int64_t kv = h / c.group();
    const std::array<int64_t, 6> made{b, kv, rule.page, rule.bounds, pages, few_};
    if (made == made_) return;
    made_ = made;
    packed_.resize(step_ * width_), addresses_.resize(blocks_);
    for (int64_t block = 0; block < blocks_; ++block) {
      const int64_t there = std::min<int64_t>(kLanes, pages - block * kLanes);
      Rows<float> rows{row_.data(), width_, nullptr, 0};
      if (s.summaries[h].at) rows = c.rows_of<float>(s.summaries[h], b, kv, block * kLanes);
      else
        for (int64_t i = 0; i < there; ++i) {
          const auto keys = c.rows_of<T>(c.key, b, kv, c.starts[b] + (block * kLanes + i) * rule.page);
          summarize(keys, rule.page, c.dim, rule.bounds, &row_[i * width_]);
        }
      float* to = &packed_[block * kLanes * (few_ ? 1 : width_)];
      put_block(rows, there, width_, to, few_ ? step_ : kLanes);
      addresses_[block] = to;
    }
  }

  // Products of `count` chunks with blocks of summaries; where few channels count, of these alone, one chunk at a time.
  void score(int64_t count, int64_t blocks) {
    if (!few_) {
      products(queries_.data(), width_, count, addresses_.data(), blocks, width_, scores_.data(), step_);
      return;
    }
    for (int64_t r = 0; r < count; ++r) {
      const float* query = &queries_[r * width_];
      used_.clear();
      for (int64_t e = 0; e < width_; ++e)
        if (query[e] != 0) used_.push_back(static_cast<int32_t>(e));
      int64_t block = 0;
      for (; block + 8 <= blocks; block += 8) score_used<8>(query, block * kLanes, &scores_[r * step_]);
      for (; block < blocks; ++block) score_used<1>(query, block * kLanes, &scores_[r * step_]);
    }
  }

  // Of the channels that count, `Wide` registers of scores from page j on.
  template <int Wide>
  void score_used(const float* query, int64_t j, float* to) const {
    Vec sum[Wide] = {};
    for (const int32_t e : used_) {
      const Vec number = splat(query[e]);
      const float* from = &packed_[e * step_ + j];
#pragma GCC unroll 8
      for (int w = 0; w < Wide; ++w) sum[w] += number * load(from + w * kLanes);
    }
#pragma GCC unroll 8
    for (int w = 0; w < Wide; ++w) store(to + j + w * kLanes, sum[w]);
  }

  // Products of one chunk with single keys, which are read where they lie.
  void score_keys(int64_t b, int64_t h, int64_t keys) {
    const int64_t filled = padded(c.dim);
    const auto term = [&](Vec key, int64_t, int64_t e, bool) { return key * load(&queries_[e]); };
    for (int64_t j = 0; j < keys; j += kLanes) {
      const int64_t there = std::min<int64_t>(kLanes, keys - j);
      const auto from = c.rows_of<T>(c.key, b, h / c.group(), c.starts[b] + j);
      const float* rows = row_.data();
      int64_t step = filled;
      if constexpr (std::is_same_v<T, float>)
        if (c.dim == filled) rows = from.at, step = from.step;
      if (rows == row_.data()) copy_rows(from, there, 0, c.dim, filled, row_.data());
      sum_rows(rows, step, there, filled, term, [](int64_t) {}, &scores_[j]);
    }
  }

  // Sets all but the `count` numbers of largest size to 0; of equal ones the first stay.
  void keep_largest(int64_t count, float* numbers) {
    ranks_.clear();
    for (int64_t e = 0; e < c.dim; ++e)
      ranks_.push_back(uint64_t(rank_of(std::fabs(numbers[e]))) << 32 | static_cast<uint32_t>(~e));
    std::nth_element(ranks_.begin(), ranks_.begin() + count, ranks_.end(), std::greater<uint64_t>());
    for (auto rank = ranks_.begin() + count; rank != ranks_.end(); ++rank) numbers[~static_cast<uint32_t>(*rank)] = 0.0f;
  }

  // What a chunk chooses by; with bounds its positive numbers, then its negative ones.
  void read(int64_t b, int64_t h, int64_t chunk, float* to) {
    const Rule& rule = c.rules[h];
    int64_t start = chunk * rule.chunk, count = rule.by == kOwn || rule.by == kFirst ? 1 : rule.chunk;
    if (rule.by == kPrevious) start -= rule.chunk;
    const int64_t row = start - c.place(b, 0), low = std::max<int64_t>(0, row);
    int64_t high = std::min(c.queries, row + count);
    if (start < c.length(b)) high = std::min(high, c.length(b) - c.place(b, 0));  // a mean has no padding in it
    std::fill_n(to, c.dim, 0.0f);
    for (int64_t r = low; r < high; ++r) {
      const T* query = at<T>(c.query, b, h, r);
      for (int64_t e = 0; e < c.dim; ++e) to[e] += number(query[e]);
    }
    if (high > low + 1)
      for (int64_t e = 0; e < c.dim; ++e) to[e] /= high - low;
    if (rule.scoring(c.dim) < c.dim) keep_largest(rule.channels, to);
    if (!rule.bounds) return;
    for (int64_t e = 0; e < c.dim; ++e) to[c.dim + e] = std::min(to[e], 0.0f), to[e] = std::max(to[e], 0.0f);
  }

  const Selected& c;
  const Choice& s;
  int64_t width_ = 0, blocks_ = 0, step_ = 0;
  bool few_ = false;  // channels count
  std::array<int64_t, 6> made_{-1};
  std::vector<float> packed_, row_, queries_, scores_;
  std::vector<const float*> addresses_;
  std::vector<uint64_t> ranks_;
  std::vector<int32_t> used_;
  Largest largest_;
};

template <typename T>
void selected_choice(const Selected& c, const Choice& s) {
  // few queries: what counts is to read keys once, so the heads that share them follow each other
  const int64_t together = c.queries - s.earlier <= kFew ? c.group() : 1, tasks = c.batch * c.heads / together;
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(tasks, c.threads)))
  {
    ChoiceTask<T> task(c, s);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i)
      for (int64_t h = i * together; h < (i + 1) * together; ++h) task.run(h / c.heads, h % c.heads);
  }
}

template <typename T>
void page_summaries(const Summaries& s) {
#pragma omp parallel for num_threads(s.threads) schedule(static)
  for (int64_t i = 0; i < s.batch * s.heads; ++i) {
    const int64_t b = i / s.heads, head = i % s.heads;
    for (int64_t a = s.from[b]; a < s.to[b]; ++a) {
      const Rows<T> keys{at<T>(s.key, b, head, s.starts[b] + a * s.page), s.key.row, nullptr, 0, 1.0f};
      summarize(keys, s.page, s.dim, s.bounds, const_cast<float*>(at<float>(s.out, b, head, a)));
    }
  }
}

}  // namespace hyper
