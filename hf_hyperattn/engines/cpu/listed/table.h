// Keys and values as the kernel finds them: means in float32, tokens also in bfloat16 or float16, as caches keep them. All
// that asks for the numbers' type is here.
#pragma once

#include <vector>

#include "engines/cpu/listed/products.h"

namespace {

// What the numbers of a table are; native.py counts likewise.
enum Kind : int64_t { kFloat, kBfloat, kHalf };

// Rows in float32, one after the other.
struct Run {
  const float* at;
  int64_t step;
};

// Keys or values of one level for one (batch row, key head).
class Side {
 public:
  // Row 0 begins `first` numbers after `table`, and a row `step` numbers after the one before.
  Side(const void* table, int64_t first, int64_t step, int64_t kind)
      : at_(static_cast<const char*>(table) + first * (kind == kFloat ? sizeof(float) : sizeof(Bfloat))),
        step_(step),
        kind_(kind) {}

  // Rows [first, first + count) of `width` numbers: where they lie, or in half precision widened into `room`, since every
  // query of a tile reads them.
  Run run(int64_t first, int64_t count, int64_t width, std::vector<float>& room) const {
    if (kind_ == kFloat) return {static_cast<const float*>(at_) + first * step_, step_};
    if (static_cast<int64_t>(room.size()) < count * width) room.resize(count * width);
    read([&](auto at) {
      for (int64_t i = 0; i < count; ++i)
        for (int64_t e = 0; e < width; e += kLanes)
          store(room.data() + i * width + e, load_numbers(at + (first + i) * step_ + e));
    });
    return {room.data(), width};
  }

  // As `dots` and `add_rows`: rows that one query has chosen are read once, and widened in registers.
  void dots_with(const float* query, const int32_t* ids, int64_t count, int64_t dim, float* out) const {
    read([&](auto at) { dots(query, at, step_, ids, count, dim, out); });
  }
  void add_to(float* out, const float* weights, const int32_t* ids, int64_t count, int64_t width) const {
    read([&](auto at) { add_rows(weights, at, step_, ids, count, out, width); });
  }

 private:
  template <class Reader>
  void read(Reader reader) const {
    if (kind_ == kFloat) reader(static_cast<const float*>(at_));
    else if (kind_ == kBfloat) reader(static_cast<const Bfloat*>(at_));
    else reader(static_cast<const Half*>(at_));
  }

  const void* at_;
  int64_t step_, kind_;
};

}  // namespace
