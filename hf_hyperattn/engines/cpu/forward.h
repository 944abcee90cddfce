// The forward pass. A task is some queries of all heads that share a key; block by block of keys, each packed once for
// the task, it forms products, asks the score for logits, and keeps a running softmax.
#pragma once

#include "call.h"

namespace hyper {

// The weights of one row of logits in place, e^(x - top), 0 outside [first, last) in the registers that hold
// [lowest, highest); returns their sum.
inline float exponentials(float* x, int32_t first, int32_t last, int64_t lowest, int64_t highest, const Base& base, float*) {
  const float top = base.top;
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
template <class E>
int64_t span_of(const Call& c) {
  const int64_t most = paired<E> ? 2 * kTaskRows : kTaskRows, all = c.queries * c.heads * c.batch;
  const int64_t rows = std::max(kTileRows, (all < 4 * c.threads * most ? most / 2 : most) / c.group());
  const int64_t tasks = std::max<int64_t>(1, (c.queries + rows - 1) / rows);  // of about the same length
  return padded(std::max<int64_t>(1, (c.queries + tasks - 1) / tasks), kTileRows);
}

template <typename T>
class ForwardTask {
  using E = Operand<T>;  // floats, or pairs of bfloat16

 public:
  explicit ForwardTask(const Call& call)
      : c(call), wide(padded(call.value_dim)), depth(panel_depth<E>(c.dim)), query_step(left_step<E>(c.dim)),
        span(span_of<E>(call)), rows_(call.group() * span),
        scratch_(kTileRows * kTileKeys * 3 + kTileKeys * (depth + wide + 1) + rows_ * (query_step + wide + 3) +
                 kTileRows + Frame::size(c) + 256) {
    dots_ = scratch_.take(kTileRows * kTileKeys);
    extra_ = scratch_.take(kTileRows * kTileKeys);
    keys_ = scratch_.template take<E>(kTileKeys * depth);
    values_ = scratch_.template take<E>(terms<E>(kTileKeys) * wide);
    queries_ = scratch_.template take<E>(rows_ * query_step);
    weights_ = scratch_.template take<E>(paired<E> ? kTileRows * terms<E>(kTileKeys) : 0);
    query_factors_ = scratch_.take(rows_);
    key_factors_ = scratch_.take(kTileKeys);
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
      copy_left(queries_of<T>(c, b, h, row0), rows, c.dim, queries_ + g * span * query_step, query_factors_ + g * span);
      std::fill_n(out_ + g * span * wide, rows * wide, 0.0f);
      std::fill_n(top_ + g * span, rows, c.sinks ? c.sinks[h] : -kInf);  // a sink has weight 1 and no value
      std::fill_n(sum_ + g * span, rows, c.sinks ? base_of(c.sinks[h]).of_top() : 0.0f);
    }
    const int64_t start = c.first_of(row0) / kTileKeys * kTileKeys, stop = c.last_of(row0 + rows - 1);
    for (int64_t key = start; key < stop; key += kTileKeys) {
      const int64_t count = std::min(kTileKeys, stop - key);
      pack_panels(keys_of<T>(c, b, kv, key), count, c.dim, keys_);
      factors_ = factors_of<E>(keys_of<T>(c, b, kv, key), count, key_factors_);
      const auto [values, step] = load_values(b, kv, key, count);
      const int64_t next = std::min(kTileKeys, stop - key - count), share = next * kTileRows / (group * rows) + 1;
      for (int64_t g = 0, ahead = 0; g < group; ++g) {
        frame_.load_head(c, kv * group + g);
        frame_.load_columns(c, b, kv * group + g, key, count);
        for (int64_t r = 0; r < rows; r += kTileRows) {
          for (const int64_t end = std::min(next, ahead + share); ahead < end; ++ahead) {
            ask_for(at<T>(c.key, b, kv, key + count + ahead), c.dim * sizeof(T));
            ask_for(at<T>(c.value, b, kv, key + count + ahead), c.value_dim * sizeof(T));
          }
          tile(b, kv * group + g, row0 + r, std::min(kTileRows, rows - r), g * span + r, key, count, values, step);
        }
      }
    }
    for (int64_t g = 0; g < group; ++g) finish(b, kv * group + g, row0, rows, g * span);
  }

 private:
  std::pair<const E*, int64_t> load_values(int64_t b, int64_t kv, int64_t key, int64_t count) {
    if constexpr (std::is_same_v<T, float>)
      if (c.value_dim == wide) return {at<float>(c.value, b, kv, key), c.value.row};
    pack_rows(values_of<T>(c, b, kv, key), count, c.value_dim, wide, values_);
    return {values_, wide};
  }

  void tile(int64_t b, int64_t h, int64_t row0, int64_t rows, int64_t slot, int64_t key, int64_t count,
            const E* values, int64_t value_step) {
    if (!frame_.see(c, row0, rows, key, count)) return;
    const E* queries = queries_ + slot * query_step;
    const auto seen = [&](int64_t r, int64_t n) { return frame_.seen(r, std::min(n, rows - r)); };
    factors_.row = paired<E> ? query_factors_ + slot : nullptr;
    product_of_panels(queries, query_step, keys_, depth, dots_, kTileKeys, rows, frame_.lowest, frame_.highest, seen,
                      factors_);
    frame_.load_rows(c, b, h, row0);
    Tile t = {};
    t.rows = rows, t.columns = count, t.step = kTileKeys, t.first_row = row0, t.first_column = key;
    t.first = frame_.first, t.last = frame_.last, t.row = frame_.row, t.column = frame_.column, t.head = frame_.head;
    t.extra = extra_of(c, b, h, row0, rows, key, count, kTileKeys, extra_);
    t.softcap = c.softcap, t.dot = dots_, t.top = tops_;
    t.query = reinterpret_cast<const float*>(queries), t.query_step = query_step;
    t.keys = reinterpret_cast<const float*>(keys_), t.dim = c.dim, t.depth = depth;
    t.row_factor = factors_.row, t.column_factor = factors_.column;
    c.score->forward(&t);
    for (int64_t r = 0; r < rows; ++r) weigh(r, slot + r);
    if (c.drop_below) drop(b, h, row0, rows, key);
    const E* weights = paired<E> ? weights_ : reinterpret_cast<const E*>(dots_);
    product_of_seen(weights, terms<E>(kTileKeys), values, value_step, out_ + slot * wide, wide, rows, wide, seen);
  }

  // One row of logits becomes weights; what was summed before is brought to the new maximum.
  void weigh(int64_t r, int64_t slot) {
    float* x = dots_ + r * kTileKeys;
    const float old = top_[slot], top = std::max(old, tops_[r]);
    if (tops_[r] == -kInf && !holds_nan(x, frame_.first[r], frame_.last[r])) {  // maxima pass over NaN, sums do not
      exponentials(x, 0, 0, frame_.lowest, frame_.highest, 0.0f, row_of_weights(r));
      return;
    }
    const Base base = base_of(top);
    const float sum = exponentials(x, frame_.first[r], frame_.last[r], frame_.lowest, frame_.highest, base,
                                   row_of_weights(r));
    if (top != old) {
      const float factor = base.change(old);
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
        auto* x = row_of_weights(r) + j;
        put_numbers(x, load_numbers(x) * dropout.of(row0 + r, key + j));
      }
  }

  Base base_of(float top) const { return {top, paired<E> && c.half == kWhole}; }

  // In the place of the logits, or rounded.
  auto row_of_weights(int64_t r) {
    if constexpr (paired<E>) return reinterpret_cast<T*>(weights_) + r * kTileKeys;
    else return dots_ + r * kTileKeys;
  }

  void finish(int64_t b, int64_t h, int64_t row0, int64_t rows, int64_t slot) {
    const int64_t start = (b * c.heads + h) * c.queries + row0;
    for (int64_t r = 0; r < rows; ++r) {
      const float sum = sum_[slot + r], factor = sum == 0 ? 0.0f : 1.0f / sum;  // NaN stays
      const float* from = out_ + (slot + r) * wide;
      float* to = c.out + (start + r) * c.value_dim;
      for (int64_t e = 0; e < c.value_dim; ++e) to[e] = paired<E> ? quotient(from[e], sum, factor) : from[e] * factor;
      c.lse[start + r] = sum == 0 ? -kInf : top_[slot + r];
      c.lse[c.batch * c.heads * c.queries + start + r] = factor * base_of(top_[slot + r]).of_top();
    }
  }

  const Call& c;
  const int64_t wide, depth, query_step, span, rows_;
  Scratch scratch_;
  Frame frame_;
  Factors factors_;
  E *keys_, *values_, *queries_, *weights_;
  float *dots_, *extra_, *query_factors_, *key_factors_, *out_, *top_, *sum_, *tops_;
};

template <typename T>
void forward(const Call& c) {
  // the last queries of a causal call see most keys: they start first
  const int64_t span = span_of<Operand<T>>(c), blocks = (c.queries + span - 1) / span, tasks = blocks * c.kv_heads * c.batch;
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(tasks, c.threads)))
  {
    ForwardTask<T> task(c);
    TileShapes shapes(paired<Operand<T>>);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) {
      const int64_t block = blocks - 1 - i / (c.kv_heads * c.batch), head = i % (c.kv_heads * c.batch);
      const int64_t row0 = block * span;
      task.run(head / c.kv_heads, head % c.kv_heads, row0, std::min(span, c.queries - row0));
    }
  }
}

}  // namespace hyper
