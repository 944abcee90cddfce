// The places of the largest of many scores.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "call.h"

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
  // Writes the places in [from, stop) of the `top` largest scores, in any order; of equal ones the first. Returns how many
  // there are, `top` or all.
  //
  // Two bounds close in on the rank of the last one that is in: how many scores lie above a guess between them is counted,
  // and tells which bound it becomes. What is above both is in, and of the few between them the largest.
  int64_t find(const float* score, int64_t from, int64_t stop, int64_t top, int32_t* to) {
    const int64_t count = std::max<int64_t>(0, stop - from);
    if (count <= top) {
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(from + i);
      return count;
    }
    auto [low, high] = read(score + from, count);
    for (int tries = 0; low.above > top && low.above - high.above > kClose && high.rank - low.rank > 1; ++tries) {
      const int32_t rank = guess(low, high, top, count, tries);
      const int64_t above = count_from(rank);
      (above >= top ? low : high) = {rank, above};
    }
    if (low.above == top) high = low;
    list(low.rank, high.rank - 1);
    for (int64_t i = 0; i < high.above; ++i) to[i] = static_cast<int32_t>(from + in_[i]);
    const int64_t wanted = top - high.above;
    if (wanted && high.rank - low.rank > 1)
      std::nth_element(close_.begin(), close_.begin() + wanted - 1, close_.begin() + (low.above - high.above),
                       [this](int32_t a, int32_t b) { return ranks_[a] > ranks_[b] || (ranks_[a] == ranks_[b] && a < b); });
    for (int64_t i = 0; i < wanted; ++i) to[high.above + i] = static_cast<int32_t>(from + close_[i]);
    return top;
  }

 private:
  static constexpr int64_t kClose = 32;  // so many between the bounds are told apart one by one
  static constexpr int kGuesses = 8;     // then bounds are halved, which always ends

  struct Bound {
    int64_t rank, above;  // how many scores have this rank or a higher one
  };

  // Ranks of all scores, and the bounds that hold for certain.
  std::pair<Bound, Bound> read(const float* score, int64_t count) {
    const int64_t filled = padded(count);
    ranks_.resize(filled), in_.resize(filled + kLanes), close_.resize(filled + kLanes);
    Ints least = Ints{} + std::numeric_limits<int32_t>::max(), most = Ints{} + kNone;
    Vec sum = {}, squares = {};
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
      const Vec x = load(score + j);
      const Ints rank = ranks_of(x);
      store(&ranks_[j], rank);
      least = rank < least ? rank : least, most = rank > most ? rank : most;
      sum += x, squares += x * x;
    }
    for (; j < filled; ++j) {
      ranks_[j] = j < count ? rank_of(score[j]) : kNone;
      if (j < count) least[0] = std::min(least[0], ranks_[j]), most[0] = std::max(most[0], ranks_[j]);
    }
    for (int i = 1; i < kLanes; ++i) least[0] = std::min(least[0], least[i]), most[0] = std::max(most[0], most[i]);
    const float counted = std::max<float>(1, count / kLanes * kLanes);
    mean_ = sum_of(sum) / counted;
    deviation_ = std::sqrt(std::max(0.0f, sum_of(squares) / counted - mean_ * mean_));
    return {{least[0], count}, {int64_t{most[0]} + 1, 0}};
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

  // Places of ranks above `sure` to `in_`, of others from `least` on to `close_`.
  void list(int64_t least, int64_t sure) {
    const int32_t low = static_cast<int32_t>(least), high = static_cast<int32_t>(sure);
    int32_t *in = in_.data(), *close = close_.data();
    for (size_t j = 0; j < ranks_.size(); j += kLanes) {
      const Ints rank = load(&ranks_[j]), place = lane_numbers() + static_cast<int32_t>(j), is_in = rank > high;
      in = keep(place, is_in, in);
      const Ints between = (rank >= low) & ~is_in;
      if (any(between)) close = keep(place, between, close);
    }
  }

  // The rank of what is past the last score; one NaN has it too, which stands before that, and of equal ones the first count.
  static constexpr int32_t kNone = std::numeric_limits<int32_t>::min();
  float mean_ = 0, deviation_ = 0;
  std::vector<int32_t> ranks_, in_, close_;
};

}  // namespace hyper
