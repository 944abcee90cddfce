// Neighbouring queries of one head, and their softmax over the rows that they have attended to so far.
//
// A list says which rows of a table the queries attend to, and for each row which queries see it. With many queries each lane
// of a register belongs to one query, and a row is read once for all of them. With at most kFew queries each lane belongs to a
// row, and the queries are computed one by one.
#pragma once

#include <bit>
#include <vector>

#include "engines/cpu/call.h"
#include "engines/cpu/listed/softmax.h"

namespace hyper {

constexpr int64_t kFew = 4;  // queries that are better taken one by one
constexpr uint16_t kEvery = 0xffff;

// Rows of one table. The first `whole` are seen by all queries of the tile.
struct List {
  std::vector<int32_t> rows;
  std::vector<uint16_t> seen_by;  // of each row the queries that see it, a bit each
  int64_t count = 0, whole = 0;

  void clear() { count = whole = 0; }
  void reserve(int64_t most) {
    if (static_cast<int64_t>(rows.size()) < most) rows.resize(most), seen_by.resize(most);
  }
  // Adds rows [first, last); there is room.
  void add(int64_t first, int64_t last, uint16_t by) {
    for (int64_t i = first; i < last; ++i, ++count) rows[count] = static_cast<int32_t>(i), seen_by[count] = by;
  }
};

// Rows [first, last) of a table, and the queries that may see them, a bit each.
struct Interval {
  int64_t first, last;
  uint16_t by;
};

// Which tokens queries see by their position alone. Query r stands at position `first + r`. Where attention is causal, it sees
// no later token. It sees no token that is `window` or more tokens before it.
struct Sight {
  int64_t first, count;
  bool is_causal = true;
  int64_t window = kNoWindow;

  static constexpr int64_t kNoWindow = std::numeric_limits<int64_t>::max() / 2;

  uint16_t all() const { return static_cast<uint16_t>((1u << count) - 1); }

  // The queries that see token j, one bit each; at least one must see it.
  uint16_t of(int64_t j) const {
    uint32_t seen = all();
    if (is_causal && j > first) seen &= uint32_t{kEvery} << (j - first);
    if (j + window < first + count) seen &= (1u << (j + window - first)) - 1;
    return static_cast<uint16_t>(seen);
  }

  Interval one(int64_t j, uint16_t by) const { return {j, j + 1, static_cast<uint16_t>(by & of(j))}; }

  // Calls `add` with the seen tokens of these intervals and the queries that see them. Tokens that all queries see come first.
  // Returns how many these are.
  template <class Add>
  int64_t over(const std::vector<Interval>& parts, Add add) const {
    int64_t whole = 0;
    for (const bool is_first : {true, false})
      for (const Interval& part : parts) {
        const int64_t begin = std::max(part.first, first - window + 1);
        const int64_t end = std::max(begin, is_causal ? std::min(part.last, first + count) : part.last);
        // Position hides no token in [low, high) from any query.
        const int64_t low = std::clamp(first + count - window, begin, end);
        const int64_t high = is_causal ? std::clamp(first + 1, low, end) : end;
        if ((part.by == all()) == is_first && low < high) {
          add(Interval{low, high, part.by});
          whole += is_first ? high - low : 0;
        }
        for (int64_t j = begin; j < low && !is_first; ++j) add(one(j, part.by));
        for (int64_t j = high; j < end && !is_first; ++j) add(one(j, part.by));
      }
    return whole;
  }
};

// Logits in memory: the logit of row j and query r is at[j · row_step + r · query_step].
struct Logits {
  float* at;
  int64_t row_step, query_step;

  Logits from(int64_t j) const { return {at + j * row_step, row_step, query_step}; }
};

class QueryTile {
 public:
  QueryTile(int64_t dim, int64_t value_dim)
      : dim_(dim), filled_(padded(dim)), wide_(padded(value_dim)),
        scratch_(kShared * (3 * filled_ + wide_ + 3) + kRowsAtOnce * filled_ + kNear / 2 * (wide_ + kShared) + 256) {
    queries_ = scratch_.take(kShared * filled_);
    turned_ = scratch_.take(kShared * filled_);
    pairs_ = scratch_.take<Two>(kShared * filled_ / 2);
    turned_pairs_ = scratch_.take<Two>(kShared * filled_ / 2);
    value_pairs_ = scratch_.take<Two>(kNear / 2 * wide_);
    weight_pairs_ = scratch_.take<Two>(kNear / 2 * kShared);
    out_ = scratch_.take(kShared * wide_);
    room_ = scratch_.take(kRowsAtOnce * filled_);
    top_ = scratch_.take(kShared);
    sum_ = scratch_.take(kShared);
    factors_ = scratch_.take(kShared);
  }

  // Takes new queries, at most kShared. `sink` is a logit that takes part in the softmax and has no value; -inf: none.
  template <typename T>
  void start(Rows<T> from, int64_t queries, bool may_be_few = true, float sink = -kInf) {
    count_ = queries, scale_ = from.scale;
    few_ = may_be_few && queries <= kFew && dim_ == filled_;
    copy_rows(from, queries, kShared, dim_, filled_, queries_);
    if (!few_) turn(queries_, filled_, turned_);
    has_pairs_ = paired<Operand<T>> && dim_ % (2 * kLanes) == 0;
    if constexpr (paired<Operand<T>>)
      if (has_pairs_) {
        for (int64_t r = 0; r < kShared; ++r)
          if (r < queries) std::memcpy(pair(r), from.at + r * from.step, dim_ * sizeof(T));
          else std::fill_n(reinterpret_cast<float*>(pair(r)), dim_ / 2, 0.0f);
        if (!few_) turn(reinterpret_cast<float*>(pairs_), dim_ / 2, reinterpret_cast<float*>(turned_pairs_));
      }
    std::fill_n(out_, queries * wide_, 0.0f);
    std::fill_n(top_, kShared, sink);
    std::fill_n(sum_, kShared, sink == -kInf ? 0.0f : 1.0f);
  }

  int64_t queries() const { return count_; }
  bool is_few() const { return few_; }
  const float* query(int64_t r) const { return queries_ + r * filled_; }
  const float* out(int64_t r) const { return out_ + r * wide_; }
  Running running(int64_t r) const { return {top_[r], sum_[r]}; }

  // How many floats the logits of `rows` rows take, and their layout in memory.
  int64_t size_of(int64_t rows) const { return few_ ? count_ * padded(rows) : kShared * rows; }
  Logits logits_in(float* at, int64_t rows) const {
    return few_ ? Logits{at, 1, padded(rows)} : Logits{at, kShared, 1};
  }

  // Logits of `count` rows that are listed from `rows` on. Rows of bfloat16 are multiplied with queries of bfloat16 as they
  // are, where the CPU can.
  template <typename T>
  void multiply(Listed<T> keys, const int32_t* rows, int64_t count, Logits to) {
    if (!few_) {
      if constexpr (paired<Operand<T>>)
        if (has_pairs_) return multiply_rows(turned_pairs_, dim_, scale_, keys, rows, count, room_, to.at);
      return multiply_rows(turned_, dim_, 1.0f, keys, rows, count, room_, to.at);
    }
    for (int64_t r = 0; r < count_; ++r) {
      float found[kLanes];
      const int64_t last = count / kLanes * kLanes;  // an incomplete register would overwrite what follows
      multiply_own(r, keys, rows, last, to.at + r * to.query_step);
      if (last == count) continue;
      multiply_own(r, keys, rows + last, count - last, found);
      std::copy_n(found, count - last, to.at + r * to.query_step + last);
    }
  }

  // The same for one query, whose logits lie in a row with room for whole registers.
  template <typename T>
  void multiply_own(int64_t r, Listed<T> keys, const int32_t* rows, int64_t count, float* to) {
    if constexpr (paired<Operand<T>>)
      if (has_pairs_) return multiply_one(pair(r), dim_, scale_, keys, rows, count, to);
    multiply_one(query(r), dim_, 1.0f, keys, rows, count, to);
  }

  // Adds a number to the logits of rows [from, to).
  void shift(Logits x, int64_t from, int64_t to, float by) const {
    if (by == 0) return;
    if (!few_) {
      for (int64_t i = from * kShared; i < to * kShared; i += kLanes) store(x.at + i, load(x.at + i) + by);
      return;
    }
    for (int64_t r = 0; r < count_; ++r)
      for (int64_t j = from; j < to; ++j) x.at[r * x.query_step + j] += by;
  }

  // Adds to the logits of each row a number of its own, by[its place in the table].
  void shift_rows(Logits x, const int32_t* rows, int64_t count, const float* by) const {
    for (int64_t j = 0; j < count; ++j)
      if (by[rows[j]] != 0) shift(x, j, j + 1, by[rows[j]]);
  }

  // Logits x become cap · tanh(x / cap).
  void cap(Logits x, int64_t count, float cap) const {
    for (int64_t i = 0; i < (few_ ? count_ * x.query_step : count * kShared); i += kLanes)
      store(x.at + i, cap * hyperbolic_tangent(load(x.at + i) / cap));
  }

  // Logits of rows [from, to) become -inf for the queries that do not see them.
  void hide(Logits x, const uint16_t* seen_by, int64_t from, int64_t to) const {
    if (few_) {
      for (int64_t j = from; j < to; ++j)
        for (int64_t r = 0; r < count_; ++r)
          if (!(seen_by[j] >> r & 1)) x.at[r * x.query_step + j] = -kInf;
      return;
    }
    for (int64_t w = 0; w < kShared; w += kLanes) {
      const Ints bit = (Ints{} + 1) << (lane_numbers() + static_cast<int32_t>(w));
      for (int64_t j = from; j < to; ++j) {
        float* at = x.at + j * kShared + w;
        store(at, (bit & static_cast<int32_t>(seen_by[j])) != 0 ? load(at) : splat(-kInf));
      }
    }
  }

  // A step of the online softmax: logits of `count` rows become e^(logit - maximum), and earlier sums are brought to the new
  // maximum.
  void weigh(Logits x, int64_t count) {
    if (few_) {
      for (int64_t r = 0; r < count_; ++r) weigh_own(r, x.at + r * x.query_step, count);
    } else if (take_lanes(x.at, count, top_, sum_, factors_)) {
      for (int64_t r = 0; r < count_; ++r) rescale(r, factors_[r]);
    }
  }

  // The same for rows that one query alone attends to: `count` logits in a row, with room for whole registers.
  void weigh_own(int64_t r, float* x, int64_t count) {
    Running all = running(r);
    const float factor = take(x, count, all);
    top_[r] = all.top, sum_[r] = all.sum;
    rescale(r, factor);
  }

  // Adds the weighted values of `count` rows, where value(j) is the address of row j. Queries that stand side by side and are
  // multiplied in bfloat16 multiply values in bfloat16, too, with rounded weights.
  template <class Value>
  void add(Value value, Logits weights, int64_t count) {
    for (int64_t j = 0; j < count; j += kNear) {  // a few at a time: what one piece of queries has read is near for the next
      const int64_t some = std::min(kNear, count - j);
      const float* from = weights.at + j * weights.row_step;
      const auto row = [=](int64_t k) { return value(j + k); };
      using V = std::remove_cvref_t<decltype(*value(0))>;
      if constexpr (paired<Operand<V>>)
        if (has_pairs_ && !few_) {
          row_sums_of_pairs(from, count_, row, some, wide_, value_pairs_, weight_pairs_, out_);
          continue;
        }
      row_sums(from, weights.query_step, weights.row_step, count_, row, some, wide_, out_, wide_);
    }
  }

  // The same, but a row is added for the queries that see it alone: a hidden value may be NaN, and 0 · NaN is NaN.
  template <class Value>
  void add_guarded(Value value, Logits weights, const uint16_t* seen_by, int64_t count) {
    for (int64_t j = 0; j < count; ++j)
      for (int64_t r = 0; r < count_; ++r)
        if (seen_by[j] >> r & 1) {
          const auto row = [=](int64_t) { return value(j); };
          row_sums(weights.at + j * weights.row_step + r * weights.query_step, 0, 0, 1, row, 1, wide_, out_ + r * wide_, wide_);
        }
  }

  // Adds what one query alone attends to.
  template <typename T>
  void add_own(int64_t r, const float* weights, Listed<T> values, const int32_t* rows, int64_t count) {
    add_to_one(weights, values, rows, count, wide_, out_ + r * wide_);
  }

  // Whether the weighted sum of some query holds NaN or infinity.
  bool has_nonfinite() const {
    for (int64_t r = 0; r < count_; ++r)
      if (!is_finite(out_ + r * wide_, wide_)) return true;
    return false;
  }

  // The average of a query, `width` numbers.
  void write(int64_t r, int64_t width, float* to) const {
    const float share = running(r).share();
    for (int64_t e = 0; e < width; ++e) to[e] = out_[r * wide_ + e] * share;
  }

 private:
  static constexpr int64_t kNear = 64;  // rows whose values stay in the first cache

  // Rows of `width` numbers, whole registers, side by side: the first numbers of all, then the second ones, and so on.
  static void turn(const float* rows, int64_t width, float* to) {
    for (int64_t r = 0; r < kShared; r += kLanes)
      for (int64_t e = 0; e < width; e += kLanes) {
        Vec square[kLanes];
        for (int i = 0; i < kLanes; ++i) square[i] = load(rows + (r + i) * width + e);
        transpose(square);
        for (int i = 0; i < kLanes; ++i) store(to + (e + i) * kShared + r, square[i]);
      }
  }

  Two* pair(int64_t r) const { return pairs_ + r * dim_ / 2; }

  void rescale(int64_t r, float factor) {
    if (factor == 1.0f) return;
    for (int64_t e = r * wide_; e < (r + 1) * wide_; e += kLanes) store(out_ + e, load(out_ + e) * factor);
  }

  const int64_t dim_, filled_, wide_;
  int64_t count_ = 0;
  float scale_ = 1;
  bool few_ = false, has_pairs_ = false;
  Scratch scratch_;
  float *queries_, *turned_, *out_, *room_, *top_, *sum_, *factors_;
  Two *pairs_, *turned_pairs_;  // the queries as they came, in bfloat16
  Two *value_pairs_, *weight_pairs_;
};

}  // namespace hyper
