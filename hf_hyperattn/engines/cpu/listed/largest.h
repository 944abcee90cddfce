// The places of the largest of many scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "engines/cpu/vectors.h"

namespace hyper {

// Whole numbers in the order of floats, 0 and -0 alike: NaN is above all numbers, with a minus below all.
inline Ints ranks_of(Vec x) {
  const Ints bits = as_bits(x), rank = bits ^ ((bits >> 31) & 0x7fffffff);
  return rank == -1 ? Ints{} : rank;
}
inline int32_t rank_of(float x) { return ranks_of(splat(x))[0]; }
inline float of_rank(int32_t rank) { return as_floats(Ints{} + (rank ^ ((rank >> 31) & 0x7fffffff)))[0]; }

class Largest {
 public:
  // Writes the places in [from, stop) of the `top` largest scores, in their order; of equal scores the first are in. Returns
  // how many there are, `top` or all.
  //
  // Two bounds close in on the rank of the last one that is in: how many scores lie above a guess between them is counted,
  // and tells which bound it becomes. The few that are left between them are compared with each other.
  int64_t find(const float* score, int64_t from, int64_t stop, int64_t top, int32_t* to) {
    const int64_t count = std::max<int64_t>(0, stop - from);
    if (count <= top) {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(from + i);
      return count;
    }
    if (top <= 0) return 0;
    const Spread spread = read(score + from, count);
    if (count <= kClose) {
      for (uint32_t in = largest_of_few(ranks_.data(), count, top); in; in &= in - 1)
        *to++ = static_cast<int32_t>(from + __builtin_ctz(in));
      return top;
    }
    auto [low, high] = bounds(spread, count);
    for (int tries = 0; low.above > top && low.above - high.above > kClose && high.rank - low.rank > 1; ++tries) {
      const int32_t rank = guess(low, high, top, count, tries);
      const int64_t above = count_from(rank);
      (above >= top ? low : high) = {rank, above};
    }
    if (low.above > top) leave_out(low, high, top - high.above);
    list(low.rank);
    for (int64_t i = 0; i < top; ++i) to[i] = static_cast<int32_t>(from + in_[i]);
    return top;
  }

 private:
  static constexpr int64_t kClose = 32;  // so many are compared with each other; a bit for each
  static constexpr int kGuesses = 8;     // then bounds are halved, which always ends
  static constexpr int32_t kNone = std::numeric_limits<int32_t>::min();  // the rank of what is past the last score, or out

  struct Bound {
    int64_t rank, above;  // how many scores have this rank or a higher one
  };
  struct Spread {
    Ints least, most;
    Vec sum, squares;  // of scores in whole registers
  };

  // Ranks of all scores, above kNone.
  Spread read(const float* score, int64_t count) {
    ranks_.resize(padded(count));
    Spread all{Ints{} + std::numeric_limits<int32_t>::max(), Ints{} + kNone, {}, {}};
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
      const Vec x = load(score + j);
      take(x, Ints{} - 1, j, all);
      all.sum += x, all.squares += x * x;
    }
    if (j < count) {
      float rest[kLanes] = {};
      std::copy(score + j, score + count, rest);
      take(load(rest), lane_numbers() < static_cast<int32_t>(count - j), j, all);
    }
    return all;
  }

  void take(Vec x, Ints there, int64_t j, Spread& all) {
    const Ints found = ranks_of(x), rank = found == kNone ? Ints{} + (kNone + 1) : found;  // one NaN
    store(&ranks_[j], there ? rank : Ints{} + kNone);
    all.least = there & (rank < all.least) ? rank : all.least;
    all.most = there & (rank > all.most) ? rank : all.most;
  }

  // The bounds that hold for certain.
  std::pair<Bound, Bound> bounds(const Spread& all, int64_t count) {
    int32_t least = all.least[0], most = all.most[0];
    for (int i = 1; i < kLanes; ++i) least = std::min(least, all.least[i]), most = std::max(most, all.most[i]);
    const float counted = count / kLanes * kLanes;
    mean_ = sum_of(all.sum) / counted;
    deviation_ = std::sqrt(std::max(0.0f, sum_of(all.squares) / counted - mean_ * mean_));
    return {{least, count}, {int64_t{most} + 1, 0}};
  }

  // A rank between the bounds: first as if scores were normal, then as if the logarithm of how many lie above fell evenly,
  // so that the bounds come to lie a little to either side. Where there are numbers that are none, it halves.
  int32_t guess(Bound low, Bound high, int64_t top, int64_t count, int tries) const {
    constexpr int64_t infinite = 0x7f800000;
    if (low.rank < -infinite || high.rank > infinite || tries >= kGuesses)
      return static_cast<int32_t>(low.rank + (high.rank - low.rank) / 2);
    float number;
    if (tries == 0) {
      const float share = static_cast<float>(top) / count, t = std::sqrt(-2 * std::log(std::min(share, 1 - share)));
      const float z = t - (2.30753f + 0.27061f * t) / (1 + (0.99229f + 0.04481f * t) * t);  // Abramowitz & Stegun 26.2.22
      number = mean_ + (share < 0.5f ? z : -z) * deviation_;
    } else {
      const float least = of_rank(low.rank), most = of_rank(high.rank - 1), above = std::max<float>(high.above, 0.5f);
      const float aim = low.above - top > kClose / 2 ? top + kClose / 4 : std::max<float>(top - kClose / 4, 0.5f);
      const float way = std::log(low.above / aim) / std::log(low.above / above);
      number = least + (most - least) * std::min(std::max(way, 0.02f), 0.98f);
    }
    return static_cast<int32_t>(std::clamp<int64_t>(rank_of(number), low.rank + 1, high.rank - 1));
  }

  int64_t count_from(int32_t rank) const {
    Ints found = {};
    for (size_t j = 0; j < ranks_.size(); j += kLanes) found -= load(&ranks_[j]) >= rank;
    int64_t all = 0;
    for (int i = 0; i < kLanes; ++i) all += found[i];
    return all;
  }

  // A bit for each of the `wanted` largest of `count` ranks, up to kClose and filled up to whole registers.
  static uint32_t largest_of_few(const int32_t* rank, int64_t count, int64_t wanted) {
    int32_t above[kClose];  // how many are larger
    uint32_t in = 0;
    for (int64_t i = 0; i < count; i += kLanes) {
      const Ints own = load(rank + i);
      Ints more = {};
      for (int64_t j = 0; j < count; ++j) more -= own < rank[j];
      store(above + i, more);
      in |= bits_of(more < static_cast<int32_t>(wanted)) << i;
    }
    in &= 0xffffffffu >> (32 - count);
    for (int64_t spare = __builtin_popcount(in) - wanted; spare > 0; --spare) {  // equal ones at the bound: the last goes
      int last = __builtin_ctz(in);
      for (uint32_t rest = in; rest; rest &= rest - 1)
        if (above[__builtin_ctz(rest)] >= above[last]) last = __builtin_ctz(rest);
      in &= ~(1u << last);
    }
    return in;
  }

  // Leaves `wanted` of the scores between the bounds; these are kClose at most, or all equal.
  void leave_out(Bound low, Bound high, int64_t wanted) {
    const int32_t least = static_cast<int32_t>(low.rank), most = static_cast<int32_t>(high.rank - 1);
    const int64_t count = low.above - high.above;
    if (static_cast<int64_t>(close_.size()) < count + kLanes) close_.resize(count + kLanes);
    int32_t* end = close_.data();
    for (size_t j = 0; j < ranks_.size(); j += kLanes) {
      const Ints rank = load(&ranks_[j]), between = (rank >= least) & (rank <= most);
      if (any(between)) end = keep(lane_numbers() + static_cast<int32_t>(j), between, end);
    }
    if (least == most) {
      for (int64_t i = wanted; i < count; ++i) ranks_[close_[i]] = kNone;
      return;
    }
    int32_t rank[kClose];
    for (int64_t i = 0; i < kClose; ++i) rank[i] = i < count ? ranks_[close_[i]] : kNone;
    const uint32_t in = largest_of_few(rank, count, wanted);
    for (int64_t i = 0; i < count; ++i)
      if (!(in >> i & 1)) ranks_[close_[i]] = kNone;
  }

  // Places of ranks from `least` on, to `in_`.
  void list(int64_t least) {
    if (in_.size() < ranks_.size() + kLanes) in_.resize(ranks_.size() + kLanes);
    int32_t* in = in_.data();
    for (size_t j = 0; j < ranks_.size(); j += kLanes)
      in = keep(lane_numbers() + static_cast<int32_t>(j), load(&ranks_[j]) >= static_cast<int32_t>(least), in);
  }

  float mean_ = 0, deviation_ = 0;
  std::vector<int32_t> ranks_, in_, close_;
};

}  // namespace hyper
