// A few queries against many keys, as in generation: every key is read once, where it lies. Statistics of keys are made
// of it on the way, and distances are taken from differences; so are the factors with which values are averaged, where
// that is no plain mean (`lift` and `land`, see tile.h). A task is a chunk of the keys of one key head; what the chunks
// find is joined at the end.
#pragma once

#include <vector>

#include "forward.h"
#include "row_sums.h"

namespace hyper {

// A parameter of every head: [H], or one number for all of them.
struct Parameter {
  const float* at;
  int64_t step;
};

struct Decode {
  const Parameter* head;        // what the reader takes
  int64_t heads;                // how many of them
  int64_t needs_dot;
  const int64_t *row, *column;  // for each statistic of the score, its place in Call, or -1 where it is read
  const Parameter* average;     // what `lift` and `land` take
  int64_t averages;             // how many of them
  Parameter gate;               // of what they make, beside 1 - gate of the mean; null: all of it

  int64_t parts(const Call& c) const { return c.score->lift && gate.at ? 2 : 1; }  // rows of weights for a query
};

// What a chunk has found for one query: sums of values, with one or two weights, of numbers beside them, the largest
// logit, and the sum of the weights.
struct Found {
  int64_t wide, parts, sums;

  Found(const Call& c, const Decode& d, int64_t together)
      : wide(padded(c.value_dim, together)), parts(d.parts(c)), sums(wide * parts) {}
  int64_t top() const { return sums + kMostSums; }
  int64_t total() const { return sums + kMostSums + 1; }
  int64_t size() const { return sums + kMostSums + 2; }
};

inline void read_parameters(const Parameter* from, int64_t count, int64_t h, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i].at[h * from[i].step];
}

// Numbers that stand as `load_split` reads them, in order.
template <typename T>
void copy_in_order(const float* from, int64_t count, float* to) {
  if constexpr (std::is_same_v<T, float>) std::copy_n(from, count, to);
  else
    for (int64_t e = 0; e < count; e += 2 * kLanes) {
      const Vec even = load(from + e), odd = load(from + e + kLanes);
      store(to + e, interleaved<false>(even, odd)), store(to + e + kLanes, interleaved<true>(even, odd));
    }
}

template <typename T>
class DecodeTask {
 public:
  DecodeTask(const Call& call, const Decode& decode)
      : c(call), d(decode), to_(call, decode, kTogether<T>), wide(to_.wide), dim(padded(c.dim, kTogether<T>)),
        rows_(c.group() * c.queries),
        scratch_(rows_ * (2 * dim + wide * to_.parts + kMostSums + 3) + kTileKeys * (copies() + 7 + kMostSums) +
                 4 * kTileKeys * c.queries + (c.queries + 1) * dim + Frame::size(c) + c.group() * row_numbers() + 512) {
    queries_ = scratch_.take(rows_ * dim);
    points_ = scratch_.take(rows_ * dim);
    out_ = scratch_.take(rows_ * wide * to_.parts);
    sums_ = scratch_.take(rows_ * kMostSums);
    top_ = scratch_.take(rows_);
    sum_ = scratch_.take(rows_);
    tops_ = scratch_.take(rows_);
    key_rows_ = scratch_.template take<T>(c.dim == dim ? 0 : kTileKeys * dim);
    value_rows_ = scratch_.template take<T>(c.value_dim == wide ? 0 : kTileKeys * wide);
    query_rows_ = scratch_.template take<T>(c.queries * dim);
    last_ = scratch_.take(kTileKeys);
    side_ = scratch_.take(kTileKeys);
    factor_ = scratch_.take(kTileKeys);
    value_side_ = scratch_.take(kTileKeys);
    value_factor_ = scratch_.take(kTileKeys);
    value_statistics_ = scratch_.take(kTileKeys * kMostSums);
    dots_ = scratch_.take(kTileKeys * c.queries * 2);
    gaps_ = scratch_.take(kTileKeys * c.queries);
    extra_ = scratch_.take(kTileKeys * c.queries);
    counts_ = scratch_.take(dim);
    frame_.columns = scratch_.take(Frame::size(c));
    row_numbers_ = scratch_.take(c.group() * row_numbers());
    for (int64_t e = 0; e < dim; ++e) put(query_rows_ + e, e < c.dim - c.score->left_out ? 1.0f : 0.0f);
    for (int64_t e = 0; e < dim; e += kLanes) store(counts_ + e, load_split(query_rows_, e));
    std::fill_n(frame_.columns, Frame::size(c), 0.0f);  // what no reader makes is not used, but is read
    std::fill_n(row_numbers_, c.group() * row_numbers(), 0.0f);
  }

  // Keys [start, stop) against all queries of their heads; leaves sums, maxima and totals in `found`.
  void run(int64_t b, int64_t kv, int64_t start, int64_t stop, float* found) {
    for (int64_t g = 0; g < c.group(); ++g) {
      const int64_t h = kv * c.group() + g;
      split_queries(queries_of<T>(c, b, h, 0), queries_ + g * c.queries * dim);
      if (c.score->read) measure_queries(b, h, points_ + g * c.queries * dim, row_numbers_ + g * row_numbers());
    }
    std::fill_n(out_, rows_ * wide * to_.parts, 0.0f);
    std::fill_n(sums_, rows_ * kMostSums, 0.0f);
    std::fill_n(top_, rows_, -kInf);
    std::fill_n(sum_, rows_, 0.0f);
    for (int64_t key = start; key < stop; key += kTileKeys) tile(b, kv, key, std::min(kTileKeys, stop - key));
    for (int64_t r = 0; r < rows_; ++r, found += to_.size()) {
      const int64_t g = r / c.queries, q = r % c.queries;
      for (int64_t part = 0; part < to_.parts; ++part)
        copy_in_order<T>(out_ + ((g * to_.parts + part) * c.queries + q) * wide, wide, found + part * wide);
      std::copy_n(sums_ + r * kMostSums, kMostSums, found + to_.sums);
      found[to_.top()] = top_[r], found[to_.total()] = sum_[r];
    }
  }

 private:
  void tile(int64_t b, int64_t kv, int64_t key, int64_t count) {
    const auto [keys, step] = filled_up(keys_of<T>(c, b, kv, key), count, c.dim, dim, key_rows_);
    const auto [values, value_step] = filled_up(values_of<T>(c, b, kv, key), count, c.value_dim, wide, value_rows_);
    if (c.score->read) measure(b, kv, key, keys, step, count);
    for (int64_t g = 0; g < c.group(); ++g) {
      const int64_t h = kv * c.group() + g, slot = g * c.queries;
      if (!frame_.see(c, 0, c.queries, key, count)) continue;
      load_statistics(b, h, slot, key, count);
      for (int64_t r = 0; r < c.queries; ++r) compare(b, kv, key, keys, step, count, slot + r, r);
      weigh(b, h, key, count, slot);
      if (c.score->lift && g == 0) {
        const auto square = [](Vec v, int64_t, int64_t, bool) { return v * v; };
        sum_rows(values, value_step, count, wide, square, [&](int64_t j) { ask_ahead(b, kv, key + j, 2); }, value_side_);
      }
      if (c.score->lift) lift(b, kv, key, h, count, slot, g == 0);
      for (int64_t r = 0; r < c.queries * to_.parts; ++r)
        add_rows(dots_ + r * kTileKeys, values, value_step, count, wide, out_ + (slot * to_.parts + r) * wide);
    }
  }

  // How many numbers are kept of the queries of one head: what is read, factors, statistics.
  int64_t row_numbers() const { return padded(c.queries) * (kMostNumbers + 3); }
  int64_t copies() const { return (c.dim == dim ? 0 : dim) + (c.value_dim == wide ? 0 : wide); }

  // Rows that fill what is read at once, without their factors: in place, or copied.
  static std::pair<const T*, int64_t> filled_up(Rows<T> from, int64_t count, int64_t width, int64_t filled, T* to) {
    if (width == filled) return {from.at, from.step};
    for (int64_t r = 0; r < count; ++r)
      std::fill(std::copy_n(from.at + r * from.step, width, to + r * filled), to + (r + 1) * filled, T{});
    return {to, filled};
  }

  // The queries of one head, times their factors, in the order of `load_split`; returns them as they came.
  std::pair<const T*, int64_t> split_queries(Rows<T> from, float* to) {
    const auto [rows, step] = filled_up(from, c.queries, c.dim, dim, query_rows_);
    for (int64_t r = 0; r < c.queries; ++r)
      for (int64_t e = 0; e < dim; e += kLanes) store(to + r * dim + e, load_split(rows + r * step, e) * from.weight(r));
    return {rows, step};
  }

  // Statistics and points of the queries of one head.
  void measure_queries(int64_t b, int64_t h, float* points, float* numbers) {
    const int64_t width = padded(c.queries);
    float *last = numbers, *side = last + width, *factor = side + width, *statistic[kMostNumbers];
    for (int i = 0; i < kMostNumbers; ++i) statistic[i] = factor + (i + 1) * width;
    const auto [rows, step] = split_queries({at<T>(c.query, b, h, 0), c.query.row, nullptr, 0}, points);
    std::fill_n(last, 2 * width, 0.0f);
    for (int64_t r = 0; r < c.queries; ++r) {
      last[r] = number(rows[r * step + c.dim - 1]);
      for (int64_t e = 0; e < dim; ++e) side[r] += points[r * dim + e] * points[r * dim + e] * counts_[e];
    }
    read(h, width, last, side, statistic, factor);
    for (int64_t r = 0; r < c.queries; ++r)
      for (int64_t e = 0; e < dim; ++e) points[r * dim + e] *= factor[r] * counts_[e];
  }

  void read(int64_t h, int64_t count, const float* last, const float* side, float* const* statistic, float* factor) {
    float parameters[kMostNumbers];
    read_parameters(d.head, d.heads, h, parameters);
    const float* const column[] = {last, side};
    const VectorTile t = {count, static_cast<float>(c.dim), column, parameters, statistic + c.score->first_read, factor};
    c.score->read(&t);
  }

  // Sums of the numbers beside the values of one head, and its values' weights times their factors: in place of the
  // weights, or after them. Heads that share values and parameters share the factors too.
  void lift(int64_t b, int64_t kv, int64_t key, int64_t h, int64_t count, int64_t slot, bool first) {
    bool shared = !first;
    for (int64_t i = 0; i < d.averages; ++i) shared &= d.average[i].step == 0;
    float* statistic[kMostSums];
    for (int i = 0; i < kMostSums; ++i) statistic[i] = value_statistics_ + i * kTileKeys;
    if (!shared) {
      float parameters[kMostNumbers];
      read_parameters(d.average, d.averages, h, parameters);
      const float* const column[] = {value_side_, value_side_};
      const VectorTile t = {padded(count), static_cast<float>(c.value_dim), column, parameters, statistic, value_factor_};
      c.score->lift(&t);
    }
    for (int64_t r = 0; r < c.queries; ++r) {
      const float* weights = dots_ + r * kTileKeys;
      float* lifted = dots_ + ((to_.parts - 1) * c.queries + r) * kTileKeys;
      Vec sums[kMostSums] = {};
      for (int64_t j = 0; j < count; j += kLanes) {
        const Vec weight = load(weights + j);
        for (int64_t i = 0; first && r == 0 && i < kLanes; ++i)
          ask_ahead(b, kv, key + std::min(j + i, count - 1), 3);
        for (int i = 0; i < c.score->sums; ++i) sums[i] += weight * load(statistic[i] + j);
        store(lifted + j, weight * load(value_factor_ + j));
      }
      for (int i = 0; i < c.score->sums; ++i) sums_[(slot + r) * kMostSums + i] += sum_of(sums[i]);
    }
  }

  // Of each key the last number, and where they are needed the sum of the squares of the first ones.
  void measure(int64_t b, int64_t kv, int64_t key, const T* keys, int64_t step, int64_t count) {
    if (c.score->reads_norms) {
      const float* there = counts_;
      sum_rows(keys, step, count, dim, [=](Vec k, int64_t, int64_t e, bool last) {
        const Vec x = last ? k * load(there + e) : k;
        return x * x;
      }, [&](int64_t j) { ask_ahead(b, kv, key + j, 0); }, side_);
    }
    for (int64_t j = 0; j < count; ++j) last_[j] = number(keys[j * step + c.dim - 1]);
    std::fill(last_ + count, last_ + padded(count), 0.0f);
  }

  // Asks for the value of this key, and for the key that is as far on in the next tile. Where values are lifted, there
  // are four passes over rows, of which each asks for a half of one, so that memory is never idle.
  void ask_ahead(int64_t b, int64_t kv, int64_t j, int pass) const {
    const T *value = at<T>(c.value, b, kv, j), *key = at<T>(c.key, b, kv, std::min(j + kTileKeys, c.keys - 1));
    if (!c.score->lift) {
      ask_for(value, c.value_dim * sizeof(T));
      ask_for(key, c.dim * sizeof(T));
    } else {
      const int64_t width = pass < 2 ? c.value_dim : c.dim, half = width / 2;
      ask_for((pass < 2 ? value : key) + (pass % 2) * half, (pass % 2 ? width - half : half) * sizeof(T));
    }
  }

  // All statistics of a head, given or read.
  void load_statistics(int64_t b, int64_t h, int64_t slot, int64_t key, int64_t count) {
    frame_.load_head(c, h);
    float* columns[kMostNumbers];
    for (int i = 0; i < c.score->columns; ++i) {
      float* to = frame_.columns + i * kTileKeys;
      frame_.column[i] = columns[i] = to;
      if (d.column[i] < 0) continue;
      std::copy_n(c.column[d.column[i]].of(b, h) + key, count, to);
      std::fill(to + count, to + padded(count), 0.0f);
    }
    if (c.score->read) read(h, padded(count), last_, side_, columns, factor_);
    const float* numbers = row_numbers_ + slot / c.queries * row_numbers();
    for (int i = 0; i < c.score->rows; ++i)
      frame_.row[i] = d.row[i] < 0 ? numbers + (i + 3) * padded(c.queries) : c.row[d.row[i]].of(b, h);
  }

  // The products and the gaps of one query.
  void compare(int64_t b, int64_t kv, int64_t key, const T* keys, int64_t step, int64_t count, int64_t slot, int64_t r) {
    const bool first = slot == 0 && (!c.score->reads_norms || c.score->lift);
    const int pass = c.score->reads_norms;
    if (d.needs_dot) {
      const float* q = queries_ + slot * dim;
      sum_rows(keys, step, count, dim, [=](Vec k, int64_t, int64_t e, bool) { return load(q + e) * k; },
               [&](int64_t j) { if (first) ask_ahead(b, kv, key + j, pass); }, dots_ + r * kTileKeys);
    }
    if (c.score->read) {  // beyond the point's width, in the last register, x is 0, and so must the key be
      const float *x = points_ + slot * dim, *factor = factor_, *there = counts_;
      sum_rows(keys, step, count, dim, [=](Vec k, int64_t j, int64_t e, bool last) {
        const Vec point = last ? k * load(there + e) : k, apart = load(x + e) - point * factor[j];
        return apart * apart;
      }, [&](int64_t j) { if (first && !d.needs_dot) ask_ahead(b, kv, key + j, pass); }, gaps_ + r * kTileKeys);
    }
  }

  void weigh(int64_t b, int64_t h, int64_t key, int64_t count, int64_t slot) {
    Tile t = {};
    t.rows = c.queries, t.columns = count, t.step = kTileKeys, t.first_column = key;
    t.first = frame_.first, t.last = frame_.last, t.row = frame_.row, t.column = frame_.column, t.head = frame_.head;
    t.extra = extra_of(c, b, h, 0, c.queries, key, count, kTileKeys, extra_);
    t.softcap = c.softcap, t.dot = dots_, t.top = tops_, t.gap = c.score->read ? gaps_ : nullptr;
    t.query = queries_ + slot * dim, t.query_step = dim, t.dim = 0;
    c.score->decode(&t);
    for (int64_t r = 0; r < c.queries; ++r) {
      float* x = dots_ + r * kTileKeys;
      const float old = top_[slot + r], top = std::max(old, tops_[r]);
      if (tops_[r] == -kInf && !holds_nan(x, frame_.first[r], frame_.last[r])) {  // maxima pass over NaN
        std::fill_n(x, padded(count), 0.0f);
        continue;
      }
      const float factor = old == -kInf ? 0.0f : std::exp(old - top);
      for (int64_t part = 0; part < to_.parts; ++part) {
        float* out = out_ + (slot * to_.parts + part * c.queries + r) * wide;
        for (int64_t e = 0; e < wide; e += kLanes) store(out + e, load(out + e) * factor);
      }
      for (int i = 0; i < c.score->sums; ++i) sums_[(slot + r) * kMostSums + i] *= factor;
      sum_[slot + r] = sum_[slot + r] * factor + exponentials(x, frame_.first[r], frame_.last[r], 0, count, top, x);
      top_[slot + r] = top;
    }
  }

  const Call& c;
  const Decode& d;
  const Found to_;
  const int64_t wide, dim, rows_;
  Scratch scratch_;
  Frame frame_;
  float *queries_, *points_, *out_, *top_, *sum_, *tops_, *last_, *side_, *factor_, *dots_, *gaps_, *extra_, *counts_,
      *row_numbers_, *sums_, *value_side_, *value_factor_, *value_statistics_;
  T *key_rows_, *value_rows_, *query_rows_;
};

// The average as `land` makes it, beside the mean where there is a gate; in the memory of the sums.
inline const float* landed(const Call& c, const Decode& d, const Found& at, float* found, int64_t h, float total) {
  alignas(64) float numbers[(kMostSums + 3) * kLanes] = {};
  const float* column[kMostSums + 2];
  float *factor = numbers + (kMostSums + 2) * kLanes, *lifted = found + (at.parts - 1) * at.wide;
  float parameters[kMostNumbers], square = 0;
  for (int64_t e = 0; e < at.wide; ++e) square += lifted[e] * lifted[e];
  for (int i = 0; i < c.score->sums + 2; ++i) {
    column[i] = numbers + i * kLanes;
    numbers[i * kLanes] = i == 0 ? square : i <= c.score->sums ? found[at.sums + i - 1] : total;
  }
  read_parameters(d.average, d.averages, h, parameters);
  const VectorTile t = {kLanes, static_cast<float>(c.value_dim), column, parameters, nullptr, factor};
  c.score->land(&t);
  for (int64_t e = 0; e < at.wide; ++e) lifted[e] *= *factor;
  if (!d.gate.at) return lifted;
  const float gate = d.gate.at[h * d.gate.step];
  for (int64_t e = 0; e < at.wide; ++e) found[e] += gate * (lifted[e] - found[e]);
  return found;
}

// Joins what the chunks found for one row of head h, in the memory of the first of them.
inline void join(const Call& c, const Decode& d, const Found& at, float* found, int64_t chunks, int64_t step, int64_t h,
                 int64_t row) {
  const float sink = c.sinks ? c.sinks[h] : -kInf;
  float top = sink, total = 0;
  for (int64_t i = 0; i < chunks; ++i) top = std::max(top, found[i * step + at.top()]);
  for (int64_t i = 0; i < chunks; ++i) {
    const float* from = found + i * step;
    const float factor = from[at.top()] == -kInf ? 0.0f : std::exp(from[at.top()] - top);
    total += factor * from[at.total()];
    for (int64_t e = 0; e < at.top(); ++e) found[e] = i ? found[e] + factor * from[e] : factor * from[e];
  }
  const float sum = total + (sink == -kInf ? 0.0f : std::exp(sink - top));
  const float inverse = 1.0f / sum;
  for (int64_t e = 0; e < at.top(); ++e) found[e] *= inverse;
  const float* out = c.score->lift ? landed(c, d, at, found, h, total / sum) : found;
  float* to = c.out + row * c.value_dim;
  for (int64_t e = 0; e < c.value_dim; ++e) to[e] = sum == 0 ? 0.0f : out[e];
  c.lse[row] = sum == 0 ? -kInf : top + std::log(sum);
}

template <typename T>
void decode(const Call& c, const Decode& d) {
  const int64_t start = c.first_of(0) / kTileKeys * kTileKeys, stop = std::max(start, c.last_of(c.queries - 1));
  const int64_t blocks = (stop - start + kTileKeys - 1) / kTileKeys, heads = c.batch * c.kv_heads;
  if (heads == 0) return;  // An empty batch has no output, and the chunks below are shared out among its heads.
  const int64_t wanted = c.threads == 1 ? 1 : (4 * c.threads + heads - 1) / heads;
  const int64_t chunks = std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, blocks));
  const Found at(c, d, kTogether<T>);
  const int64_t rows = c.group() * c.queries, step = rows * at.size();
  std::vector<float> found(heads * chunks * step);
  const int64_t work = (stop - start) * heads * c.dim;
#pragma omp parallel num_threads(std::min(heads * chunks, c.threads)) if (work > 32768)
  {
    DecodeTask<T> task(c, d);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < heads * chunks; ++i) {
      const int64_t head = i / chunks, chunk = i % chunks;
      task.run(head / c.kv_heads, head % c.kv_heads, start + blocks * chunk / chunks * kTileKeys,
               std::min(stop, start + blocks * (chunk + 1) / chunks * kTileKeys), found.data() + i * step);
    }
  }
  for (int64_t head = 0; head < heads; ++head)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t h = head % c.kv_heads * c.group() + r / c.queries;
      join(c, d, at, found.data() + head * chunks * step + r * at.size(), chunks, step, h,
           (head / c.kv_heads * c.heads + h) * c.queries + r % c.queries);
    }
}

}  // namespace hyper
