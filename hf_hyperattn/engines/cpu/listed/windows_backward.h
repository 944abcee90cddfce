// Gradients of one tile: the lists and their logits are made again, the weights come from the saved log-sum-exp.
//
// With P the weights, g the output's gradient and delta = g·out: dV = Pᵀ·g, dS = P (g·Vᵀ - delta), dQ = dS·K,
// dK = dSᵀ·Q. Which blocks are closed has no gradient.
#pragma once

#include "engines/cpu/listed/windows.h"

namespace hyper {

// Where gradients go, all contiguous and zero at first; `out` and `lse` stand in the call.
struct WindowGradients {
  const float* grad;            // of the output, [B, H, N, dv]
  float* query;                 // [B, H, N, d]
  float* const* keys;           // levels + 1 tables [B, Hkv, n_l, d]
  float* const* values;
  const int64_t* rows;          // levels + 1: n_l
  float *block_bias, *sink_logit;  // [B, H]
};

class WindowBackward : WindowTile<float> {
 public:
  WindowBackward(const Windows& call, const WindowGradients& gradients)
      : WindowTile<float>(call), s(gradients), scratch_(kShared * (c.value_dim + 2) + kRowsAtOnce * c.value_dim + 64) {
    grads_ = scratch_.take(kShared * c.value_dim);
    room_ = scratch_.take(kRowsAtOnce * c.value_dim);
    lse_ = scratch_.take(kShared);
    delta_ = scratch_.take(kShared);
  }

  void run(int64_t b, int64_t h, int64_t first, int64_t count) {
    place(b, h, first, count);
    start(false);
    cover();
    read_gradients();
    const Logits blocks = block_logits();
    for (int64_t level = c.levels; level > 0; --level) {
      const auto [from, to] = part_of(level);
      turn_back(level, closed_, from, to - from, blocks.from(from).at);
    }
    add_to_bias();
    list_tokens();
    token_logits_.resize(kShared * kTileKeys);
    for (int64_t from = 0; from < plain_.count; from += kTileKeys) {
      const int64_t some = std::min(kTileKeys, plain_.count - from);
      read_tokens(from, some, tile_.logits_in(token_logits_.data(), some));
      turn_back(0, plain_, from, some, token_logits_.data());
    }
    for (int64_t r = 0; r < count_ && refines(); ++r) turn_back_opened(r);
    for (int64_t e = 0; e < count_ * c.dim; ++e) query_[e] *= c.scale;
  }

 private:
  float* row_of(float* const* tables, int64_t width, int64_t level, int64_t row) const {
    const int64_t at = (batch_ * c.kv_heads + kv_) * s.rows[level] + row + (level ? 0 : c.starts[batch_]);
    return tables[level] + at * width;
  }
  float* key_gradients(int64_t level, int64_t row) const { return row_of(s.keys, c.dim, level, row); }
  float* value_gradients(int64_t level, int64_t row) const { return row_of(s.values, c.value_dim, level, row); }

  void read_gradients() {
    const int64_t head = batch_ * c.heads + head_, at = head * c.queries + query_row();
    grad_ = s.grad + at * c.value_dim;
    query_ = s.query + at * c.dim;
    block_bias_ = s.block_bias + head;
    const float* out = c.out + at * c.value_dim;
    std::fill_n(grads_, kShared * c.value_dim, 0.0f);
    std::fill_n(lse_, kShared, kInf);  // lanes without a query have no weights
    std::fill_n(delta_, kShared, 0.0f);
    for (int64_t r = 0; r < count_; ++r) {
      lse_[r] = c.lse[at + r];
      for (int64_t e = 0; e < c.value_dim; ++e) {
        const float g = grad_[r * c.value_dim + e];
        grads_[e * kShared + r] = g;
        delta_[r] += g * out[r * c.value_dim + e];
      }
      if (c.sink_logit)
        s.sink_logit[head] -= exponential<true>(splat(c.sink_logit[head_] - lse_[r]))[0] * delta_[r];
    }
  }

  // Gradients through `count` rows of a list; `logits` holds their logits, and then the gradients of these.
  void turn_back(int64_t level, const List& list, int64_t from, int64_t count, float* logits) {
    if (static_cast<int64_t>(weights_.size()) < count * kShared) weights_.resize(count * kShared);
    float* products = weights_.data();
    const int32_t* rows = list.rows.data() + from;
    const Listed<float> keys = level ? this->keys(level) : tokens(c.keys, c.key_steps);
    const Listed<float> values = level ? this->values(level) : tokens(c.values, c.value_steps);
    multiply_rows(grads_, c.value_dim, 1.0f, values, rows, count, room_, products);
    for (int64_t j = 0; j < count; ++j)
      for (int64_t i = j * kShared; i < (j + 1) * kShared; i += kLanes) {
        const int64_t r = i - j * kShared;
        const Vec weight = exponential<true>(load(logits + i) - load(lse_ + r));
        // hidden values may be no numbers
        store(logits + i, weight == 0 ? Vec{} : weight * (load(products + i) - load(delta_ + r)));
        store(products + i, weight);
      }
    over_neighbours(rows, count, [&](int64_t j, int64_t some) {
      spread(products + j * kShared, grad_, c.value_dim, count_, some, value_gradients(level, rows[j]));
      spread(logits + j * kShared, tile_.query(0), c.dim, count_, some, key_gradients(level, rows[j]));
    });
    add_to_queries(keys, list.seen_by.data() + from, rows, count, logits);
  }

  Listed<float> tokens(const void* const* tables, const int64_t* steps) const {
    Listed<float> found = table(tables, steps, 0);
    found.at += c.starts[batch_] * found.step;
    return found;
  }

  // Calls f(place, how many) for rows that lie one after the other.
  template <class Body>
  static void over_neighbours(const int32_t* rows, int64_t count, Body body) {
    for (int64_t j = 0, end; j < count; j = end) {
      for (end = j + 1; end < count && rows[end] == rows[end - 1] + 1;) ++end;
      body(j, end - j);
    }
  }

  // The gradient of a hidden logit is 0, which times a key that is no number would not be.
  void add_to_queries(Listed<float> keys, const uint16_t* seen_by, const int32_t* rows, int64_t count, const float* d_logits) {
    const auto key = [=](int64_t j) { return keys.row(rows[j]); };
    bool finite = true;
    for (int64_t j = 0; j < count && finite; ++j) finite = seen_by[j] == all() || is_finite(key(j), c.dim);
    if (finite) return row_sums(d_logits, 1, kShared, count_, key, count, c.dim, query_, c.dim);
    for (int64_t j = 0; j < count; ++j)
      for (int64_t r = 0; r < count_; ++r)
        if (seen_by[j] >> r & 1) {
          const auto one = [=](int64_t) { return key(j); };
          row_sums(d_logits + j * kShared + r, 1, kShared, 1, one, 1, c.dim, query_ + r * c.dim, c.dim);
        }
  }

  // Of closed blocks of several tokens, whose logits' gradients `turn_back` left in their place.
  void add_to_bias() {
    const Logits d_logits = block_logits();
    float sums[kShared] = {};
    for (const Run& run : runs_)
      for (int64_t i = run.row * kShared; i < (run.row + count_biased(run)) * kShared; i += kLanes) {
        float* to = sums + i % kShared;
        store(to, load(to) + load(d_logits.at + i));
      }
    for (int64_t r = 0; r < count_; ++r) *block_bias_ += sums[r];
  }

  // The same for what refinement opened to one query.
  void turn_back_opened(int64_t r) {
    Opened& opened = opened_[r];
    if (static_cast<int64_t>(weights_.size()) < opened.count + kLanes) weights_.resize(opened.count + kLanes);
    float* products = weights_.data();
    const float *grad = grad_ + r * c.value_dim, *query = tile_.query(r);
    over_opened(opened, [&](int64_t level, int64_t from, int64_t count) {
      const int32_t* rows = opened.rows.data() + from;
      const Listed<float> keys = level ? this->keys(level) : tokens(c.keys, c.key_steps);
      const Listed<float> values = level ? this->values(level) : tokens(c.values, c.value_steps);
      multiply_one(grad, c.value_dim, 1.0f, values, rows, count, products);
      for (int64_t i = 0; i < count; ++i) {
        const float weight = std::exp(opened.logits[from + i] - lse_[r]), d_logit = weight * (products[i] - delta_[r]);
        add_scaled(grad, weight, c.value_dim, value_gradients(level, rows[i]));
        add_scaled(query, d_logit, c.dim, key_gradients(level, rows[i]));
        products[i] = d_logit;
        if (level) *block_bias_ += d_logit;
      }
      add_to_one(products, keys, rows, count, c.dim, query_ + r * c.dim);
    });
  }

  static void add_scaled(const float* from, float factor, int64_t count, float* to) {
    for (int64_t e = 0; e < count; e += kLanes) store(to + e, load(to + e) + factor * load(from + e));
  }

  const WindowGradients& s;
  Scratch scratch_;
  std::vector<float> weights_;
  const float* grad_ = nullptr;
  float *grads_, *room_, *lse_, *delta_, *query_ = nullptr, *block_bias_ = nullptr;
};

}  // namespace hyper
