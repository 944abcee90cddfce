// Causal attention in which every head has a rule of its own: the first keys, the nearest ones, and pages of keys that a
// chunk of queries has chosen. Heads without pages: keys stand in blocks of a register's width, a tile of queries lists
// those that it sees, and blocks of one list need not be neighbours: products take an address for each. Heads with pages:
// keys are listed one by one and read where they lie, and the queries stand side by side in registers, those of one chunk,
// or neighbours of several chunks, since most of their pages are the same.
#pragma once

#include <bit>

#include "forward.h"
#include "row_sums.h"

namespace hyper {

// What keys a query at position p sees, j <= p. Without pages: j < sinks and j > p - near. With pages, of which `chunk`
// queries share a choice: j < sinks, the chosen pages, and all from the page on in which c - near + 1 lies, where c is the
// first position of the query's chunk.
struct Rule {
  int64_t near, sinks, page, chunk;  // page 0: none are chosen
  int64_t top, bounds, by, channels; // of the choice, see selected_choice.h; channels 0: all score
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
  float scale;
  float* out;                    // contiguous [B, H, N, dv]
  float* lse;                    // as Call::lse, [2, B, H, N]

  int64_t group() const { return heads / kv_heads; }
  int64_t length(int64_t b) const { return std::max<int64_t>(0, stops[b] - starts[b]); }
  int64_t place(int64_t b, int64_t row) const { return row + offset - starts[b]; }
  int64_t first_place(int64_t b) const { return std::max<int64_t>(0, place(b, 0)); }
  int64_t blocks() const { return (keys + kLanes - 1) / kLanes; }
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
constexpr int64_t kFew = 4;                      // queries that are better taken one by one
constexpr uint32_t kAll = kLanes == 32 ? ~0u : (1u << kLanes) - 1;

// The blocks that some queries see, and of each the keys that do not depend on the query, a bit each.
struct Blocks {
  std::vector<uint32_t> bits;
  std::vector<int32_t> listed;  // in order
  std::vector<uint8_t> whole;   // of each: every query sees every key
  int64_t near = 0, limit = 0;

  explicit Blocks(int64_t blocks) : bits(blocks + 1) { listed.reserve(blocks), whole.reserve(blocks); }

  void set(int64_t first, int64_t last) {
    for (int64_t j = first; j < last;) {
      const int64_t block = j / kLanes, end = std::min(last, (block + 1) * kLanes);
      bits[block] |= ((uint64_t{1} << (end - j)) - 1) << (j - block * kLanes);
      j = end;
    }
  }

  // Of queries at positions [p, p + rows) of one chunk.
  void list(const Selected& c, int64_t b, int64_t h, int64_t p, int64_t rows) {
    const Rule& rule = c.rules[h];
    const int64_t last = p + rows - 1;
    near = rule.page ? 0 : rule.near, limit = c.length(b);
    const int64_t seen = std::clamp<int64_t>(last + 1, 0, limit), count = (seen + kLanes - 1) / kLanes;
    listed.clear(), whole.clear();
    std::fill_n(bits.begin(), count, 0u);
    if (seen <= 0) return;
    set(0, std::min(rule.sinks, seen));
    if (rule.page) {
      set(rule.opening(p), seen);
      const int32_t* pages = c.pages(b, h, p);
      for (int64_t i = 0; i < rule.most; ++i)
        if (pages[i] >= 0) set(pages[i] * rule.page, std::min((pages[i] + 1) * rule.page, seen));
    }
    for (int64_t block = 0; block < count; ++block) {
      const int64_t first = block * kLanes, end = first + kLanes;
      if (!bits[block] && end <= p - near + 1) continue;
      listed.push_back(static_cast<int32_t>(block));
      whole.push_back(end <= std::min(p + 1, limit) && (bits[block] == kAll || first > last - near));
    }
  }

  // A bit for each lane of listed block i that a query at p sees.
  uint32_t seen(int64_t i, int64_t p) const { return whole[i] ? kAll : bits_of(~hidden(i, p)); }

  // The lanes of listed block i that a query at p does not see.
  Ints hidden(int64_t i, int64_t p) const {
    static const Ints powers = Ints{} + 1 << lane_numbers();
    const int32_t block = listed[i];
    const Ints key = lane_numbers() + static_cast<int32_t>(block * kLanes);
    const Ints chosen = (powers & static_cast<int32_t>(bits[block])) != 0;
    const Ints close = key > static_cast<int32_t>(std::max<int64_t>(p - near, -1));
    return ~((chosen | close) & (key < static_cast<int32_t>(std::min(p + 1, limit))));
  }
};

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
template <typename T>
bool reads_values_in_place(const Selected& c) {
  return std::is_same_v<T, float> && c.value_dim % kLanes == 0;
}

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
      if (!read && reads_values_in_place<T>(c)) continue;
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

// f(rows from, how many as a constant) for rows in pieces of about the same size.
template <class Body>
inline void in_pieces(int64_t rows, Body body) {
  const int64_t pieces = (rows + kRows - 1) / kRows;
  for (int64_t i = 0; i < pieces; ++i) {
    const int64_t from = rows * i / pieces, count = rows * (i + 1) / pieces - from;
    [&]<int... n>(std::integer_sequence<int, n...>) {
      ((count == n + 1 ? body(from, std::integral_constant<int, n + 1>{}) : void()), ...);
    }(std::make_integer_sequence<int, kRows>{});
  }
}

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

// to[r] += sum over `count` rows of their weight times them, Wide registers of each: row k is at row(k), its weight for r at
// weight[r · weight_step + k · next].
template <int Rows, int Wide, class Row>
inline void row_sum(const float* weight, int64_t weight_step, int64_t next, Row row, int64_t count, int64_t column,
                    float* to, int64_t to_step) {
  Vec sum[Rows][Wide];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) sum[r][w] = load(to + r * to_step + column + w * kLanes);
  for (int64_t k = 0; k < count; ++k) {
    const float* from = row(k) + column;
    Vec b[Wide];
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) b[w] = load(from + w * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const Vec a = splat(weight[r * weight_step + k * next]);
#pragma GCC unroll 4
      for (int w = 0; w < Wide; ++w) sum[r][w] += a * b[w];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int w = 0; w < Wide; ++w) store(to + r * to_step + column + w * kLanes, sum[r][w]);
}

// Weighted sums of `count` rows, `wide` numbers each, added to `rows` rows.
template <class Row>
inline void row_sums(const float* weight, int64_t weight_step, int64_t next, int64_t rows, Row row, int64_t count,
                     int64_t wide, float* to, int64_t to_step) {
  in_pieces(rows, [&](int64_t r, auto n) {
    const float* own = weight + r * weight_step;
    int64_t e = 0;
    for (; e + kPanel <= wide; e += kPanel)
      row_sum<n(), kWide>(own, weight_step, next, row, count, e, to + r * to_step, to_step);
    for (; e < wide; e += kLanes) row_sum<n(), 1>(own, weight_step, next, row, count, e, to + r * to_step, to_step);
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

constexpr int64_t kShared = 16;  // queries that stand side by side
constexpr int64_t kWaste = 4;    // pairs that they compute for one that is seen: queries of several chunks go one by one above
static_assert(kShared % kLanes == 0 && kShared <= kTileRows);

template <typename T>
class SelectedTask {
 public:
  SelectedTask(const Selected& call, const Packed& packed)
      : c(call), packed_(packed), wide(packed.wide), blocks_(c.blocks()),
        scratch_(kTileRows * (kTileKeys + c.dim + wide + 2) + (kShared + kAtOnce) * (c.dim + kLanes) + 256) {
    dots_ = scratch_.take(kTileRows * kTileKeys);
    queries_ = scratch_.take(kTileRows * c.dim);
    turned_ = scratch_.take(kShared * c.dim);
    rows_ = scratch_.take(kAtOnce * padded(c.dim));
    out_ = scratch_.take(kTileRows * wide);
    top_ = scratch_.take(kTileRows);
    sum_ = scratch_.take(kTileRows);
  }

  // Queries [row, end) of a head.
  void run(int64_t b, int64_t h, int64_t row, int64_t end) {
    const Rule& rule = c.rules[h];
    const auto body = [&](int64_t r, int64_t p, int64_t rows) { tile(b, h, r, p, rows); };
    if (rule.page) over_tiles(c, b, row, end, std::max(rule.chunk, kShared), kShared, body);
    else over_tiles(c, b, row, end, kSpan, kTileRows, body);
  }

 private:
  static constexpr int kAtOnce = 8;     // keys whose products are summed at once
  static constexpr int64_t kNear = 64;  // keys whose values stay in the first cache
  static constexpr int kRegisters = kShared / kLanes;
  static constexpr uint16_t kEvery = 0xffff;

  void tile(int64_t b, int64_t h, int64_t row, int64_t p, int64_t rows) {
    const int64_t start = start_of(b, h, row);
    if (p < 0) {  // padding sees nothing
      std::fill_n(c.out + start * c.value_dim, rows * c.value_dim, 0.0f);
      std::fill_n(c.lse + start, rows, -kInf);
      std::fill_n(c.lse + c.batch * c.heads * c.queries + start, rows, 0.0f);
      return;
    }
    const bool pages = c.rules[h].page;
    if (pages && !list_keys(b, h, p, rows)) {
      for (int64_t r = 0; r < rows; ++r) tile(b, h, row + r, p + r, 1);
      return;
    }
    auto queries = c.rows_of<T>(c.query, b, h, row);
    queries.scale = c.scale;
    copy_rows(queries, rows, 0, c.dim, c.dim, queries_);
    std::fill_n(out_, rows * wide, 0.0f);
    std::fill_n(top_, kTileRows, -kInf);
    std::fill_n(sum_, kTileRows, 0.0f);
    pages ? over_keys(b, h, p, rows) : over_blocks(b, h, p, rows);
    finish(start, rows);
  }

  int64_t start_of(int64_t b, int64_t h, int64_t row) const { return (b * c.heads + h) * c.queries + row; }

  void over_blocks(int64_t b, int64_t h, int64_t p, int64_t rows) {
    const int64_t head = b * c.kv_heads + h / c.group();
    blocks_.list(c, b, h, p, rows);
    const float *keys[kListed], *values[kListed];
    for (int64_t from = 0, all = blocks_.listed.size(); from < all; from += kListed) {
      const int64_t count = std::min(kListed, all - from);
      for (int64_t i = 0; i < count; ++i) {
        const int32_t block = blocks_.listed[from + i];
        keys[i] = packed_.keys(head, block), values[i] = packed_.values(head, block);
      }
      products(queries_, c.dim, rows, keys, count, c.dim, dots_);
      for (int64_t i = 0; i < count; ++i)
        if (!blocks_.whole[from + i]) hide(from + i, i, p, rows);
      for (int64_t r = 0; r < rows; ++r) weigh(r, count * kLanes);
      sums(dots_, rows, values, count, wide, out_, wide);
    }
  }

  // Queries whose keys are listed, at most kShared.
  void over_keys(int64_t b, int64_t h, int64_t p, int64_t rows) {
    const bool few = rows <= kFew && takes_few() && !several_;
    if (!few)
      for (int64_t r = 0; r < kShared; r += kLanes)
        put_block([&](int64_t i) { return queries_ + (r + i) * c.dim; }, std::clamp<int64_t>(rows - r, 0, kLanes), c.dim,
                  turned_ + r, kShared);
    kv_ = h / c.group(), head_ = b * c.kv_heads + kv_;
    from_ = c.rows_of<T>(c.key, b, kv_, c.starts[b]);
    for (int64_t i = 0; i < all_; i += kTileKeys) {
      const int64_t count = std::min(kTileKeys, all_ - i);
      few ? by_rows(&listed_[i], p, rows, count) : by_lanes(i, p, rows, count);
      add_values(b, &listed_[i], few ? kTileKeys : 1, few ? 1 : kShared, rows, count);
    }
  }

  // Whether `by_rows` can compute a few queries.
  bool takes_few() const { return c.dim % kLanes == 0; }

  // Lists the keys that any query at positions [p, p + rows) sees. Those later than p come last, in order, as `by_lanes` and
  // `by_rows` need them. Of queries of several chunks all are in order, each with the queries that see it, a bit each.
  // Returns false where such queries had better go one by one.
  bool list_keys(int64_t b, int64_t h, int64_t p, int64_t rows) {
    const Rule& rule = c.rules[h];
    const int64_t last = p + rows - 1, seen = std::min(last + 1, c.length(b)), opening = std::min(rule.opening(last), seen);
    several_ = p / rule.chunk != last / rule.chunk;
    const int64_t most = several_ ? seen : std::min(rule.sinks, opening) + rule.most * rule.page + seen - opening;
    if (static_cast<int64_t>(listed_.size()) < most) listed_.resize(most), seen_by_.resize(most);
    int32_t* to = listed_.data();
    uint16_t* by = seen_by_.data();
    int64_t pairs = 0;  // that are seen, those of keys later than their query too
    const auto add = [&](int64_t from, int64_t end, uint16_t bits = kEvery) {
      const int64_t count = std::max<int64_t>(0, end - from);
      for (int64_t i = 0; i < count; ++i) to[i] = static_cast<int32_t>(from + i);
      if (several_) by = std::fill_n(by, count, bits), pairs += count * std::min<int64_t>(std::popcount(bits), rows);
      to += count;
    };
    const auto add_page = [&](int64_t page, uint16_t bits = kEvery) {
      add(std::max(page * rule.page, rule.sinks), std::min((page + 1) * rule.page, opening), bits);
    };
    add(0, std::min(rule.sinks, opening));
    if (!several_) {
      const int32_t* pages = c.pages(b, h, p);
      for (int64_t i = 0; i < rule.most; ++i)
        if (pages[i] >= 0) add_page(pages[i]);
      add(opening, seen);
      all_ = to - listed_.data();
      return true;
    }
    const int64_t pages = (opening + rule.page - 1) / rule.page;
    page_by_.assign(pages, 0);
    for (int64_t r = 0; r < rows; ++r) {
      const auto open = [&](int64_t page) { page_by_[page] |= uint16_t{1} << r; };
      const int32_t* chosen = c.pages(b, h, p + r);
      for (int64_t i = 0; i < rule.most; ++i)
        if (chosen[i] >= 0 && chosen[i] < pages) open(chosen[i]);
      for (int64_t page = rule.opening(p + r) / rule.page; page < pages; ++page) open(page);
    }
    for (int64_t page = 0; page < pages; ++page)
      if (page_by_[page]) add_page(page, page_by_[page]);
    add(opening, seen);
    all_ = to - listed_.data();
    return !takes_few() || all_ * kShared <= kWaste * pairs;
  }

  // A few queries of one chunk, one after the other: as many keys in a register as it has lanes.
  void by_rows(const int32_t* keys, int64_t p, int64_t rows, int64_t count) {
    for (int64_t r = 0; r < rows; ++r) {
      const float* query = queries_ + r * c.dim;
      float* to = dots_ + r * kTileKeys;
      int64_t seen = count;  // by this query
      while (seen > 0 && keys[seen - 1] > p + r) --seen;
      for (int64_t j = 0; j < seen; j += kLanes) {
        const int64_t there = std::min<int64_t>(kLanes, seen - j);
        store(to + j, c.dim == 4 * kLanes ? dots_of<4>(query, keys + j, there, 4)
                                          : dots_of<0>(query, keys + j, there, c.dim / kLanes));
      }
      std::fill(to + seen, to + padded(count), -kInf);
      weigh(r, padded(count));
    }
  }

  // Products of a query with `there` keys of `registers` each (Known: how many, or 0).
  template <int Known>
  Vec dots_of(const float* query, const int32_t* keys, int64_t there, int64_t registers) const {
    Vec sums[kLanes] = {};
    for (int k = 0; k < there; ++k) {
      const T* key = from_.at + keys[k] * from_.step;
      Vec even = {}, odd = {};
#pragma GCC unroll 4
      for (int64_t e = 0; e < (Known ? Known : registers); ++e)
        (e % 2 ? odd : even) += load_numbers(key + e * kLanes) * load(query + e * kLanes);
      sums[k] = even + odd;
    }
    return sums_of(sums);
  }

  // Queries side by side: of every key that is listed from i on kShared logits, one for each.
  void by_lanes(int64_t i, int64_t p, int64_t rows, int64_t count) {
    const int32_t* keys = &listed_[i];
    int64_t j = 0;
    for (; j + kAtOnce <= count; j += kAtOnce) multiply<kAtOnce>(keys + j, j);
    for (; j < count; ++j) multiply<1>(keys + j, j);
    for (j = count; j > 0 && keys[j - 1] > p; --j)  // later than the first query
      for (int64_t r = 0; r < kShared; r += kLanes) {
        float* x = dots_ + (j - 1) * kShared + r;
        store(x, lane_numbers() + static_cast<int32_t>(p + r) < keys[j - 1] ? splat(-kInf) : load(x));
      }
    float factors[kShared];
    bool changed = false;
    for (int64_t r = 0; r < kShared; r += kLanes) {
      Vec most = load(top_ + r), sum = {};
      const Vec old = most;
      if (several_) {  // hidden from some queries
        const Ints bit = (Ints{} + 1) << (lane_numbers() + static_cast<int32_t>(r));
        const uint16_t* by = &seen_by_[i];
        for (j = 0; j < count; ++j) {
          float* x = dots_ + j * kShared + r;
          const Vec dots = (bit & static_cast<int32_t>(by[j])) != 0 ? load(x) : splat(-kInf);
          store(x, dots);
          most = larger(most, dots);
        }
      } else {
        for (j = 0; j < count; ++j) most = larger(most, load(dots_ + j * kShared + r));
      }
      const Vec base = most == -kInf ? Vec{} : most, factor = exponential<true>(old - base);
      for (j = 0; j < count; ++j) {
        float* x = dots_ + j * kShared + r;
        const Vec e = exponential<true>(load(x) - base);
        store(x, e);
        sum += e;
      }
      store(factors + r, factor), store(top_ + r, most), store(sum_ + r, load(sum_ + r) * factor + sum);
      changed = changed || any(most != old);
    }
    for (int64_t r = 0; r < rows * changed; ++r)
      for (int64_t e = 0; e < wide; e += kLanes) store(out_ + r * wide + e, load(out_ + r * wide + e) * factors[r]);
  }

  // Products of `Keys` keys with all queries, in place j and those after it.
  template <int Keys>
  void multiply(const int32_t* keys, int64_t j) {
    const float* key[Keys];
    for (int k = 0; k < Keys; ++k) {
      const T* row = from_.at + keys[k] * from_.step;
      if constexpr (std::is_same_v<T, float>) {
        key[k] = row;
      } else {
        key[k] = rows_ + k * padded(c.dim);
        copy_rows(Rows<T>{row, 0, nullptr, 0}, 1, 0, c.dim, padded(c.dim), rows_ + k * padded(c.dim));
      }
    }
    Vec sum[Keys][kRegisters] = {};
    for (int64_t e = 0; e < c.dim; ++e) {
      Vec query[kRegisters];
#pragma GCC unroll 4
      for (int w = 0; w < kRegisters; ++w) query[w] = load(turned_ + e * kShared + w * kLanes);
#pragma GCC unroll 8
      for (int k = 0; k < Keys; ++k) {
        const Vec number = splat(key[k][e]);
#pragma GCC unroll 4
        for (int w = 0; w < kRegisters; ++w) sum[k][w] += number * query[w];
      }
    }
#pragma GCC unroll 8
    for (int k = 0; k < Keys; ++k)
#pragma GCC unroll 4
      for (int w = 0; w < kRegisters; ++w) store(dots_ + (j + k) * kShared + w * kLanes, sum[k][w]);
  }

  // A few keys at a time: what one piece of rows has read is near for the next.
  void add_values(int64_t b, const int32_t* keys, int64_t weight_step, int64_t next, int64_t rows, int64_t count) {
    const auto add = [&](auto value) {
      for (int64_t j = 0; j < count; j += kNear) {
        const auto row = [=, first = keys + j](int64_t k) { return value(first[k]); };
        row_sums(dots_ + j * next, weight_step, next, rows, row, std::min(kNear, count - j), wide, out_, wide);
      }
    };
    if constexpr (std::is_same_v<T, float>)
      if (reads_values_in_place<T>(c)) {
        const Rows<T> from = c.rows_of<T>(c.value, b, kv_, c.starts[b]);
        return add([=](int64_t key) { return from.at + key * from.step; });
      }
    add([this](int64_t key) { return packed_.value(head_, key); });
  }

  void hide(int64_t listed, int64_t slot, int64_t p, int64_t rows) {
    for (int64_t r = 0; r < rows; ++r) {
      float* x = dots_ + r * kTileKeys + slot * kLanes;
      store(x, blocks_.hidden(listed, p + r) ? splat(-kInf) : load(x));
    }
  }

  // One row of logits becomes weights; what was summed before is brought to the new maximum.
  void weigh(int64_t r, int64_t count) {
    float* x = dots_ + r * kTileKeys;
    Vec most = splat(-kInf), sum = {};
    for (int64_t j = 0; j < count; j += kLanes) most = larger(most, load(x + j));
    const float old = top_[r], top = std::max(old, largest_of(most)), base = top == -kInf ? 0.0f : top;
    for (int64_t j = 0; j < count; j += kLanes) {
      const Vec e = exponential<true>(load(x + j) - base);
      store(x + j, e);
      sum += e;
    }
    if (top != old) {
      const float factor = old == -kInf ? 0.0f : std::exp(old - top);
      for (int64_t e = 0; e < wide; e += kLanes) store(out_ + r * wide + e, load(out_ + r * wide + e) * factor);
      sum_[r] *= factor, top_[r] = top;
    }
    sum_[r] += sum_of(sum);
  }

  void finish(int64_t start, int64_t rows) {
    const int64_t all = c.batch * c.heads * c.queries;
    for (int64_t r = 0; r < rows; ++r) {
      const float factor = sum_[r] == 0 ? 0.0f : 1.0f / sum_[r];  // NaN stays
      float* to = c.out + (start + r) * c.value_dim;
      for (int64_t e = 0; e < c.value_dim; ++e) to[e] = out_[r * wide + e] * factor;
      c.lse[start + r] = top_[r], c.lse[all + start + r] = factor;
    }
  }

  const Selected& c;
  const Packed& packed_;
  const int64_t wide;
  Blocks blocks_;
  Scratch scratch_;
  // Keys, the queries that see each where `several_` choices are listed at once, and those that open a page, a bit each.
  std::vector<int32_t> listed_;
  std::vector<uint16_t> seen_by_, page_by_;
  int64_t all_ = 0;  // that are listed
  bool several_ = false;
  int64_t kv_ = 0, head_ = 0;
  Rows<T> from_{};  // keys
  float *dots_, *queries_, *turned_, *rows_, *out_, *top_, *sum_;
};

}  // namespace hyper
