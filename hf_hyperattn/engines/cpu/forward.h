// The forward pass. A task is some queries of all heads that share a key; block by block of keys, each packed once for
// the task, it forms products, asks the score for logits, and keeps a running softmax.
#pragma once

#include "call.h"

namespace hyper {

// The weights of one row of logits in place, e^(x - top), 0 outside [first, last) in the registers that hold
// [lowest, highest); returns their sum.
inline float exponentials(float* x, int32_t first, int32_t last, int64_t lowest, int64_t highest, float top) {
  Vec sum = {};
  for (int64_t j = lowest / kLanes * kLanes; j < highest; j += kLanes) {
    Vec e = {};
    if (j >= first && j + kLanes <= last) e = exponential<true>(load(x + j) - top);
    else if (j < last && j + kLanes > first)  // beyond the row's end x may be above top
      e = outside(j, first, last) ? Vec{} : exponential<true>(smaller(load(x + j) - top, Vec{}));
    store(x + j, e);
    sum += e;
  }
  return sum_of(sum);
}

inline bool holds_nan(const float* x, int32_t first, int32_t last) {
  int32_t found = 0;
  for (int32_t j = first; j < last; ++j) found |= x[j] != x[j];
  return found;
}

// Queries of a task: so many that packing the keys hardly counts, but no more than leave each thread some tasks.
inline int64_t span_of(const Call& c) {
  const int64_t rows = c.queries * c.heads * c.batch < 4 * c.threads * kTaskRows ? kTaskRows / 2 : kTaskRows;
  return std::max(kTileRows, rows / c.group() / kTileRows * kTileRows);
}

template <typename T>
class ForwardTask {
 public:
  explicit ForwardTask(const Call& call)
      : c(call), wide(padded(call.value_dim)), span(span_of(call)), rows_(call.group() * span),
        scratch_(kTileRows * kTileKeys * 2 + kTileKeys * (c.dim + wide) + rows_ * (c.dim + wide + 2) +
                 kTileRows + Frame::size(c) + 256) {
    dots_ = scratch_.take(kTileRows * kTileKeys);
    extra_ = scratch_.take(kTileRows * kTileKeys);
    keys_ = scratch_.take(kTileKeys * c.dim);
    values_ = scratch_.take(kTileKeys * wide);
    queries_ = scratch_.take(rows_ * c.dim);
    out_ = scratch_.take(rows_ * wide);
    top_ = scratch_.take(rows_);
    sum_ = scratch_.take(rows_);
    tops_ = scratch_.take(kTileRows);
    frame_.columns = scratch_.take(Frame::size(c));
  }

  // Queries [row0, row0 + rows) of the heads that share key head `h`.
  void run(int64_t b, int64_t kv, int64_t row0, int64_t rows) {
    const int64_t group = c.group();
    for (int64_t g = 0; g < group; ++g) {
      const int64_t h = kv * group + g;
      copy_rows(queries_of<T>(c, b, h, row0), rows, 0, c.dim, c.dim, queries_ + g * span * c.dim);
      std::fill_n(out_ + g * span * wide, rows * wide, 0.0f);
      std::fill_n(top_ + g * span, rows, c.sinks ? c.sinks[h] : -kInf);  // a sink has weight 1 and no value
      std::fill_n(sum_ + g * span, rows, c.sinks ? 1.0f : 0.0f);
    }
    const int64_t start = c.first_of(row0) / kTileKeys * kTileKeys, stop = c.last_of(row0 + rows - 1);
    for (int64_t key = start; key < stop; key += kTileKeys) {
      const int64_t count = std::min(kTileKeys, stop - key);
      pack_panels(keys_of<T>(c, b, kv, key), count, c.dim, keys_);
      const auto [values, step] = load_values(b, kv, key, count);
      for (int64_t g = 0; g < group; ++g) {
        frame_.load_head(c, kv * group + g);
        frame_.load_columns(c, b, kv * group + g, key, count);
        for (int64_t r = 0; r < rows; r += kTileRows)
          tile(b, kv * group + g, row0 + r, std::min(kTileRows, rows - r), g * span + r, key, count, values, step);
      }
    }
    for (int64_t g = 0; g < group; ++g) finish(b, kv * group + g, row0, rows, g * span);
  }

 private:
  std::pair<const float*, int64_t> load_values(int64_t b, int64_t kv, int64_t key, int64_t count) {
    if constexpr (std::is_same_v<T, float>)
      if (c.value_dim == wide) return {at<float>(c.value, b, kv, key), c.value.row};
    copy_rows(values_of<T>(c, b, kv, key), count, 0, c.value_dim, wide, values_);
    return {values_, wide};
  }

  void tile(int64_t b, int64_t h, int64_t row0, int64_t rows, int64_t slot, int64_t key, int64_t count,
            const float* values, int64_t value_step) {
    if (!frame_.see(c, row0, rows, key, count)) return;
    const int64_t low = frame_.lowest, high = frame_.highest;
    const float* queries = queries_ + slot * c.dim;
    const auto seen = [&](int64_t r) { return frame_.seen(r, std::min<int64_t>(kRows, rows - r)); };
    product_of_panels(queries, c.dim, keys_, c.dim, dots_, kTileKeys, rows, low, high, seen);
    frame_.load_rows(c, b, h, row0);
    Tile t = {};
    t.rows = rows, t.columns = count, t.step = kTileKeys, t.first_row = row0, t.first_column = key;
    t.first = frame_.first, t.last = frame_.last, t.row = frame_.row, t.column = frame_.column, t.head = frame_.head;
    t.extra = extra_of(c, b, h, row0, rows, key, count, kTileKeys, extra_);
    t.softcap = c.softcap, t.dot = dots_, t.top = tops_;
    t.query = queries, t.query_step = c.dim, t.keys = keys_, t.dim = c.dim;
    c.score->forward(&t);
    for (int64_t r = 0; r < rows; ++r) weigh(r, slot + r);
    if (c.drop_below) drop(b, h, row0, rows, key);
    for (int64_t r = 0; r < rows; r += kRows) {
      const auto [first, last] = seen(r);
      product(dots_ + r * kTileKeys + first, kTileKeys, 1, values + first * value_step, value_step, last - first,
              out_ + (slot + r) * wide, wide, std::min<int64_t>(kRows, rows - r), wide, true);
    }
  }

  // One row of logits becomes weights; what was summed before is brought to the new maximum.
  void weigh(int64_t r, int64_t slot) {
    float* x = dots_ + r * kTileKeys;
    const float old = top_[slot], top = std::max(old, tops_[r]);
    if (tops_[r] == -kInf && !holds_nan(x, frame_.first[r], frame_.last[r])) {  // maxima pass over NaN, sums do not
      std::fill(x + frame_.lowest, x + frame_.highest, 0.0f);
      return;
    }
    const float sum = exponentials(x, frame_.first[r], frame_.last[r], frame_.lowest, frame_.highest, top);
    if (top != old) {
      const float factor = old == -kInf ? 0.0f : std::exp(old - top);
      float* out = out_ + slot * wide;
      for (int64_t e = 0; e < wide; e += kLanes) store(out + e, load(out + e) * factor);
      sum_[slot] *= factor, top_[slot] = top;
    }
    sum_[slot] += sum;
  }

  void drop(int64_t b, int64_t h, int64_t row0, int64_t rows, int64_t key) {
    const Dropout dropout = c.dropout(b, h);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = frame_.lowest / kLanes * kLanes; j < frame_.highest; j += kLanes) {
        float* x = dots_ + r * kTileKeys + j;
        store(x, load(x) * dropout.of(row0 + r, key + j));
      }
  }

  void finish(int64_t b, int64_t h, int64_t row0, int64_t rows, int64_t slot) {
    const int64_t start = (b * c.heads + h) * c.queries + row0;
    for (int64_t r = 0; r < rows; ++r) {
      const float sum = sum_[slot + r], factor = sum == 0 ? 0.0f : 1.0f / sum;  // NaN stays
      const float* from = out_ + (slot + r) * wide;
      float* to = c.out + (start + r) * c.value_dim;
      for (int64_t e = 0; e < c.value_dim; ++e) to[e] = from[e] * factor;
      c.lse[start + r] = sum == 0 ? -kInf : top_[slot + r];
      c.lse[c.batch * c.heads * c.queries + start + r] = factor;
    }
  }

  const Call& c;
  const int64_t wide, span, rows_;
  Scratch scratch_;
  Frame frame_;
  float *dots_, *extra_, *keys_, *values_, *queries_, *out_, *top_, *sum_, *tops_;
};

template <typename T>
void forward(const Call& c) {
  // the last queries of a causal call see most keys: they start first
  const int64_t span = span_of(c), blocks = (c.queries + span - 1) / span, tasks = blocks * c.kv_heads * c.batch;
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(tasks, c.threads)))
  {
    ForwardTask<T> task(c);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) {
      const int64_t block = blocks - 1 - i / (c.kv_heads * c.batch), head = i % (c.kv_heads * c.batch);
      const int64_t row0 = block * span;
      task.run(head / c.kv_heads, head % c.kv_heads, row0, std::min(span, c.queries - row0));
    }
  }
}

}  // namespace hyper
