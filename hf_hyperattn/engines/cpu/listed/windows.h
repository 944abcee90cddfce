// One tile of key-tied attention: as many queries of one bottom window and one head as a register has lanes.
//
// The queries lie across these lanes, so keys and values are read as they stand, row by row, and the
// softmax runs down the columns without sums across lanes. Closed blocks first (refinement needs all their logits),
// then refinement query by query, then the tokens near by and the sinks in chunks, with a running maximum. What
// refinement opens differs from query to query; its rows are read straight from the tables.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "engines/cpu/listed/largest.h"
#include "engines/cpu/listed/table.h"

namespace {

constexpr int64_t kChunk = 512;  // token rows between two corrections of the running maximum

// Rows of one level for one (batch row, key head); of those from `head` on, `gone` are not there and never read.
struct Table {
  Side key, value;
  int64_t head, gone;
  int64_t at(int64_t row) const { return row < head ? row : row - gone; }
};

// The call, as its caller lays it out.
struct Call {
  float *out, *lse;  // [B, H, N, dv], [B, H, N], contiguous
  const float* query;
  int64_t query_steps[3];
  int64_t levels;              // above the tokens
  const void* const* keys;     // levels + 1 tables; means are float
  const void* const* values;
  const int64_t* key_steps;    // 3 for each table: batch, head, row
  const int64_t* value_steps;
  const int64_t* widths;       // levels + 1: 1, then the sizes
  const int64_t* held;         // 2 for each table: rows at its front, and how many after those are gone
  int64_t key_kind, value_kind;  // of the tokens, see Kind
  int64_t batch, heads, kv_heads, queries, dim, value_dim;
  const int64_t *near, *sinks, *top_k;  // per head
  const float *block_bias, *sink_logit;  // per head, or null
  const int64_t *starts, *stops;         // per batch row
  int64_t is_causal, offset, threads;
  float scale;
};

// Some rows of one level, all attended to.
struct Segment {
  int64_t level, first, last;
};

// Closed blocks of one level, or tokens, with their scores for one query; ids rise, so that of equal ones the first stands
// first.
struct Candidates {
  std::vector<int32_t> ids;
  std::vector<float> scores;
  std::vector<int32_t> standing;  // the row of the tile's blocks, where it is one of these, else kLaid
  int32_t count = 0;

  static constexpr int32_t kLaid = -1;

  void reserve(size_t most) {
    if (ids.size() >= most) return;
    ids.resize(most);
    scores.resize(most);
    standing.resize(most);
  }
  // Adds places [first, last) of what the level above laid open.
  void add_laid(const Candidates& laid, int32_t first, int32_t last) {
    std::copy(laid.ids.data() + first, laid.ids.data() + last, ids.data() + count);
    std::copy(laid.scores.data() + first, laid.scores.data() + last, scores.data() + count);
    std::fill_n(standing.data() + count, last - first, kLaid);
    count += last - first;
  }

  // Adds blocks [first, last), whose scores are `kLanes` apart and begin with those of row `row`.
  void add_standing(int64_t first, int64_t last, int32_t row, const float* from) {
    const int32_t more = static_cast<int32_t>(last - first);
    std::iota(ids.data() + count, ids.data() + count + more, static_cast<int32_t>(first));
    std::iota(standing.data() + count, standing.data() + count + more, row);
    float* to = scores.data() + count;
    for (int32_t i = 0; i < more; ++i) to[i] = from[i * kLanes];
    count += more;
  }
};

// What refinement laid open to one query: rows of several levels, one after the other, and their logits.
struct Opened {
  std::vector<int32_t> ids;
  std::vector<float> logits;
  int64_t count = 0;
  std::vector<int64_t> ends;  // of each level, top first

  void reserve(size_t most) {
    if (ids.size() >= most) return;
    ids.resize(most);
    logits.resize(most);
  }
};

// What one thread keeps between tiles.
struct Buffers {
  std::vector<float> blocks, tokens, queries, grads, weights, widened;
  std::vector<Opened> opened = std::vector<Opened>(kLanes);
  Candidates here, laid;
  Largest largest;
  std::vector<int32_t> chosen;  // places among the candidates
  std::vector<Segment> closed, plain;
};

class Tile {
 public:
  // Queries at positions [first, first + lanes), counted from the row's first real token, of bottom window `window`.
  Tile(const Call& call, Buffers& buffers, int64_t row, int64_t head, int64_t window, int64_t first, int lanes)
      : c_(call), b_(buffers), row_(row), head_(head), first_(first), lanes_(lanes) {
    tokens_ = c_.stops[row] - c_.starts[row];
    const int64_t kv = head / (c_.heads / c_.kv_heads);
    for (int64_t l = 0; l <= c_.levels; ++l) {
      const int64_t skip = l ? 0 : c_.starts[row];
      const int64_t *ks = c_.key_steps + 3 * l, *vs = c_.value_steps + 3 * l;
      const int64_t key_first = row * ks[0] + kv * ks[1] + skip * ks[2];
      const int64_t value_first = row * vs[0] + kv * vs[1] + skip * vs[2];
      tables_.push_back({Side(c_.keys[l], key_first, ks[2], l ? kFloat : c_.key_kind),
                         Side(c_.values[l], value_first, vs[2], l ? kFloat : c_.value_kind),
                         c_.held[2 * l] - skip, c_.held[2 * l + 1]});
    }
    size_ = c_.levels ? c_.widths[1] : kLanes;
    const int64_t spare = std::min(std::max<int64_t>(c_.near[head], 1), tokens_ + size_) - 1;
    low_ = std::max<int64_t>(0, window * size_ - spare);
    high_ = window * size_ + size_ - 1 + (c_.is_causal ? 0 : spare);
    sinks_ = std::min(c_.sinks[head], tokens_);
    bias_ = c_.block_bias ? c_.block_bias[head] : 0.0f;
  }

  void run() {
    cover();
    start();
    attend_blocks();
    attend_tokens();
    if (refined())
      for (int q = 0; q < lanes_; ++q) attend_opened(q);
    finish();
  }

 protected:
  // Everything that stands in the cover, with the logits of its blocks.
  void cover() {
    read_queries();
    place();
    read_blocks();
    if (refined())
      for (int q = 0; q < lanes_; ++q) refine(q);
    bias_blocks();
  }

  // Keys and values of rows [first, first + count) of a level, either until rows are asked for again.
  Run keys(int64_t level, int64_t first, int64_t count) {
    return tables_[level].key.run(tables_[level].at(first), count, c_.dim, b_.widened);
  }
  Run values(int64_t level, int64_t first, int64_t count) {
    return tables_[level].value.run(tables_[level].at(first), count, c_.value_dim, b_.widened);
  }

  bool refined() const { return c_.top_k[head_] > 0 && c_.levels; }
  int64_t blocks(int64_t level) const {
    return (tokens_ + (c_.is_causal ? 0 : c_.widths[level] - 1)) / c_.widths[level];
  }
  int64_t members(int64_t level, int64_t block) const {
    return std::min(c_.widths[level], tokens_ - block * c_.widths[level]);
  }

  void read_queries() {
    query_row_ = first_ + c_.starts[row_] - c_.offset;
    b_.queries.assign(c_.dim * kLanes + lanes_ * c_.dim, 0.0f);
    across_ = b_.queries.data();
    along_ = across_ + c_.dim * kLanes;
    const float* q = c_.query + row_ * c_.query_steps[0] + head_ * c_.query_steps[1] + query_row_ * c_.query_steps[2];
    for (int lane = 0; lane < lanes_; ++lane)
      for (int64_t e = 0; e < c_.dim; ++e) {
        const float x = q[lane * c_.query_steps[2] + e] * c_.scale;
        across_[e * kLanes + lane] = x;
        along_[lane * c_.dim + e] = x;
      }
  }

  void start() {
    const float sink = c_.sink_logit ? c_.sink_logit[head_] : -kInf;
    top_ = splat(sink);
    total_ = splat(sink == -kInf ? 0.0f : 1.0f);
    out_ = c_.out + ((row_ * c_.heads + head_) * c_.queries + query_row_) * c_.value_dim;
    std::fill(out_, out_ + lanes_ * c_.value_dim, 0.0f);
  }

  // The closed blocks of every level and the tokens, before refinement.
  void place() {
    b_.closed.clear();
    b_.plain.clear();
    for (int64_t l = c_.levels; l >= 0; --l) {
      const int64_t width = c_.widths[l], count = l ? blocks(l) : tokens_;
      int64_t parts[2][2] = {{0, count}, {0, 0}};  // whose parents are open
      if (l < c_.levels) {
        const int64_t parent = c_.widths[l + 1], children = parent / width;
        parts[0][1] = (sinks_ + parent - 1) / parent * children;
        parts[1][0] = std::max(parts[0][1], low_ / parent * children);
        parts[1][1] = (high_ / parent + 1) * children;
      }
      for (auto& part : parts) {
        const int64_t last = std::min(part[1], count);
        if (!l) {
          if (part[0] < last) b_.plain.push_back({0, part[0], last});
          continue;
        }
        const int64_t front = std::max(part[0], (sinks_ + width - 1) / width);
        const int64_t left = std::min(last, low_ / width), right = std::max(front, high_ / width + 1);
        if (front < left) b_.closed.push_back({l, front, left});
        if (!c_.is_causal && right < last) b_.closed.push_back({l, right, last});
      }
    }
  }

  // Logits of all closed blocks with log|B|, [block][lane].
  void read_blocks() {
    int64_t count = 0;
    for (const Segment& s : b_.closed) count += s.last - s.first;
    b_.blocks.resize(count * kLanes);
    float* to = b_.blocks.data();
    for (const Segment& s : b_.closed) {
      const Run rows = keys(s.level, s.first, s.last - s.first);
      logits_of(rows.at, rows.step, s.last - s.first, across_, c_.dim, to);
      const float whole = std::log(static_cast<float>(c_.widths[s.level]));
      for (int64_t block = s.first; block < s.last; ++block, to += kLanes) {
        const int64_t size = members(s.level, block);
        store(to, load(to) + (size == c_.widths[s.level] ? whole : std::log(static_cast<float>(size))));
      }
    }
  }

  // Opens the best blocks of every level for one query: they leave `blocks`, their children go to `opened`.
  void refine(int q) {
    const int32_t k = static_cast<int32_t>(std::min(c_.top_k[head_], blocks(1) + 1));
    Opened& opened = b_.opened[q];
    Candidates &here = b_.here, &laid = b_.laid;
    size_t most = b_.blocks.size() / kLanes + kLanes, all = kLanes;
    for (int64_t level = c_.levels; level > 0; --level) {
      const size_t children = k * (c_.widths[level] / c_.widths[level - 1]) + kLanes;
      most = std::max(most, b_.blocks.size() / kLanes + children + kLanes);
      all += children;
    }
    here.reserve(most);
    laid.reserve(most);
    b_.chosen.resize(k);
    opened.reserve(all);
    opened.ends.clear();
    opened.count = 0;
    laid.count = 0;
    int32_t row = 0;
    auto segment = b_.closed.begin();
    for (int64_t level = c_.levels; level > 0; --level) {
      // Those that the level above laid open lie between the segments that stand, whose parents were never closed.
      here.count = 0;
      int32_t next = 0;
      for (; segment != b_.closed.end() && segment->level == level; ++segment) {
        int32_t end = next;
        while (end < laid.count && laid.ids[end] < segment->first) ++end;
        here.add_laid(laid, next, end);
        here.add_standing(segment->first, segment->last, row, &b_.blocks[row * kLanes + q]);
        next = end;
        row += static_cast<int32_t>(segment->last - segment->first);
      }
      here.add_laid(laid, next, laid.count);
      const int32_t* chosen = b_.chosen.data();
      const int64_t count = b_.largest.find(here.scores.data(), 0, here.count, k, b_.chosen.data());
      for (int64_t i = 0; i < count; ++i) {
        int32_t& standing = here.standing[chosen[i]];
        if (standing != Candidates::kLaid) b_.blocks[standing * kLanes + q] = -kInf;
        standing = 0;  // no longer closed
      }
      const int32_t *ids = here.ids.data(), *standing = here.standing.data();
      const float* scores = here.scores.data();
      int32_t* closed = opened.ids.data();
      float* logits = opened.logits.data();
      int64_t held = opened.count;
      const int32_t places = laid.count ? here.count : 0;
      for (int32_t i = 0; i < places; ++i) {  // what was laid open and stays closed; any other is written over
        closed[held] = ids[i];
        logits[held] = scores[i] + bias_;  // never a single token: the caller sees to it
        held += standing[i] == Candidates::kLaid;
      }
      opened.count = held;
      opened.ends.push_back(opened.count);
      open(level, q, count);
    }
    std::copy_n(laid.ids.begin(), laid.count, opened.ids.begin() + opened.count);
    std::copy_n(laid.scores.begin(), laid.count, opened.logits.begin() + opened.count);
    opened.count += laid.count;
    opened.ends.push_back(opened.count);
  }

  // Lists the children of the `count` chosen blocks of `level` in `laid`, their logits with log|B|.
  void open(int64_t level, int q, int64_t count) {
    const Candidates& here = b_.here;
    Candidates& laid = b_.laid;
    const int32_t children = static_cast<int32_t>(c_.widths[level] / c_.widths[level - 1]);
    const int32_t limit = static_cast<int32_t>(level > 1 ? blocks(level - 1) : tokens_);
    laid.count = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t first = here.ids[b_.chosen[i]] * children;
      const int32_t there = std::min(children, limit - first);
      std::iota(laid.ids.data() + laid.count, laid.ids.data() + laid.count + there, first);
      laid.count += there;
    }
    if (!laid.count) return;
    std::fill_n(laid.ids.data() + laid.count, kLanes, laid.ids[laid.count - 1]);  // `dots` reads whole vectors
    const Side& below = tables_[level - 1].key;
    below.dots_with(along_ + q * c_.dim, laid.ids.data(), laid.count, c_.dim, laid.scores.data());
    if (level == 1) return;
    const float whole = std::log(static_cast<float>(c_.widths[level - 1]));
    for (int32_t i = 0; i < laid.count; ++i) laid.scores[i] += whole;
    const int64_t rest = tokens_ % c_.widths[level - 1];
    if (!c_.is_causal && rest)
      for (int32_t i = 0; i < laid.count; ++i)
        if (laid.ids[i] == limit - 1) laid.scores[i] += std::log(static_cast<float>(rest)) - whole;
  }

  // Takes `count` more rows of logits into the running softmax; they become weights.
  void take(float* logits, int64_t count) {
    Vec most = top_;
    for (int64_t r = 0; r < count; ++r) most = larger(most, load(logits + r * kLanes));
    const Vec base = most == -kInf ? Vec{} : most, factor = exponential<true>(top_ - base);
    Vec sum = {};
    for (int64_t r = 0; r < count; ++r) {
      const Vec w = exponential<true>(load(logits + r * kLanes) - base);
      store(logits + r * kLanes, w);
      sum += w;
    }
    total_ = total_ * factor + sum;
    top_ = most;
    for (int q = 0; q < lanes_; ++q) rescale(q, factor[q]);
  }

  void rescale(int q, float factor) {
    if (factor == 1.0f) return;
    float* o = out_ + q * c_.value_dim;
    for (int64_t e = 0; e < c_.value_dim; e += kLanes) store(o + e, load(o + e) * factor);
  }

  void bias_blocks() {
    float* at = b_.blocks.data();
    if (bias_ == 0.0f) return;
    for (const Segment& s : b_.closed)
      for (int64_t block = s.first; block < s.last; ++block, at += kLanes)
        if (members(s.level, block) > 1) store(at, load(at) + bias_);
  }

  void attend_blocks() {
    float* at = b_.blocks.data();
    take(at, static_cast<int64_t>(b_.blocks.size()) / kLanes);
    for (const Segment& s : b_.closed) {
      const Run rows = values(s.level, s.first, s.last - s.first);
      add_values(at, rows.at, rows.step, s.last - s.first, lanes_, out_, c_.value_dim);
      at += (s.last - s.first) * kLanes;
    }
  }

  void attend_tokens() {
    b_.tokens.resize(kChunk * kLanes);
    for (const Segment& s : b_.plain) {
      const int64_t end = c_.is_causal ? std::min(s.last, first_ + lanes_) : s.last;
      for (int64_t from = s.first; from < end; from += kChunk) {
        const int64_t count = std::min(kChunk, end - from);
        float* logits = b_.tokens.data();
        read_tokens(from, count, logits);
        take(logits, count);
        add_tokens(logits, values(0, from, count), from, count, out_, c_.value_dim);
      }
    }
  }

  // `add_values` for tokens [from, from + count): what a query does not see reaches it neither by 0 · NaN.
  void add_tokens(const float* weights, Run rows, int64_t from, int64_t count, float* to, int64_t width) const {
    const int64_t all = c_.is_causal ? std::clamp<int64_t>(first_ + 1 - from, 0, count) : count;  // see these
    if (finite(rows.at + all * rows.step, rows.step, count - all, width)) {
      add_values(weights, rows.at, rows.step, count, lanes_, to, width);
      return;
    }
    add_values(weights, rows.at, rows.step, all, lanes_, to, width);
    for (int64_t r = all; r < count; ++r) {
      const int64_t q = from + r - first_;  // the first that sees the row
      add_values(weights + r * kLanes + q, rows.at + r * rows.step, rows.step, 1, lanes_ - q, to + q * width, width);
    }
  }

  // Logits of tokens [from, from + count), hidden ones at -inf.
  void read_tokens(int64_t from, int64_t count, float* logits) {
    const Run rows = keys(0, from, count);
    logits_of(rows.at, rows.step, count, across_, c_.dim, logits);
    if (!c_.is_causal) return;
    for (int64_t j = std::max(from, first_ + 1); j < from + count; ++j)
      for (int q = 0; q < j - first_; ++q) logits[(j - from) * kLanes + q] = -kInf;
  }

  void attend_opened(int q) {
    Opened& opened = b_.opened[q];
    const int64_t count = opened.count, whole = (count + kLanes - 1) / kLanes * kLanes;
    if (!count) return;
    float* logits = opened.logits.data();
    std::fill(logits + count, logits + whole, -kInf);
    Vec most = splat(top_[q]);
    for (int64_t i = 0; i < whole; i += kLanes) most = larger(most, load(logits + i));
    const float peak = largest_of(most);
    const float base = peak == -kInf ? 0.0f : peak;
    const float factor = exponential<true>(splat(top_[q] - base))[0];
    Vec sum = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
      const Vec w = exponential<true>(load(logits + i) - base);
      store(logits + i, w);
      sum += w;
    }
    total_[q] = total_[q] * factor + sum_of(sum);
    top_[q] = peak;
    rescale(q, factor);
    int64_t from = 0;
    for (int64_t level = c_.levels; level >= 0; --level) {
      const int64_t to = opened.ends[c_.levels - level];
      const int32_t* ids = opened.ids.data() + from;
      tables_[level].value.add_to(out_ + q * c_.value_dim, logits + from, ids, to - from, c_.value_dim);
      from = to;
    }
  }

  void finish() {
    float* lse = c_.lse + (row_ * c_.heads + head_) * c_.queries + query_row_;
    for (int q = 0; q < lanes_; ++q) {
      lse[q] = total_[q] == 0 ? kInf : top_[q] + std::log(total_[q]);
      rescale(q, total_[q] == 0 ? 0.0f : 1.0f / total_[q]);
    }
  }

  const Call& c_;
  Buffers& b_;
  int64_t row_, head_, first_;
  int lanes_;
  int64_t tokens_, size_, low_, high_, sinks_, query_row_;
  float bias_;
  std::vector<Table> tables_;
  float *across_, *along_, *out_;
  Vec top_, total_;
};

}  // namespace
