// What attention by rules of the heads is called with; the blocks of keys that queries see, and products with them, which
// forward (forward.h), backward and choice share. Keys stand in blocks of a register's width, a tile of queries lists those
// that it sees, and blocks of one list need not be neighbours: products take an address for each.
#pragma once

#include "engines/cpu/forward.h"
#include "engines/cpu/listed/tile.h"
#include "engines/cpu/row_sums.h"

namespace hyper {

// What keys a query at position p sees, j <= p. Without pages: j < sinks and j > p - near. With pages, of which `chunk`
// queries share a choice: j < sinks, the chosen pages, and all from the page on in which c - near + 1 lies, where c is the
// first position of the query's chunk.
struct Rule {
  int64_t near, sinks, page, chunk;  // page 0: none are chosen
  int64_t top, bounds, by, channels; // of the choice, see choice.h; channels 0: all score
  int64_t at, most;                  // where the pages of its first chunk stand, and how many a chunk has at most

  int64_t scoring(int64_t dim) const { return channels ? std::min(channels, dim) : dim; }
  int64_t opening(int64_t p) const { return std::max<int64_t>(0, p / chunk * chunk - near + 1) / page * page; }
};

struct Selected {
  int64_t batch, heads, kv_heads, queries, keys, dim, value_dim;
  Matrix query, key, value;      // float or, where `half`, bfloat16
  int64_t half, offset, threads; // the first query stands at key `offset`
  const Rule* rules;             // [H]
  const int32_t* chosen;         // [B, places]: of each head [chunks, most], from that of the first query on; -1: no page
  int64_t places;
  const int64_t *starts, *stops; // [B]: the keys that are no padding; all positions count from the first of them
  float scale, softcap;          // 0: no softcap
  int64_t window;                // of the host: a query sees no key that lies so far before it or farther; 0: none
  const float* sinks;            // [H], logits without a value, or null
  Matrix bias;                   // float [B, H, M], what is added to the logits of a key; null where there is none
  float* out;                    // contiguous [B, H, N, dv]
  float* lse;                    // as Call::lse, [2, B, H, N]

  int64_t group() const { return heads / kv_heads; }
  int64_t length(int64_t b) const { return std::max<int64_t>(0, stops[b] - starts[b]); }
  int64_t place(int64_t b, int64_t row) const { return row + offset - starts[b]; }
  int64_t first_place(int64_t b) const { return std::max<int64_t>(0, place(b, 0)); }
  int64_t blocks() const { return (keys + kLanes - 1) / kLanes; }
  int64_t reach() const { return window ? window : Sight::kNoWindow; }
  Running start(int64_t h) const { return sinks ? Running{sinks[h], 1.0f} : Running{}; }
  const float* biases(int64_t b, int64_t h) const { return bias.at ? at<float>(bias, b, h, starts[b]) : nullptr; }
  const int32_t* pages(int64_t b, int64_t h, int64_t p) const {
    const Rule& rule = rules[h];
    return chosen + b * places + rule.at + (p / rule.chunk - first_place(b) / rule.chunk) * rule.most;
  }
  // Whether all heads that share a key head choose pages.
  bool lists_keys(int64_t kv) const {
    return std::all_of(rules + kv * group(), rules + (kv + 1) * group(), [](const Rule& rule) { return rule.page > 0; });
  }
  template <typename T>
  Rows<T> rows_of(const Matrix& m, int64_t b, int64_t h, int64_t r) const {
    return {at<T>(m, b, h, r), m.row, nullptr, 0, 1.0f};
  }
};

constexpr int64_t kListed = kTileKeys / kLanes;  // blocks whose logits are held at once
constexpr int64_t kSpan = 2 * kTileRows;         // queries of a task
constexpr int64_t kWaste = 4;                    // pairs that they compute for one that is seen: above, one by one
constexpr uint32_t kAll = kLanes == 32 ? ~0u : (1u << kLanes) - 1;

// The blocks that some queries see, and of each the keys that do not depend on the query but on its chunk, a bit each.
struct Blocks {
  std::vector<uint32_t> bits;   // of each chunk [blocks]
  std::vector<int32_t> listed;  // in order
  std::vector<uint8_t> whole;   // of each: every query sees every key
  int64_t near = 0, reach = 0, limit = 0, chunks = 1, first = 0, chunk = 1, blocks;

  explicit Blocks(int64_t n) : bits(n + 1), blocks(n + 1) { listed.reserve(n), whole.reserve(n); }

  static void set(uint32_t* to, int64_t first, int64_t last) {
    for (int64_t j = first; j < last;) {
      const int64_t block = j / kLanes, end = std::min(last, (block + 1) * kLanes);
      to[block] |= ((uint64_t{1} << (end - j)) - 1) << (j - block * kLanes);
      j = end;
    }
  }

  // Of queries at positions [p, p + rows), of one chunk or several. Returns how many blocks the chunks see, one by one.
  int64_t list(const Selected& c, int64_t b, int64_t h, int64_t p, int64_t rows) {
    const Rule& rule = c.rules[h];
    const int64_t last = p + rows - 1;
    near = rule.page ? 0 : rule.near, reach = c.reach(), limit = c.length(b);
    const int64_t seen = std::clamp<int64_t>(last + 1, 0, limit), count = (seen + kLanes - 1) / kLanes;
    chunk = rule.chunk, first = p / chunk, chunks = rule.page ? last / chunk - first + 1 : 1;
    listed.clear(), whole.clear();
    if (static_cast<int64_t>(bits.size()) < chunks * blocks) bits.resize(chunks * blocks);
    if (seen <= 0) return 0;
    for (int64_t i = 0; i < chunks; ++i) {
      uint32_t* of = &bits[i * blocks];
      std::fill_n(of, count, 0u);
      set(of, 0, std::min(rule.sinks, seen));
      if (!rule.page) continue;
      const int64_t at = std::max(p, (first + i) * chunk);
      set(of, rule.opening(at), seen);
      const int32_t* pages = c.pages(b, h, at);
      for (int64_t j = 0; j < rule.most; ++j)
        if (pages[j] >= 0) set(of, pages[j] * rule.page, std::min((pages[j] + 1) * rule.page, seen));
    }
    int64_t all = 0;
    for (int64_t block = 0; block < count; ++block) {
      const int64_t begin = block * kLanes, end = begin + kLanes;
      uint32_t every = kAll;
      int64_t some = 0;  // chunks that see a key of it
      for (int64_t i = 0; i < chunks; ++i) every &= bits[i * blocks + block], some += bits[i * blocks + block] != 0;
      if ((!some && end <= p - near + 1) || end <= p - reach + 1) continue;
      all += std::max<int64_t>(some, 1);
      listed.push_back(static_cast<int32_t>(block));
      whole.push_back(end <= std::min(p + 1, limit) && (every == kAll || begin > last - near) && begin > last - reach);
    }
    return all;
  }

  // A bit for each lane of listed block i that a query at p sees.
  uint32_t seen(int64_t i, int64_t p) const { return whole[i] ? kAll : bits_of(~hidden(i, p)); }

  // The lanes of listed block i that a query at p does not see.
  Ints hidden(int64_t i, int64_t p) const {
    static const Ints powers = Ints{} + 1 << lane_numbers();
    const int32_t block = listed[i];
    const uint32_t of = bits[(chunks == 1 ? 0 : p / chunk - first) * blocks + block];
    const Ints key = lane_numbers() + static_cast<int32_t>(block * kLanes);
    const Ints chosen = (powers & static_cast<int32_t>(of)) != 0;
    const Ints close = key > static_cast<int32_t>(std::max<int64_t>(p - near, -1));
    const Ints in_reach = key > static_cast<int32_t>(std::max<int64_t>(p - reach, -1));
    return ~((chosen | close) & in_reach & (key < static_cast<int32_t>(std::min(p + 1, limit))));
  }
};

// From products of a query with a block of keys to logits: the softcap, then what is added to those keys. `bias` begins with
// key 0 of the row, or is null.
inline Vec logits_of(const Selected& c, Vec dots, const float* bias, int64_t block, int64_t keys) {
  if (c.softcap) dots = c.softcap * hyperbolic_tangent(dots / c.softcap);
  if (!bias) return dots;
  float added[kLanes] = {};
  std::copy_n(bias + block * kLanes, std::clamp<int64_t>(keys - block * kLanes, 0, kLanes), added);
  return dots + load(added);
}

// A block of rows, of which row(i) is the address: the first numbers of the rows side by side, `step` numbers later the
// second ones, and so on.
template <class Row>
void put_block(Row row, int64_t there, int64_t width, float* to, int64_t step = kLanes) {
  int64_t e = 0;
  for (; e + kLanes <= width; e += kLanes) {
    Vec square[kLanes];
    for (int i = 0; i < kLanes; ++i) square[i] = i < there ? load_numbers(row(i) + e) : Vec{};
    transpose(square);
    for (int i = 0; i < kLanes; ++i) store(to + (e + i) * step, square[i]);
  }
  for (; e < width; ++e)
    for (int i = 0; i < kLanes; ++i) to[e * step + i] = i < there ? number(row(i)[e]) : 0.0f;
}

template <typename T>
void put_block(Rows<T> from, int64_t there, int64_t width, float* to, int64_t step = kLanes) {
  put_block([&](int64_t i) { return from.at + i * from.step; }, there, width, to, step);
}

// Whether rows of values can be read where they lie.
inline bool reads_values_in_place(const Selected& c) { return c.value_dim % kLanes == 0; }

// Keys and values of all heads, block by block: keys with the first numbers of the block side by side, then the second
// ones; values in rows of whole registers, 0 past the last. For the backward pass also the other way round.
struct Packed {
  int64_t blocks, dim, wide, key_wide, value_dim, size;
  std::unique_ptr<float, decltype(&std::free)> memory{nullptr, &std::free};

  template <typename T>
  Packed(const Selected& c, T, bool both)
      : blocks(c.blocks()), dim(c.dim), wide(padded(c.value_dim)), key_wide(padded(c.dim)), value_dim(c.value_dim),
        size(kLanes * (dim + wide + (both ? value_dim + key_wide : 0))) {
    const int64_t heads = c.batch * c.kv_heads;
    memory.reset(static_cast<float*>(std::aligned_alloc(64, padded(heads * blocks * size + 16, 16) * 4)));
#pragma omp parallel for num_threads(c.threads) schedule(static)
    for (int64_t i = 0; i < heads * blocks; ++i) {
      const int64_t head = i / blocks, b = head / c.kv_heads, kv = head % c.kv_heads, block = i % blocks;
      const bool read = both || !c.lists_keys(kv);
      if (!read && reads_values_in_place(c)) continue;
      const int64_t there = std::clamp<int64_t>(c.length(b) - block * kLanes, 0, kLanes);
      const auto key = c.rows_of<T>(c.key, b, kv, c.starts[b] + block * kLanes);
      const auto value = c.rows_of<T>(c.value, b, kv, c.starts[b] + block * kLanes);
      if (read) put_block(key, there, dim, keys(head, block));
      copy_rows(value, there, kLanes, value_dim, wide, values(head, block));
      if (!both) continue;
      put_block(value, there, value_dim, value_columns(head, block));
      copy_rows(key, there, kLanes, dim, key_wide, key_rows(head, block));
    }
  }
  float* keys(int64_t head, int64_t block) const { return memory.get() + (head * blocks + block) * size; }
  float* values(int64_t head, int64_t block) const { return keys(head, block) + kLanes * dim; }
  const float* value(int64_t head, int64_t key) const { return values(head, key / kLanes) + key % kLanes * wide; }
  float* value_columns(int64_t head, int64_t block) const { return values(head, block) + kLanes * wide; }
  float* key_rows(int64_t head, int64_t block) const { return value_columns(head, block) + kLanes * value_dim; }
};

// to[r][w · kLanes + lane] = left row r · the lane's row of block w.
template <int Rows, int Wide>
inline void block_product(const float* left, int64_t step, const float* const* block, int64_t count, float* to,
                          int64_t to_step) {
  Vec sum[Rows][Wide] = {};
  const float* right[Wide];
  for (int w = 0; w < Wide; ++w) right[w] = block[w];
  for (int64_t k = 0; k < count; ++k) {
    Vec b[Wide];
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) b[w] = load(right[w] + k * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec a = splat(left[r * step + k]);
#pragma GCC unroll 4
      for (int w = 0; w < Wide; ++w) sum[r][w] += a * b[w];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) store(to + r * to_step + w * kLanes, sum[r][w]);
}

// Products of rows with `count` blocks.
inline void products(const float* left, int64_t step, int64_t rows, const float* const* block, int64_t count,
                     int64_t dim, float* to, int64_t to_step = kTileKeys) {
  in_pieces(rows, [&](int64_t r, auto n) {
    int64_t i = 0;
    for (; i + kWide <= count; i += kWide)
      block_product<n(), kWide>(left + r * step, step, block + i, dim, to + r * to_step + i * kLanes, to_step);
    for (; i < count; ++i)
      block_product<n(), 1>(left + r * step, step, block + i, dim, to + r * to_step + i * kLanes, to_step);
  });
}

// Weighted sums of the rows of `count` blocks, added to `rows` rows.
inline void sums(const float* weight, int64_t rows, const float* const* block, int64_t count, int64_t wide, float* to,
                 int64_t to_step) {
  const auto row = [=](int64_t k) { return block[k / kLanes] + k % kLanes * wide; };
  row_sums(weight, kTileKeys, 1, rows, row, count * kLanes, wide, to, to_step);
}

// f(row, position, how many) for tiles of rows, no more than `most`, within a chunk of so many positions.
template <class Body>
void over_tiles(const Selected& c, int64_t b, int64_t row, int64_t end, int64_t chunk, int64_t most, Body body) {
  while (row < end) {
    const int64_t p = c.place(b, row);
    const int64_t next = p < 0 ? -p : std::min((p / chunk + 1) * chunk - p, most);
    const int64_t rows = std::min(next, end - row);
    body(row, p, rows);
    row += rows;
  }
}

}  // namespace hyper
