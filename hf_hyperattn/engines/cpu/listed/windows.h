// Key-tied attention over windows of windows: which tokens and which means of windows each query attends to, and the forward
// pass (arXiv 2509.15448; mechanisms/hsa/reference.py says in words what is open and what is closed).
//
// A closed block is a window that is used as one key and one value, the means of its tokens. To open it is to use its children
// instead. The queries of a tile share two lists: the closed blocks of every level, and the tokens near the queries and the
// first ones. Refinement then opens the blocks with the largest scores. These differ from query to query, so each query has a
// list of its own for their children.
#pragma once

#include <numeric>

#include "engines/cpu/listed/largest.h"
#include "engines/cpu/listed/tile.h"

namespace hyper {

// The number format of keys and values of tokens; KINDS in native.py has the same codes.
enum Kind : int64_t { kFloat, kBfloat, kHalf };

// A call as native.py lays it out. Level 0 are the tokens, level l the means over windows of widths[l] tokens.
struct Windows {
  float *out, *lse;              // contiguous [B, H, N, dv] and [B, H, N]; lse is null if no backward pass follows
  const void* query;
  int64_t query_steps[3];
  int64_t levels;                // above the tokens
  const void* const* keys;       // levels + 1 tables; means are float
  const void* const* values;
  const int64_t* key_steps;      // 3 for each table: batch, head, row
  const int64_t* value_steps;
  const int64_t* widths;         // levels + 1: 1, then the sizes
  // 2 for each table of a cache that forgets: how many rows at its beginning are kept, and how many after those are removed.
  const int64_t* held;
  int64_t kind, query_kind;      // of the tokens, and of the queries: the same, or float
  int64_t batch, heads, kv_heads, queries, dim, value_dim;
  const int64_t *near, *sinks, *top_k;   // of each head
  const float *block_bias, *sink_logit;  // of each head, or null
  const int64_t *starts, *stops;         // of each batch element
  int64_t is_causal, offset, threads;
  float scale;

  int64_t group() const { return heads / kv_heads; }
  int64_t place(int64_t b, int64_t row) const { return row + offset - starts[b]; }
};

// Closed blocks of one level, or tokens, with their scores for one query, in the order of their ids: of equal scores the first
// is chosen.
struct Candidates {
  static constexpr int32_t kChild = -1, kChosen = -2;

  std::vector<int32_t> ids;
  std::vector<float> scores;
  std::vector<int32_t> standing;  // its row in the shared list, or kChild: of a block that refinement opened; or kChosen
  int32_t count = 0;

  void reserve(size_t most) {
    if (ids.size() < most) ids.resize(most), scores.resize(most), standing.resize(most);
  }
  // Adds entries [first, last) of the children of opened blocks.
  void add_children(const Candidates& children, int32_t first, int32_t last) {
    std::copy(children.ids.data() + first, children.ids.data() + last, ids.data() + count);
    std::copy(children.scores.data() + first, children.scores.data() + last, scores.data() + count);
    std::fill_n(standing.data() + count, last - first, kChild);
    count += last - first;
  }
  // Adds blocks [first, last), which stand in the shared list from `row` on; their scores are `step` apart.
  void add_standing(int64_t first, int64_t last, int32_t row, const float* from, int64_t step) {
    const int32_t more = static_cast<int32_t>(last - first);
    std::iota(ids.data() + count, ids.data() + count + more, static_cast<int32_t>(first));
    std::iota(standing.data() + count, standing.data() + count + more, row);
    for (int32_t i = 0; i < more; ++i) scores[count + i] = from[i * step];
    count += more;
  }
};

// What refinement opened to one query: rows of several levels, one after the other, and their logits.
struct Opened {
  std::vector<int32_t> rows;
  std::vector<float> logits;
  std::vector<int64_t> ends;  // of each level, the largest windows first
  int64_t count = 0;

  void reserve(size_t most) {
    if (rows.size() < most) rows.resize(most), logits.resize(most);
  }
};

template <typename T>
class WindowTile {
 public:
  explicit WindowTile(const Windows& call)
      : c(call), tile_(c.dim, c.value_dim), size_(c.levels ? c.widths[1] : kShared), opened_(kShared) {}

  // Queries at positions [first, first + count), counted from the first real token of batch element b.
  void run(int64_t b, int64_t h, int64_t first, int64_t count) {
    attend(b, h, first, count, false);
    if (tile_.has_nonfinite()) attend(b, h, first, count, true);
    const int64_t at = (b * c.heads + h) * c.queries + query_row();
    for (int64_t r = 0; r < count; ++r) {
      const Running all = tile_.running(r);
      tile_.write(r, c.value_dim, c.out + (at + r) * c.value_dim);
      // of a query that sees nothing +inf: e^(logit - lse) is 0 in the backward pass
      if (c.lse) c.lse[at + r] = all.sum == 0 ? kInf : all.top + std::log(all.sum);
    }
  }

 protected:
  // Closed blocks [first, last) of a level and the queries that see them; they stand in the shared list from `row` on.
  struct Run {
    int64_t level, first, last;
    uint16_t by;
    int64_t row;
  };

  // `guarded`: values that some queries do not see may be NaN or infinite.
  void attend(int64_t b, int64_t h, int64_t first, int64_t count, bool guarded) {
    place(b, h, first, count);
    // Scores decide which blocks refinement opens: a backward pass must find the same, so it needs the same order of additions.
    start(!refines() || !c.lse);
    cover();
    const Logits blocks = block_logits();
    tile_.weigh(blocks, closed_.count);
    for (int64_t level = c.levels; level > 0; --level) {
      const auto [from, to] = part_of(level);
      add(values(level), closed_, from, to - from, blocks.from(from), guarded);
    }
    list_tokens();
    token_logits_.resize(kShared * kTileKeys);
    for (int64_t from = 0; from < plain_.count; from += kTileKeys) {
      const int64_t some = std::min(kTileKeys, plain_.count - from);
      const Logits logits = tile_.logits_in(token_logits_.data(), some);
      read_tokens(from, some, logits);
      tile_.weigh(logits, some);
      with_tokens([&](auto, auto table) { add(table, plain_, from, some, logits, guarded); });
    }
    for (int64_t r = 0; r < count_ && refines(); ++r) attend_opened(r);
  }

  void place(int64_t b, int64_t h, int64_t first, int64_t count) {
    batch_ = b, head_ = h, kv_ = h / c.group(), first_ = first, count_ = count;
    tokens_ = c.stops[b] - c.starts[b];
    spare_ = std::min(std::max<int64_t>(c.near[h], 1), tokens_ + size_) - 1;
    sinks_ = std::min(c.sinks[h], tokens_);
    bias_ = c.block_bias ? c.block_bias[h] : 0.0f;
  }

  void start(bool may_be_few) {
    const auto read = [&](auto kind) {
      const Matrix query{c.query, c.query_steps[0], c.query_steps[1], c.query_steps[2]};
      const Rows<decltype(kind)> queries{at<decltype(kind)>(query, batch_, head_, query_row()), query.row, nullptr, 0, c.scale};
      tile_.start(queries, count_, may_be_few, c.sink_logit ? c.sink_logit[head_] : -kInf);
    };
    c.query_kind == kFloat ? read(float{}) : read(T{});
  }

  // Lists the closed blocks, with their logits, and opens the best ones where the head refines.
  void cover() {
    closed_.clear(), runs_.clear();
    for (int64_t level = c.levels; level > 0; --level) list_blocks(level);
    blocks_.resize(tile_.size_of(closed_.count));
    const Logits logits = block_logits();
    for (int64_t level = c.levels; level > 0; --level) {
      const auto [from, to] = part_of(level);
      tile_.multiply(keys(level), closed_.rows.data() + from, to - from, logits.from(from));
    }
    for (const Run& run : runs_) {
      add_log_sizes(run, logits);
      if (run.by != all()) tile_.hide(logits, closed_.seen_by.data(), run.row, run.row + run.last - run.first);
    }
    for (int64_t r = 0; r < count_ && refines(); ++r) refine(r);
    for (const Run& run : runs_) tile_.shift(logits, run.row, run.row + count_biased(run), bias_);
  }

  bool refines() const { return c.top_k[head_] > 0 && c.levels; }
  uint16_t all() const { return static_cast<uint16_t>((1u << count_) - 1); }
  int64_t query_row() const { return first_ + c.starts[batch_] - c.offset; }
  Logits block_logits() { return tile_.logits_in(blocks_.data(), closed_.count); }

  // How many blocks a level has; in causal calls complete ones alone.
  int64_t blocks(int64_t level) const {
    return (tokens_ + (c.is_causal ? 0 : c.widths[level] - 1)) / c.widths[level];
  }
  int64_t members(int64_t level, int64_t block) const {
    return std::min(c.widths[level], tokens_ - block * c.widths[level]);
  }
  // How many blocks of a run get the block bias: all, except a last block that has only one token.
  int64_t count_biased(const Run& run) const { return run.last - run.first - (members(run.level, run.last - 1) == 1); }

  // The part of the shared list that a level has.
  std::pair<int64_t, int64_t> part_of(int64_t level) const {
    return {ends_[c.levels - level], ends_[c.levels - level + 1]};
  }

  Listed<float> table(const void* const* tables, const int64_t* steps, int64_t level) const {
    const int64_t* step = steps + 3 * level;
    return {static_cast<const float*>(tables[level]) + batch_ * step[0] + kv_ * step[1], step[2]};
  }
  Listed<float> keys(int64_t level) const { return table(c.keys, c.key_steps, level); }
  Listed<float> values(int64_t level) const { return table(c.values, c.value_steps, level); }

  // Calls f(keys of tokens, values of tokens).
  template <class Body>
  void with_tokens(Body body) const {
    const auto of = [&](const void* tokens, const int64_t* step) {
      return Listed<T>{static_cast<const T*>(tokens) + batch_ * step[0] + kv_ * step[1] + c.starts[batch_] * step[2], step[2]};
    };
    body(of(c.keys[0], c.key_steps), of(c.values[0], c.value_steps));
  }

  // Adds to `standing_` the rows of a level (tokens at level 0) that queries of one bottom window attend to before refinement:
  // their parent is open, and they are not. `by` are these queries. Which of the tokens a query sees, `list_tokens` asks.
  void find_standing(int64_t level, int64_t window, uint16_t by) {
    const int64_t low = std::max<int64_t>(0, window * size_ - spare_);
    const int64_t high = window * size_ + size_ - 1 + (c.is_causal ? 0 : spare_);
    const int64_t width = c.widths[level], count = level ? blocks(level) : tokens_;
    int64_t parts[2][2] = {{0, count}, {0, 0}};  // whose parents are open
    if (level < c.levels) {
      const int64_t parent = c.widths[level + 1], children = parent / width;
      parts[0][1] = (sinks_ + parent - 1) / parent * children;
      parts[1][0] = std::max(parts[0][1], low / parent * children);
      parts[1][1] = (high / parent + 1) * children;
    }
    for (const auto& part : parts) {
      const int64_t last = std::min(part[1], count);
      if (!level) {
        if (part[0] < last) standing_.push_back({part[0], last, by});
        continue;
      }
      const int64_t front = std::max(part[0], (sinks_ + width - 1) / width);
      const int64_t left = std::min(last, low / width), right = std::max(front, high / width + 1);
      if (front < left) standing_.push_back({front, left, by});
      if (!c.is_causal && right < last) standing_.push_back({right, last, by});
    }
  }

  // Fills `standing_` for all queries of the tile. They may lie in several bottom windows: intervals are cut so that they do
  // not overlap, and sorted.
  void find_standing(int64_t level) {
    standing_.clear();
    const int64_t from = first_ / size_, to = (first_ + count_ - 1) / size_;
    for (int64_t window = from; window <= to; ++window) {
      const int64_t begin = std::max<int64_t>(0, window * size_ - first_), end = std::min((window + 1) * size_ - first_, count_);
      find_standing(level, window, static_cast<uint16_t>((1u << end) - (1u << begin)));
    }
    if (from == to) return;
    bounds_.clear(), parts_.clear();
    for (const Interval& i : standing_) bounds_.push_back(i.first), bounds_.push_back(i.last);
    std::sort(bounds_.begin(), bounds_.end());
    for (size_t i = 0; i + 1 < bounds_.size(); ++i) {
      Interval part{bounds_[i], bounds_[i + 1], 0};
      if (part.first == part.last) continue;
      for (const Interval& of : standing_)
        if (of.first <= part.first && part.last <= of.last) part.by |= of.by;
      if (part.by) parts_.push_back(part);
    }
    standing_.swap(parts_);
  }

  void list_blocks(int64_t level) {
    if (level == c.levels) ends_.assign(1, 0);
    find_standing(level);
    for (const Interval& part : standing_) {
      runs_.push_back({level, part.first, part.last, part.by, closed_.count});
      add_rows(closed_, level, part);
    }
    ends_.push_back(closed_.count);
  }

  // The tokens near by and the first ones.
  void list_tokens() {
    plain_.clear();
    find_standing(0);
    const Sight sight{first_, count_, c.is_causal != 0};
    plain_.whole = sight.over(standing_, [&](const Interval& tokens) { add_rows(plain_, 0, tokens); });
  }

  // Adds rows to a list by where they lie in their table: rows after removed ones have moved forward.
  void add_rows(List& list, int64_t level, const Interval& rows) const {
    const int64_t head = c.held[2 * level] - (level ? 0 : c.starts[batch_]), gone = c.held[2 * level + 1];
    const int64_t end = std::clamp(head, rows.first, rows.last);
    list.reserve(list.count + rows.last - rows.first);
    list.add(rows.first, end, rows.by);
    list.add(end - gone, rows.last - gone, rows.by);
  }

  // A block's score is its mean logit plus the logarithm of its size.
  void add_log_sizes(const Run& run, Logits logits) const {
    const int64_t end = run.row + run.last - run.first, rest = members(run.level, run.last - 1);
    const bool is_short = rest < c.widths[run.level];
    tile_.shift(logits, run.row, end - is_short, std::log(static_cast<float>(c.widths[run.level])));
    if (is_short) tile_.shift(logits, end - 1, end, std::log(static_cast<float>(rest)));
  }

  void read_tokens(int64_t from, int64_t count, Logits logits) {
    with_tokens([&](auto table, auto) { tile_.multiply(table, plain_.rows.data() + from, count, logits); });
    tile_.hide(logits, plain_.seen_by.data() + from, std::clamp<int64_t>(plain_.whole - from, 0, count), count);
  }

  template <typename V>
  void add(Listed<V> table, const List& list, int64_t from, int64_t count, Logits weights, bool guarded) {
    const auto value = [table, rows = list.rows.data() + from](int64_t j) { return table.row(rows[j]); };
    if (guarded) tile_.add_guarded(value, weights, list.seen_by.data() + from, count);
    else tile_.add(value, weights, count);
  }

  // Opens the blocks with the largest scores, level by level, for one query. A block of the shared list stays there, with the
  // logit -inf for this query. Children that are not opened in turn go to `opened_`.
  void refine(int64_t r) {
    const int32_t top = static_cast<int32_t>(std::min(c.top_k[head_], blocks(1) + 1));
    Opened& opened = opened_[r];
    make_room(top, opened);
    opened.ends.clear();
    opened.count = children_.count = 0;
    auto run = runs_.begin();
    const Logits logits = block_logits();
    float* of_query = logits.at + r * logits.query_step;
    for (int64_t level = c.levels; level > 0; --level) {
      // Two kinds of candidates are merged in the order of their ids: blocks of the shared list (runs), and children of blocks
      // that were opened on the level above. They do not overlap.
      candidates_.count = 0;
      int32_t next = 0;
      for (; run != runs_.end() && run->level == level; ++run) {
        if (!(run->by >> r & 1)) continue;
        int32_t end = next;
        while (end < children_.count && children_.ids[end] < run->first) ++end;
        candidates_.add_children(children_, next, end);
        candidates_.add_standing(run->first, run->last, static_cast<int32_t>(run->row), of_query + run->row * logits.row_step, logits.row_step);
        next = end;
      }
      candidates_.add_children(children_, next, children_.count);
      const int64_t count = largest_.find(candidates_.scores.data(), 0, candidates_.count, top, chosen_.data());
      for (int64_t i = 0; i < count; ++i) {
        int32_t& standing = candidates_.standing[chosen_[i]];
        if (standing != Candidates::kChild) of_query[standing * logits.row_step] = -kInf;
        standing = Candidates::kChosen;
      }
      keep_closed(opened);
      open(level, r, count);
    }
    std::copy_n(children_.ids.begin(), children_.count, opened.rows.begin() + opened.count);
    std::copy_n(children_.scores.begin(), children_.count, opened.logits.begin() + opened.count);
    opened.count += children_.count;
    opened.ends.push_back(opened.count);
  }

  void make_room(int32_t top, Opened& opened) {
    size_t most = closed_.count + kLanes, all = kLanes;
    for (int64_t level = c.levels; level > 0; --level) {
      const size_t children = top * (c.widths[level] / c.widths[level - 1]) + kLanes;
      most = std::max<size_t>(most, closed_.count + children + kLanes);
      all += children;
    }
    candidates_.reserve(most), children_.reserve(most), opened.reserve(all);
    chosen_.resize(top);
  }

  // Adds to `opened` the children of opened blocks that are not opened in turn: they are closed blocks.
  void keep_closed(Opened& opened) const {
    int32_t* rows = opened.rows.data() + opened.count;
    int32_t* logits = reinterpret_cast<int32_t*>(opened.logits.data()) + opened.count;
    for (int32_t i = 0; children_.count && i < candidates_.count; i += kLanes) {
      const Ints there = lane_numbers() < candidates_.count - i;
      const Ints stays = there & (load(candidates_.standing.data() + i) == Candidates::kChild);
      rows = keep(load(candidates_.ids.data() + i), stays, rows);
      // never a block of one token, which gets no bias: `attend_keys` sends no such calls here (has_chains in windowed/key.py)
      logits = keep(as_bits(load(candidates_.scores.data() + i) + bias_), stays, logits);
    }
    opened.count = rows - opened.rows.data();
    opened.ends.push_back(opened.count);
  }

  // Fills `children_` with the children of the `count` chosen blocks of `level`, and their scores.
  void open(int64_t level, int64_t r, int64_t count) {
    const int32_t children = static_cast<int32_t>(c.widths[level] / c.widths[level - 1]);
    const int32_t limit = static_cast<int32_t>(level > 1 ? blocks(level - 1) : tokens_);
    children_.count = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t first = candidates_.ids[chosen_[i]] * children, there = std::min(children, limit - first);
      std::iota(children_.ids.data() + children_.count, children_.ids.data() + children_.count + there, first);
      children_.count += there;
    }
    const auto multiply = [&](auto table) {
      tile_.multiply_own(r, table, children_.ids.data(), children_.count, children_.scores.data());
    };
    if (level == 1) return with_tokens([&](auto table, auto) { multiply(table); });
    multiply(keys(level - 1));
    const float whole = std::log(static_cast<float>(c.widths[level - 1]));
    for (int32_t i = 0; i < children_.count; ++i) children_.scores[i] += whole;
    const int64_t rest = tokens_ % c.widths[level - 1];
    if (c.is_causal || !rest) return;
    for (int32_t i = 0; i < children_.count; ++i)
      if (children_.ids[i] == limit - 1) children_.scores[i] += std::log(static_cast<float>(rest)) - whole;
  }

  void attend_opened(int64_t r) {
    Opened& opened = opened_[r];
    tile_.weigh_own(r, opened.logits.data(), opened.count);
    over_opened(opened, [&](int64_t level, int64_t from, int64_t count) {
      const auto add = [&](auto table) {
        tile_.add_own(r, opened.logits.data() + from, table, opened.rows.data() + from, count);
      };
      if (level) add(values(level));
      else with_tokens([&](auto, auto table) { add(table); });
    });
  }

  // Calls f(level, from, how many) for the levels of what is opened.
  template <class Body>
  void over_opened(const Opened& opened, Body body) const {
    int64_t from = 0;
    for (int64_t level = c.levels; level >= 0; --level) {
      const int64_t end = opened.ends[c.levels - level];
      if (end > from) body(level, from, end - from);
      from = end;
    }
  }

  const Windows& c;
  QueryTile tile_;
  const int64_t size_;  // of bottom windows
  int64_t batch_ = 0, head_ = 0, kv_ = 0, first_ = 0, count_ = 0, tokens_ = 0, spare_ = 0, sinks_ = 0;
  float bias_ = 0;
  std::vector<Interval> standing_, parts_;
  std::vector<int64_t> bounds_, ends_;
  std::vector<Run> runs_;
  List closed_, plain_;
  std::vector<float> blocks_, token_logits_;
  std::vector<Opened> opened_;
  Candidates candidates_, children_;
  Largest largest_;
  std::vector<int32_t> chosen_;  // places among the candidates
};

}  // namespace hyper
