// The choice of pages: of those before a chunk's opening that the sinks leave over, the `top` with the largest scores, of
// equal ones the first. A page's score is the product of what the chunk chooses by with the page's mean key, or the largest
// product that a key within the page's bounds could have, the sum of max(q_e least_e, q_e largest_e).
#pragma once

#include <array>
#include <functional>

#include "selected.h"

namespace hyper {

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
  ChoiceTask(const Selected& call, const Choice& choice) : c(call), s(choice), row_(2 * c.dim * kLanes) {}

  void run(int64_t b, int64_t h) {
    const Rule& rule = c.rules[h];
    const int64_t chunk = rule.chunk, first = c.place(b, s.earlier), last = c.place(b, c.queries - 1);
    if (!rule.page || last < 0) return;
    const int64_t base = std::max<int64_t>(0, first) / chunk, chunks = last / chunk - base + 1;
    const int64_t pages = std::min(rule.opening(last), c.length(b)) / rule.page, from = rule.sinks / rule.page;
    if (pages <= from) return;
    width_ = rule.bounds ? 2 * c.dim : c.dim, blocks_ = (pages + kLanes - 1) / kLanes;
    pack(b, h, pages);
    scores_.resize(2 * kRows * blocks_ * kLanes), queries_.resize(2 * kRows * width_);
    for (int64_t i = 0; i < chunks; i += 2 * kRows) {
      const int64_t count = std::min<int64_t>(2 * kRows, chunks - i), end = (base + i + count) * chunk - 1;
      const int64_t seen = std::min(pages, rule.opening(end) / rule.page);
      for (int64_t r = 0; r < count; ++r) read(b, h, base + i + r, &queries_[r * width_]);
      products(queries_.data(), width_, count, addresses_.data(), (seen + kLanes - 1) / kLanes, width_, scores_.data(),
               blocks_ * kLanes);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t stop = std::min(pages, rule.opening((base + i + r) * chunk) / rule.page);
        best(&scores_[r * blocks_ * kLanes], from, stop, rule.top,
             s.chosen + ((b * c.heads + h) * c.chunks + i + r) * c.most);
      }
    }
  }

 private:
  // Summaries of the pages; those of the head before where they are the same.
  void pack(int64_t b, int64_t h, int64_t pages) {
    const Rule& rule = c.rules[h];
    const int64_t kv = h / c.group();
    const std::array<int64_t, 5> made{b, kv, rule.page, rule.bounds, pages};
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
      put_block(rows, there, width_, &packed_[block * kLanes * width_]);
      addresses_[block] = &packed_[block * kLanes * width_];
    }
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
      const float mean = high > low ? sum / (high - low) : 0.0f;
      to[e] = rule.bounds ? std::max(mean, 0.0f) : mean;
      if (rule.bounds) to[c.dim + e] = std::min(mean, 0.0f);
    }
  }

  // The pages of [from, stop) with the largest scores, in a total order: NaN above all, 0 and -0 alike.
  void best(const float* score, int64_t from, int64_t stop, int64_t top, int32_t* to) {
    ranks_.clear();
    for (int64_t a = from; a < stop; ++a) {
      uint32_t bits;
      std::memcpy(&bits, score + a, 4);
      if (bits == 0x80000000u) bits = 0;
      bits = bits >> 31 ? ~bits : bits | 0x80000000u;
      ranks_.push_back(uint64_t{bits} << 32 | static_cast<uint32_t>(~a));
    }
    if (top < static_cast<int64_t>(ranks_.size())) {
      std::nth_element(ranks_.begin(), ranks_.begin() + top, ranks_.end(), std::greater<uint64_t>());
      ranks_.resize(top);
    }
    for (const uint64_t rank : ranks_) *to++ = static_cast<int32_t>(~static_cast<uint32_t>(rank));
  }

  const Selected& c;
  const Choice& s;
  int64_t width_ = 0, blocks_ = 0;
  std::array<int64_t, 5> made_{-1};
  std::vector<float> packed_, row_, queries_, scores_;
  std::vector<const float*> addresses_;
  std::vector<uint64_t> ranks_;
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
