// The backward pass. A task is a chunk of the keys of one key head: it owns the gradients of those keys and values, and
// adds to a buffer of its chunk for the queries. With few heads there are several chunks, whose buffers are summed in
// a fixed order, so that a result depends on the number of threads at most by rounding.
//
// The gradient of a head's parameter is the sum over all pairs of ds · dS/dparameter. In a row the ds add up to 0, but
// for rounding: small logits here and in the forward pass may differ in their last digit, and delta is made of the output.
// Where slopes are large but nearly the same along a row, that residue times their size is all that one would see. So
// the mean slope is taken off them, which changes nothing else: the sum over rows of residue · mean is subtracted from
// the gradient at the end (`centred` in kernels.py).
#pragma once

#include "call.h"

namespace hyper {

struct Slots {
  const float *grad, *delta;      // contiguous [B, H, N, dv] and [B, H, N]
  int64_t chunks;
  float* query_sums;              // [chunks, B, H, N, padded dim], zeros
  float* const* row;              // [chunks, B, H, N] each, zeros; then, of a score with parameters, residue and means
  float* const* column;           // [B, H or Hkv, M] each
  const int64_t* column_heads;    // H or Hkv
  double* head;                   // [chunks, B, H, heads of the score], zeros
  void *query, *key, *value;      // contiguous, in the dtype of the inputs, but see Call::half; `width` numbers a row of query and key
  int64_t width;
  float *query_factor, *key_factor;  // [B, H, N] and [B, Hkv, M], or null
};

// Gradients of rows from those of rows times factors: to = weight · sums, and the factor's own, scale · sums · row.
template <typename T, typename To>
void through_factor(Rows<T> from, const float* sums, int64_t dim, int64_t r, To* to, int64_t width, float* d_factor) {
  const T* row = from.at + r * from.step;
  const float weight = from.weight(r);
  if (d_factor) {
    float inner = 0;
    for (int64_t e = 0; e < dim; ++e) inner += number(row[e]) * sums[e];
    *d_factor = from.scale * inner;
  }
  for (int64_t e = 0; e < dim; ++e) put(to + e, sums[e] * weight);
  for (int64_t e = dim; e < width; ++e) put(to + e, 0.0f);
}

// The same for row `at` of `to`, in the dtype that gradients are wanted in.
template <typename T>
void through_factor(Rows<T> from, const float* sums, int64_t r, const Call& c, const Slots& s, void* to, int64_t at,
                    float* d_factor) {
  if (!c.half || c.half == kWhole) through_factor(from, sums, c.dim, r, static_cast<float*>(to) + at * s.width, s.width, d_factor);
  else through_factor(from, sums, c.dim, r, static_cast<T*>(to) + at * s.width, s.width, d_factor);
}

template <typename T>
class BackwardTask {
  using E = Operand<T>;  // floats, or pairs of bfloat16

 public:
  BackwardTask(const Call& call, const Slots& slots)
      : c(call), s(slots), wide(padded(c.value_dim)), dim(padded(c.dim)), depth(panel_depth<E>(c.dim)),
        value_depth(panel_depth<E>(c.value_dim)), query_step(paired<E> ? left_step<E>(c.dim) : dim),
        grad_step(paired<E> ? left_step<E>(c.value_dim) : wide),
        scratch_(kTileRows * (kTileKeys * 5 + query_step + grad_step + dim + wide + 2) + 2 * kTileKeys +
                 kTileKeys * (depth + value_depth + 2 * dim + wide) + Frame::size(c) * 2 + 512) {
    dots_ = scratch_.take(kTileRows * kTileKeys);
    weights_ = scratch_.take(kTileRows * kTileKeys);
    extra_ = scratch_.take(kTileRows * kTileKeys);
    tops_ = scratch_.take(kTileRows);
    logits_ = scratch_.take(kTileKeys);
    queries_ = scratch_.template take<E>(kTileRows * query_step);
    grads_ = scratch_.template take<E>(kTileRows * grad_step);
    key_panels_ = scratch_.template take<E>(kTileKeys * depth);
    value_panels_ = scratch_.template take<E>(kTileKeys * value_depth);
    keys_ = scratch_.template take<E>(terms<E>(kTileKeys) * dim);
    query_factors_ = scratch_.take(kTileRows);
    key_factors_ = scratch_.take(kTileKeys);
    if constexpr (paired<E>) {
      const int64_t rows = terms<E>(kTileRows), whole = padded(rows);
      query_rows_ = scratch_.template take<E>(whole * dim);
      grad_rows_ = scratch_.template take<E>(whole * wide);
      weight_rows_ = scratch_.template take<E>(rows * kTileKeys);
      dot_rows_ = scratch_.template take<E>(rows * kTileKeys);
      left_dots_ = scratch_.template take<E>(kTileRows * terms<E>(kTileKeys));
      left_rest_ = scratch_.template take<E>(c.half == kWhole ? kTileRows * terms<E>(kTileKeys) : 0);
    }
    d_keys_ = scratch_.take(kTileKeys * dim);
    d_values_ = scratch_.take(kTileKeys * wide);
    frame_.columns = scratch_.take(Frame::size(c));
    d_columns_ = scratch_.take(Frame::size(c));
  }

  // Keys [key, key + count) against all queries that see them.
  void run(int64_t b, int64_t kv, int64_t chunk, int64_t key, int64_t count) {
    pack_panels(keys_of<T>(c, b, kv, key), count, c.dim, key_panels_);
    pack_panels(values_of<T>(c, b, kv, key), count, c.value_dim, value_panels_);
    pack_rows(keys_of<T>(c, b, kv, key), count, c.dim, dim, keys_);
    factors_ = factors_of<E>(keys_of<T>(c, b, kv, key), count, key_factors_);
    std::fill_n(d_keys_, count * dim, 0.0f);
    std::fill_n(d_values_, count * wide, 0.0f);
    for (int64_t g = 0; g < c.group(); ++g) {
      const int64_t h = kv * c.group() + g;
      frame_.load_head(c, h);
      frame_.load_columns(c, b, h, key, count);
      std::fill_n(d_columns_, Frame::size(c), 0.0f);
      for (int64_t row0 = 0; row0 < c.queries; row0 += kTileRows)
        tile(b, h, chunk, row0, std::min(kTileRows, c.queries - row0), key, count);
      keep_columns(b, h, kv, g, key, count);
    }
    T* to_value = static_cast<T*>(s.value);
    const int64_t start = (b * c.kv_heads + kv) * c.keys + key;
    for (int64_t j = 0; j < count; ++j) {
      through_factor(keys_of<T>(c, b, kv, key), d_keys_ + j * dim, j, c, s, s.key, start + j,
                     s.key_factor ? s.key_factor + start + j : nullptr);
      for (int64_t e = 0; e < c.value_dim; ++e) put(to_value + (start + j) * c.value_dim + e, d_values_[j * wide + e]);
    }
  }

 private:
  void tile(int64_t b, int64_t h, int64_t chunk, int64_t row0, int64_t rows, int64_t key, int64_t count) {
    if (!frame_.see(c, row0, rows, key, count)) return;
    const int64_t low = frame_.lowest / kPanel * kPanel, high = frame_.highest;
    const int64_t start = (b * c.heads + h) * c.queries + row0;
    const auto seen = [&](int64_t r, int64_t n) { return frame_.seen(r, std::min(n, rows - r)); };
    const auto queries = queries_of<T>(c, b, h, row0);
    const float* given = s.grad + start * c.value_dim;
    const E* grads = grads_;
    if constexpr (paired<E>) {
      copy_left(queries, rows, c.dim, queries_, query_factors_);
      pack_rows(queries, rows, c.dim, dim, query_rows_);
      round_left(given, c.value_dim, rows, c.value_dim, nullptr, grads_, nullptr, grad_step);
      round_rows(given, c.value_dim, rows, c.value_dim, nullptr, grad_rows_, nullptr, wide);
      fill_rows(grad_rows_, rows, wide);
      factors_.row = query_factors_;
    } else {
      copy_rows(queries, rows, 0, c.dim, dim, queries_);
      if (c.value_dim == wide) grads = given;
      else copy_rows(Rows<float>{given, c.value_dim, nullptr, 0}, rows, 0, c.value_dim, wide, grads_);
    }
    product_of_panels(queries_, query_step, key_panels_, depth, dots_, kTileKeys, rows, low, high, seen, factors_);
    product_of_panels(grads, grad_step, value_panels_, value_depth, weights_, kTileKeys, rows, low, high, seen);
    float* sums = s.query_sums + ((chunk * c.batch * c.heads) * c.queries + start) * dim;
    score(b, h, chunk, row0, rows, key, count, start, sums);
    clear(rows, low, high);
    multiply_back(grads, rows, low, high - low, sums, seen);
  }

  // The products of weights and of the logits' gradients with vectors, added to the gradients of `count` keys from `low`
  // on and of the queries.
  template <class Seen>
  void multiply_back(const E* grads, int64_t rows, int64_t low, int64_t count, float* sums, Seen seen) {
    const auto add_to_queries = [&](const E* d) {  // rows of gradients of logits times the keys
      product_of_seen(d, terms<E>(kTileKeys), keys_, dim, sums, dim, rows, dim, seen);
    };
    float *d_values = d_values_ + low * wide, *d_keys = d_keys_ + low * dim;
    if constexpr (paired<E>) {
      const float *weights = weights_ + low, *dots = dots_ + low;
      round_rows(weights, kTileKeys, rows, count, nullptr, weight_rows_, nullptr, kTileKeys);
      product(weight_rows_, 1, kTileKeys, grad_rows_, wide, terms<E>(rows), d_values, wide, count, wide, true);
      // where gradients are wanted in float32, because a part by norms will cancel with them, what is lost by rounding
      // is multiplied too
      E *row_rest = c.half == kWhole ? weight_rows_ : nullptr, *left_rest = c.half == kWhole ? left_rest_ : nullptr;
      round_rows(dots, kTileKeys, rows, count, factors_.row, dot_rows_, row_rest, kTileKeys);
      const int64_t skipped = terms<E>(low);
      round_left(dots, kTileKeys, rows, count, factors_.from(0, low).column, left_dots_ + skipped,
                 left_rest ? left_rest + skipped : nullptr, terms<E>(kTileKeys));
      for (const E* part : {static_cast<const E*>(dot_rows_), static_cast<const E*>(row_rest)})
        if (part) product(part, 1, kTileKeys, query_rows_, dim, terms<E>(rows), d_keys, dim, count, dim, true);
      add_to_queries(left_dots_);
      if (left_rest) add_to_queries(left_rest);
    } else {
      product(weights_ + low, 1, kTileKeys, grads, wide, rows, d_values, wide, count, wide, true);
      product(dots_ + low, 1, kTileKeys, queries_, dim, rows, d_keys, dim, count, dim, true);
      add_to_queries(dots_);
    }
  }

  void score(int64_t b, int64_t h, int64_t chunk, int64_t row0, int64_t rows, int64_t key, int64_t count,
             int64_t start, float* sums) {
    const int64_t all = c.batch * c.heads;
    frame_.load_rows(c, b, h, row0);
    Tile t = {};
    t.rows = rows, t.columns = count, t.step = kTileKeys, t.first_row = row0, t.first_column = key;
    t.first = frame_.first, t.last = frame_.last, t.row = frame_.row, t.column = frame_.column, t.head = frame_.head;
    t.extra = extra_of(c, b, h, row0, rows, key, count, kTileKeys, extra_);
    t.softcap = c.softcap, t.dot = dots_, t.weight = weights_, t.top = tops_, t.logits = logits_;
    t.query = reinterpret_cast<const float*>(queries_), t.query_step = query_step;
    t.keys = reinterpret_cast<const float*>(key_panels_), t.dim = c.dim, t.depth = depth;
    t.row_factor = factors_.row, t.column_factor = factors_.column;
    t.aligned = paired<E> && c.half == kWhole;
    t.d_query = sums, t.d_keys = d_keys_, t.d_step = dim;
    t.largest = c.lse + start, t.inverse = c.lse + all * c.queries + start, t.delta = s.delta + start;
    float *d_row[2 * kMostNumbers + 1], *d_column[kMostNumbers];
    const int rows_of_numbers = c.score->rows + (c.score->heads ? 1 + c.score->heads : 0);
    for (int i = 0; i < rows_of_numbers; ++i) d_row[i] = s.row[i] + chunk * all * c.queries + start;
    for (int i = 0; i < c.score->columns; ++i) d_column[i] = d_columns_ + i * kTileKeys;
    t.d_row = d_row, t.d_column = d_column, t.residue = d_row[c.score->rows], t.mean = d_row + c.score->rows + 1;
    t.d_head = s.head + (chunk * all + b * c.heads + h) * c.score->heads;
    if (c.drop_below) t.dropout = c.dropout(b, h);
    c.score->backward(&t);
  }

  // What the score has not written, outside the visible ranges, is 0.
  void clear(int64_t rows, int64_t low, int64_t high) {
    for (int64_t r = 0; r < rows; ++r)
      for (float* x : {dots_ + r * kTileKeys, weights_ + r * kTileKeys}) {
        const int64_t first = frame_.first[r], last = frame_.last[r];
        std::fill(x + low, x + (first < last ? first : high), 0.0f);
        std::fill(x + (first < last ? last : high), x + high, 0.0f);
      }
  }

  // Gradients of the columns' statistics; heads that share a statistic add up.
  void keep_columns(int64_t b, int64_t h, int64_t kv, int64_t g, int64_t key, int64_t count) {
    for (int i = 0; i < c.score->columns; ++i) {
      const bool shared = s.column_heads[i] == c.kv_heads;
      float* to = s.column[i] + (b * s.column_heads[i] + (shared ? kv : h)) * c.keys + key;
      for (int64_t j = 0; j < count; ++j) to[j] = d_columns_[i * kTileKeys + j] + (shared && g ? to[j] : 0.0f);
    }
  }

  const Call& c;
  const Slots& s;
  const int64_t wide, dim, depth, value_depth, query_step, grad_step;
  Scratch scratch_;
  Frame frame_;
  Factors factors_;
  E *queries_, *grads_, *key_panels_, *value_panels_, *keys_;
  E *query_rows_, *grad_rows_, *weight_rows_, *dot_rows_, *left_dots_, *left_rest_;  // of pairs: what products need rounded
  float *dots_, *weights_, *extra_, *tops_, *logits_, *query_factors_, *key_factors_, *d_keys_, *d_values_, *d_columns_;
};

// delta = the sum of grad · out of each row, which every derivative of a softmax needs. Its terms are added up one after
// another, as in the products: where a row sees one key alone, the two are the same number to the last digit, and no
// steep score multiplies a difference.
template <typename T>
void deltas(const Call& c, const float* grad, float* delta) {
  const int64_t rows = c.batch * c.heads * c.queries;
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const float *x = grad + r * c.value_dim, *y = c.out + r * c.value_dim;
    delta[r] = sum_in_turn(x, y, c.value_dim, Operand<T>{});
  }
}

// Sums the chunks of the queries' gradients and takes them through scale and factor.
template <typename T>
void finish_queries(const Call& c, const Slots& s) {
  const int64_t dim = padded(c.dim), rows = c.batch * c.heads * c.queries;
#pragma omp parallel for num_threads(c.threads) schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t h = r / c.queries;
    float* sums = s.query_sums + r * dim;
    for (int64_t chunk = 1; chunk < s.chunks; ++chunk)
      for (int64_t e = 0; e < dim; ++e) sums[e] += sums[chunk * rows * dim + e];
    through_factor(queries_of<T>(c, h / c.heads, h % c.heads, 0), sums, r % c.queries, c, s, s.query, r,
                   s.query_factor ? s.query_factor + r : nullptr);
  }
}

template <typename T>
void backward(const Call& c, const Slots& s) {
  const int64_t blocks = (c.keys + kTileKeys - 1) / kTileKeys, tasks = c.batch * c.kv_heads * s.chunks;
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(tasks, c.threads)))
  {
    BackwardTask<T> task(c, s);
    TileShapes shapes(paired<Operand<T>>);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) {
      const int64_t chunk = i % s.chunks, head = i / s.chunks;
      for (int64_t block = blocks * chunk / s.chunks; block < blocks * (chunk + 1) / s.chunks; ++block) {
        const int64_t key = block * kTileKeys;
        task.run(head / c.kv_heads, head % c.kv_heads, chunk, key, std::min(kTileKeys, c.keys - key));
      }
    }
  }
  finish_queries<T>(c, s);
}

}  // namespace hyper
