// Products of pairs of bfloat16 numbers by tiles (AMX), registers of 16 rows of 16 pairs: one instruction adds the product
// of two of them to 16 x 16 sums. Whether there are such is asked for when the program runs; elsewhere product.h serves.
//
// A sum is of whole tiles of 16 pairs. So both sides are filled with zeros up to the next 16 (`pack_panels`, `pack_rows`),
// and the left one may be read up to whole tiles of rows: what lies there goes to sums that nobody wants.
#pragma once

#include "product.h"

#if defined(__AVX512BF16__) && defined(__linux__) && !defined(HYPER_PLAIN) && !defined(HYPER_NO_TILES) && \
    (__clang_major__ >= 12 || (!defined(__clang__) && __GNUC__ >= 11))
#define HYPER_TILES [[gnu::target("amx-tile,amx-bf16")]]
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace hyper {

#ifndef HYPER_TILES
constexpr bool has_tiles() { return false; }
struct TileShapes {
  explicit TileShapes(bool) {}
};
#else
// Whether the CPU has tiles that multiply bfloat16, and the system lets this process use them, for which it must be asked.
inline bool has_tiles() {
  static const bool there = [] {
    unsigned a, b, c, d;
    constexpr unsigned needed = 1u << 22 | 1u << 24;                  // amx_bf16, amx_tile
    constexpr long request_permission = 0x1023, of_tile_data = 18;    // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needed) == needed &&
           syscall(SYS_arch_prctl, request_permission, of_tile_data) == 0;
  }();
  return there;
}

// While this lives, the tiles of this thread are whole ones. Then they are what they were: torch shapes them too.
class TileShapes {
  struct alignas(64) Shapes {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];  // of a row
    uint8_t rows[16];
  };

 public:
  HYPER_TILES explicit TileShapes(bool wanted) : used_(wanted && has_tiles()) {
    if (!used_) return;
    Shapes whole = {1};
    for (int i = 0; i < 8; ++i) whole.bytes[i] = 64, whole.rows[i] = 16;
    asm volatile("" : : "r"(&whole), "r"(&before_) : "memory");  // before what reads and writes it
    _tile_storeconfig(&before_);
    _tile_loadconfig(&whole);
  }
  HYPER_TILES ~TileShapes() {
    if (used_) _tile_loadconfig(&before_);
  }
  TileShapes(const TileShapes&) = delete;

 private:
  const bool used_;
  Shapes before_ = {};
};

constexpr int64_t kSide = 16, kBlock = 2 * kSide;  // of a tile, and of the sums that are kept at once, two by two

// to (+)= left · right, 16 rows or `two_rows` of these, 16 columns or `two_columns`; `count` pairs, whole tiles.
HYPER_TILES inline void multiply_tiles(const Two* left, int64_t left_row, const Two* right, int64_t right_step,
                                       int64_t count, float* to, int64_t to_step, bool two_rows, bool two_columns,
                                       bool add) {
  const int64_t a = left_row * 4, b = right_step * 4, c = to_step * 4;
  float* below = to + kSide * to_step;
  asm volatile("" : : : "memory");  // compilers do not know what tiles read
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  if (add) {
    _tile_loadd(0, to, c);
    if (two_columns) _tile_loadd(1, to + kSide, c);
    if (two_rows) _tile_loadd(2, below, c);
    if (two_rows && two_columns) _tile_loadd(3, below + kSide, c);
  }
  for (int64_t k = 0; k < count; k += kSide) {
    const Two* row = right + k * right_step;
    _tile_loadd(4, left + k, a);
    _tile_loadd(6, row, b);
    _tile_dpbf16ps(0, 4, 6);
    if (two_columns) {
      _tile_loadd(7, row + kSide, b);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (two_rows) {
      _tile_loadd(5, left + kSide * left_row + k, a);
      _tile_dpbf16ps(2, 5, 6);
      if (two_columns) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, to, c);
  if (two_columns) _tile_stored(1, to + kSide, c);
  if (two_rows) _tile_stored(2, below, c);
  if (two_rows && two_columns) _tile_stored(3, below + kSide, c);
}

// The same for up to 32 rows and 16 or 32 columns, times factors; no other rows are written.
inline void block_product(const Two* left, int64_t left_row, const Two* right, int64_t right_step, int64_t count,
                          float* to, int64_t to_step, int64_t rows, int64_t width, bool add, Factors by = {}) {
  alignas(64) float kept[kBlock * kBlock];
  const bool apart = by.row || rows % kSide;
  if (apart && add)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t w = 0; w < width; w += kLanes) store(kept + r * kBlock + w, load(to + r * to_step + w));
  multiply_tiles(left, left_row, right, right_step, count, apart ? kept : to, apart ? kBlock : to_step, rows > kSide,
                 width > kSide, add);
  if (!apart) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t w = 0; w < width; w += kLanes)
      store(to + r * to_step + w, by.times(load(kept + r * kBlock + w), r, w));
}

// 32 columns of pairs as rows of whole tiles, 0 where there are no pairs.
inline void turn(const Two* from, int64_t step, int64_t count, Two* to, int64_t to_step) {
  for (int64_t k = 0; k < count; k += kSide)
    for (int64_t r = 0; r < kBlock; r += kSide) {
      Vec square[kLanes];
      for (int i = 0; i < kLanes; ++i)
        square[i] = k + i < count ? load(reinterpret_cast<const float*>(from + (k + i) * step + r)) : Vec{};
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(reinterpret_cast<float*>(to + (r + i) * to_step + k), square[i]);
    }
}

// As of floats (product.h). Of a left side whose sums lie below each other up to 32 pairs are added up.
inline void product(const Two* left, int64_t left_row, int64_t left_sum, const Two* right, int64_t right_step,
                    int64_t count, float* to, int64_t to_step, int64_t rows, int64_t width, bool add) {
  if (!has_tiles())
    return product<Two>(left, left_row, left_sum, right, right_step, count, to, to_step, rows, width, add);
  alignas(64) Two turned[kBlock * kBlock];
  for (int64_t r = 0; r < rows; r += kBlock) {
    const Two* from = left + r * left_row;
    if (left_sum != 1) turn(from, left_sum, count, turned, kBlock);
    for (int64_t w = 0; w < width; w += kBlock)
      block_product(left_sum != 1 ? turned : from, left_sum != 1 ? kBlock : left_row, right + w, right_step, count,
                    to + r * to_step + w, to_step, std::min(kBlock, rows - r), std::min(kBlock, width - w), add);
  }
}

template <class Seen>
inline void product_of_panels(const Two* left, int64_t left_row, const Two* packed, int64_t count, float* to,
                              int64_t to_step, int64_t rows, int64_t low, int64_t high, Seen seen, Factors by = {}) {
  if (!has_tiles())
    return product_of_panels<Two, Seen>(left, left_row, packed, count, to, to_step, rows, low, high, seen, by);
  for (int64_t r = 0; r < rows; r += kBlock) {
    const auto [first, last] = seen(r, kBlock);
    for (int64_t j = std::max(low, first) / kBlock * kBlock; j < std::min(high, last); j += kBlock)
      block_product(left + r * left_row, left_row, packed + j / kPanel * kPanel * count + j % kPanel, kPanel, count,
                    to + r * to_step + j, to_step, std::min(kBlock, rows - r), kBlock, false, by.from(r, j));
  }
}

template <class Seen>
inline void product_of_seen(const Two* left, int64_t left_row, const Two* right, int64_t right_step, float* to,
                            int64_t to_step, int64_t rows, int64_t width, Seen seen) {
  if (!has_tiles())
    return product_of_seen<Two, Seen>(left, left_row, right, right_step, to, to_step, rows, width, seen);
  for (int64_t r = 0; r < rows; r += kBlock) {
    const auto [first, last] = seen(r, kBlock);
    const int64_t skipped = first / kBlock * kSide, end = (last + kBlock - 1) / kBlock * kSide;
    if (skipped < end)
      product(left + r * left_row + skipped, left_row, 1, right + skipped * right_step, right_step, end - skipped,
              to + r * to_step, to_step, std::min(kBlock, rows - r), width, true);
  }
}
#endif

}  // namespace hyper
