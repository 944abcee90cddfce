// The choice of pages: of those before a chunk's opening that the sinks leave over, the `top` with the largest scores, of
// equal ones the first. A page's score is the product of what the chunk chooses by with the page's mean key, or the largest
// product that a key within the page's bounds could have, the sum of max(q_e least_e, q_e largest_e); of `channels` e alone,
// those of largest |q_e|, where these are not all.
#pragma once

#include <array>
#include <functional>

#include "selected.h"

namespace hyper {

constexpr int64_t kSampled = 128;  // scores that tell which others are worth a look

enum By { kOwn, kFirst, kPrevious, kChunk };  // each query, the first of its chunk, the mean of the one before, of its own

struct Choice {
  int64_t earlier;   // the first queries of the call that are there for the choice alone
  int32_t* chosen;   // [B, H, chunks, most], see Selected; of chunks from that of query `earlier` on
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
    if (!rule.page || last < 0) return;
    const int64_t base = std::max<int64_t>(0, first) / chunk, chunks = last / chunk - base + 1;
    const int64_t pages = std::min(rule.opening(last), c.length(b)) / rule.page, from = rule.sinks / rule.page;
    if (pages <= from) return;
    width_ = rule.bounds ? 2 * c.dim : c.dim, blocks_ = (pages + kLanes - 1) / kLanes;
    few_ = 3 * rule.scoring(c.dim) <= c.dim;
    scores_.resize(2 * kRows * blocks_ * kLanes), queries_.assign(2 * kRows * width_ + kLanes, 0.0f);
    if (chunks == 1 && rule.page == 1 && !rule.bounds) {  // nothing to make of a key, and nobody to share it with
      read(b, h, base, queries_.data());
      score_keys(b, h, pages);
      return best(scores_.data(), from, pages, rule.top, s.chosen + (b * c.heads + h) * c.chunks * c.most);
    }
    pack(b, h, pages);
    for (int64_t i = 0; i < chunks; i += 2 * kRows) {
      const int64_t count = std::min<int64_t>(2 * kRows, chunks - i), end = (base + i + count) * chunk - 1;
      const int64_t seen = std::min(pages, rule.opening(end) / rule.page);
      for (int64_t r = 0; r < count; ++r) read(b, h, base + i + r, &queries_[r * width_]);
      score(count, (seen + kLanes - 1) / kLanes);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t stop = std::min(pages, rule.opening((base + i + r) * chunk) / rule.page);
        best(&scores_[r * blocks_ * kLanes], from, stop, rule.top,
             s.chosen + ((b * c.heads + h) * c.chunks + i + r) * c.most);
      }
    }
  }

 private:
  // Summaries of the pages, in blocks; where few channels count, each channel of all pages side by side. Those of the head
  // before where they are the same.
  void pack(int64_t b, int64_t h, int64_t pages) {
    const Rule& rule = c.rules[h];
    const int64_t kv = h / c.group();
    const std::array<int64_t, 6> made{b, kv, rule.page, rule.bounds, pages, few_};
    if (made == made_) return;
    made_ = made;
    packed_.resize(blocks_ * kLanes * width_), addresses_.resize(blocks_);
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
      put_block(rows, there, width_, to, few_ ? blocks_ * kLanes : kLanes);
      addresses_[block] = to;
    }
  }

  // Products of `count` chunks with blocks of summaries; where few channels count, of these alone, one chunk at a time.
  void score(int64_t count, int64_t blocks) {
    const int64_t step = blocks_ * kLanes;
    if (!few_) {
      products(queries_.data(), width_, count, addresses_.data(), blocks, width_, scores_.data(), step);
      return;
    }
    for (int64_t r = 0; r < count; ++r) {
      const float* query = &queries_[r * width_];
      used_.clear();
      for (int64_t e = 0; e < width_; ++e)
        if (query[e] != 0) used_.push_back(static_cast<int32_t>(e));
      for (int64_t block = 0; block < blocks; ++block) store(&scores_[r * step + block * kLanes], Vec{});
      for (const int32_t e : used_) {
        const Vec number = splat(query[e]);
        const float* from = &packed_[e * step];
        float* to = &scores_[r * step];
        for (int64_t j = 0; j < blocks * kLanes; j += kLanes) store(to + j, load(to + j) + number * load(from + j));
      }
    }
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
      ranks_.push_back(uint64_t{rank_of(std::fabs(numbers[e]))} << 32 | static_cast<uint32_t>(~e));
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
    for (int64_t e = 0; e < c.dim; ++e) {
      float sum = 0;
      for (int64_t r = low; r < high; ++r) sum += number(at<T>(c.query, b, h, r)[e]);
      to[e] = high > low ? sum / (high - low) : 0.0f;
    }
    if (rule.scoring(c.dim) < c.dim) keep_largest(rule.channels, to);
    if (!rule.bounds) return;
    for (int64_t e = 0; e < c.dim; ++e) to[c.dim + e] = std::min(to[e], 0.0f), to[e] = std::max(to[e], 0.0f);
  }

  // A total order: NaN above all, 0 and -0 alike.
  static uint32_t rank_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (bits == 0x80000000u) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  // A rank that is likely to be below the `top` largest of many scores, and not by much: from some of them.
  uint32_t likely(const float* score, int64_t from, int64_t stop, int64_t top) {
    const int64_t count = stop - from;
    if (top >= count) return 0;
    const int64_t above = kSampled * top / count * 5 / 4 + 10;
    if (count < 4 * kSampled || above >= kSampled) return 0;
    std::array<uint32_t, kSampled> some;
    for (int64_t i = 0; i < kSampled; ++i) some[i] = rank_of(score[from + i * count / kSampled]);
    std::nth_element(some.begin(), some.begin() + above, some.end(), std::greater<uint32_t>());
    return some[above];
  }

  // Lists the scores whose rank is at least `least`.
  void list(const float* score, int64_t from, int64_t stop, uint32_t least) {
    ranks_.clear();
    const auto add = [&](int64_t a) { ranks_.push_back(uint64_t{rank_of(score[a])} << 32 | static_cast<uint32_t>(~a)); };
    // the same order by signed numbers, but for -0, which is just below 0 here
    const int32_t bound = static_cast<int32_t>(least ^ 0x80000000u), low = bound == 0 ? -1 : bound;
    int64_t a = from;
    for (; a + kLanes <= stop; a += kLanes) {
      const Ints bits = as_bits(load(score + a));
      for (uint32_t set = bits_of((bits ^ ((bits >> 31) & 0x7fffffff)) >= low); set; set &= set - 1)
        add(a + __builtin_ctz(set));
    }
    for (; a < stop; ++a) add(a);
  }

  // The pages of [from, stop) with the largest scores.
  void best(const float* score, int64_t from, int64_t stop, int64_t top, int32_t* to) {
    if (stop <= from) return;
    const uint32_t least = likely(score, from, stop, top);
    list(score, from, stop, least);
    if (least && static_cast<int64_t>(ranks_.size()) < top) list(score, from, stop, 0);
    if (top < static_cast<int64_t>(ranks_.size())) {
      std::nth_element(ranks_.begin(), ranks_.begin() + top, ranks_.end(), std::greater<uint64_t>());
      ranks_.resize(top);
    }
    for (const uint64_t rank : ranks_) *to++ = static_cast<int32_t>(~static_cast<uint32_t>(rank));
  }

  const Selected& c;
  const Choice& s;
  int64_t width_ = 0, blocks_ = 0;
  bool few_ = false;  // channels count
  std::array<int64_t, 6> made_{-1};
  std::vector<float> packed_, row_, queries_, scores_;
  std::vector<const float*> addresses_;
  std::vector<uint64_t> ranks_;
  std::vector<int32_t> used_;
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
