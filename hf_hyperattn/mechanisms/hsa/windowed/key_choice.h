// The k best of some scores, of equal ones those that stand first. Without branches on the scores, and exact.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

// Numbers in the order of the floats they come from.
inline uint32_t sortable(float x) {
  int32_t i;
  std::memcpy(&i, &x, 4);
  return static_cast<uint32_t>(i ^ ((i >> 31) & 0x7fffffff)) ^ 0x80000000u;
}

// The largest number that `k` of `count` > k numbers reach; `reach` becomes how many do, more than `k` at ties only.
uint32_t bound_of(const uint32_t* order, int32_t count, int32_t k, int32_t& reach) {
  uint32_t most = 0, least = 0xffffffffu;
  for (int32_t i = 0; i < count; ++i) {
    most = std::max(most, order[i]);
    least = std::min(least, order[i]);
  }
  // bit by bit, from the highest one in which they differ; or less exactly, as soon as just `k` reach it
  const int top = most == least ? 0 : 32 - __builtin_clz(most ^ least);
  uint32_t bound = top == 32 ? 0 : (most >> top) << top;
  reach = count;
  for (int bit = top - 1; bit >= 0 && reach != k; --bit) {
    const uint32_t next = bound | (1u << bit);
    int32_t found = 0;
    for (int32_t i = 0; i < count; ++i) found += order[i] >= next;
    if (found >= k) bound = next, reach = found;
  }
  return bound;
}

// The candidates of one level for one query, in any order, and which of them are chosen.
struct Candidates {
  std::vector<int32_t> ids;
  std::vector<float> scores;
  std::vector<uint32_t> order;
  int32_t count = 0;

  void reserve(size_t most) {
    if (ids.size() >= most) return;
    ids.resize(most);
    scores.resize(most);
    order.resize(most);
  }

  // Sets order[i] to 1 for the `k` largest scores and to 0 for the others; equal scores go to the lower ids.
  void choose(int32_t k) {
    uint32_t* o = order.data();
    if (count <= k) {
      std::fill(o, o + count, 1u);
      return;
    }
    const float* from = scores.data();
    for (int32_t i = 0; i < count; ++i) o[i] = sortable(from[i]);
    int32_t reach;
    const uint32_t bound = bound_of(o, count, k, reach);
    for (; reach > k; --reach) {  // ties at the bound: the highest ids go
      int32_t last = -1;
      for (int32_t i = 0; i < count; ++i)
        if (o[i] == bound && (last < 0 || ids[i] > ids[last])) last = i;
      o[last] = bound - 1;
    }
    for (int32_t i = 0; i < count; ++i) o[i] = o[i] >= bound;
  }
};

}  // namespace
