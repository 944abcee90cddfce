// The backward pass of forward.h. A task is a part of the queries of all heads that share a key head; it adds to
// gradients of keys and values of its own, which are summed in a fixed order.
#pragma once

#include "engines/cpu/listed/blocks.h"

namespace hyper {

struct SelectedGradients {
  const float* grad;   // contiguous [B, H, N, dv], float, as all gradients
  float* query;        // contiguous [B, H, N, d]
  int64_t parts;
  float *key, *value;  // [parts, B, Hkv, M, padded width], zeros
};

template <typename T>
class SelectedBackward {
 public:
  SelectedBackward(const Selected& call, const SelectedGradients& gradients, const Packed& packed)
      : c(call), s(gradients), packed_(packed), wide(packed.wide), dim(packed.key_wide), blocks_(c.blocks()),
        scratch_(kTileRows * (2 * kTileKeys + 2 * dim + wide + 1) + 256) {
    dots_ = scratch_.take(kTileRows * kTileKeys);
    weights_ = scratch_.take(kTileRows * kTileKeys);
    queries_ = scratch_.take(kTileRows * dim);
    d_queries_ = scratch_.take(kTileRows * dim);
    grads_ = scratch_.take(kTileRows * wide);
    delta_ = scratch_.take(kTileRows);
  }

  void run(int64_t b, int64_t kv, int64_t part) {
    const int64_t row = c.queries * part / s.parts, end = c.queries * (part + 1) / s.parts;
    for (int64_t g = 0; g < c.group(); ++g) {
      const int64_t h = kv * c.group() + g;
      const Rule& rule = c.rules[h];
      const int64_t together = rule.page ? std::max(rule.chunk, kShared) : kSpan;
      over_tiles(c, b, row, end, together, kTileRows, [&](int64_t r, int64_t p, int64_t rows) {
        if (p >= 0) tile(b, kv, h, part, r, p, rows);
        else std::fill_n(s.query + ((b * c.heads + h) * c.queries + r) * c.dim, rows * c.dim, 0.0f);
      });
    }
  }

 private:
  void tile(int64_t b, int64_t kv, int64_t h, int64_t part, int64_t row, int64_t p, int64_t rows) {
    const int64_t head = b * c.kv_heads + kv, start = (b * c.heads + h) * c.queries + row;
    const int64_t seen = blocks_.list(c, b, h, p, rows);  // by the chunks, one by one
    if (static_cast<int64_t>(blocks_.listed.size()) * blocks_.chunks > kWaste * seen)
      return over_tiles(c, b, row, row + rows, c.rules[h].chunk, kTileRows, [&](int64_t r, int64_t at, int64_t n) {
        tile(b, kv, h, part, r, at, n);
      });
    load(b, h, row, start, rows);
    const float* bias = c.biases(b, h);
    std::fill_n(d_queries_, rows * dim, 0.0f);
    const int64_t slot = (part * c.batch * c.kv_heads + head) * c.keys + c.starts[b];
    for (int64_t from = 0, all = blocks_.listed.size(); from < all; from += kListed) {
      const int64_t count = std::min(kListed, all - from);
      const float *keys[kListed], *values[kListed], *key_rows[kListed];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t block = blocks_.listed[from + i];
        keys[i] = packed_.keys(head, block), values[i] = packed_.value_columns(head, block);
        key_rows[i] = packed_.key_rows(head, block);
      }
      products(queries_, dim, rows, keys, count, c.dim, dots_);
      products(grads_, wide, rows, values, count, c.value_dim, weights_);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t r = 0; r < rows; ++r) through_softmax(from + i, i, start + r, p + r, r, bias, c.length(b));
      sums(dots_, rows, key_rows, count, dim, d_queries_, dim);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t key = blocks_.listed[from + i] * kLanes, there = std::min<int64_t>(kLanes, c.length(b) - key);
        product(dots_ + i * kLanes, 1, kTileKeys, queries_, dim, rows, s.key + (slot + key) * dim, dim, there, dim, true);
        product(weights_ + i * kLanes, 1, kTileKeys, grads_, wide, rows, s.value + (slot + key) * wide, wide, there,
                wide, true);
      }
    }
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t e = 0; e < c.dim; ++e) s.query[(start + r) * c.dim + e] = d_queries_[r * dim + e] * c.scale;
  }

  void load(int64_t b, int64_t h, int64_t row, int64_t start, int64_t rows) {
    auto queries = c.rows_of<T>(c.query, b, h, row);
    queries.scale = c.scale;
    copy_rows(queries, rows, 0, c.dim, dim, queries_);
    const float *grad = s.grad + start * c.value_dim, *out = c.out + start * c.value_dim;
    copy_rows(Rows<float>{grad, c.value_dim, nullptr, 0}, rows, 0, c.value_dim, wide, grads_);
    for (int64_t r = 0; r < rows; ++r) {
      delta_[r] = 0;
      for (int64_t e = r * c.value_dim; e < (r + 1) * c.value_dim; ++e) delta_[r] += grad[e] * out[e];
    }
  }

  // A block of one row: from products and gradients of weights to gradients of products and weights.
  void through_softmax(int64_t listed, int64_t i, int64_t at, int64_t p, int64_t r, const float* bias, int64_t keys) {
    float *dot = dots_ + r * kTileKeys + i * kLanes, *weight = weights_ + r * kTileKeys + i * kLanes;
    const float top = c.lse[at], inverse = c.lse[c.batch * c.heads * c.queries + at];
    const Vec logits = logits_of(c, hyper::load(dot), nullptr, 0, 0);
    const Vec ratio = c.softcap ? logits / c.softcap : Vec{};
    Vec x = (bias ? logits_of(c, hyper::load(dot), bias, blocks_.listed[listed], keys) : logits) - (top == -kInf ? 0.0f : top);
    if (!blocks_.whole[listed]) x = blocks_.hidden(listed, p) ? splat(-kInf) : x;
    const Vec e = exponential<true>(smaller(x, Vec{})) * inverse;
    store(dot, e * (hyper::load(weight) - delta_[r]) * (1.0f - ratio * ratio));
    store(weight, e);
  }

  const Selected& c;
  const SelectedGradients& s;
  const Packed& packed_;
  const int64_t wide, dim;
  Blocks blocks_;
  Scratch scratch_;
  float *dots_, *weights_, *queries_, *d_queries_, *grads_, *delta_;
};

template <typename T>
void selected_backward(const Selected& c, const SelectedGradients& s) {
  const Packed packed(c, T{}, true);
  const int64_t heads = c.batch * c.kv_heads, tasks = heads * s.parts;
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(tasks, c.threads)))
  {
    SelectedBackward<T> task(c, s, packed);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) task.run(i % heads / c.kv_heads, i % c.kv_heads, s.parts - 1 - i / heads);
  }
}

}  // namespace hyper
