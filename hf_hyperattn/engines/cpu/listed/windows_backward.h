// Gradients of one tile: the cover and its logits are computed again, the weights come from the saved log-sum-exp.
//
// With P the weights, g the output's gradient and delta = g·out: dV = Pᵀ·g, dS = P (g·Vᵀ - delta), dQ = dS·K,
// dK = dSᵀ·Q. Which blocks are closed has no gradient.
#pragma once

#include "engines/cpu/listed/windows.h"

namespace {

// Where gradients go, all contiguous and zero at first; `out` and `lse` stand in the call.
struct Gradients {
  const float* grad;            // of the output, [B, H, N, dv]
  float* query;                 // [B, H, N, d]
  float* const* keys;           // levels + 1 tables [B, Hkv, n_l, d]
  float* const* values;
  const int64_t* rows;          // levels + 1: n_l
  float *block_bias, *sink_logit;  // [B, H]
};

class BackwardTile : Tile {
 public:
  BackwardTile(const Call& call, const Gradients& gradients, Buffers& buffers, int64_t row, int64_t head,
               int64_t window, int64_t first, int lanes)
      : Tile(call, buffers, row, head, window, first, lanes), s_(gradients) {}

  void run() {
    cover();
    read_gradients();
    float* at = b_.blocks.data();
    Vec tied = {};
    for (const Segment& s : b_.closed) {
      const int64_t count = s.last - s.first;
      turn_back(s.level, s.first, count, at);
      for (int64_t block = s.first; block < s.last; ++block, at += kLanes)
        if (members(s.level, block) > 1) tied += load(at);
    }
    for (int q = 0; q < lanes_; ++q) *block_bias_ += tied[q];
    for (const Segment& s : b_.plain) {
      const int64_t end = c_.is_causal ? std::min(s.last, first_ + lanes_) : s.last;
      b_.tokens.resize(kChunk * kLanes);
      for (int64_t from = s.first; from < end; from += kChunk) {
        const int64_t count = std::min(kChunk, end - from);
        read_tokens(from, count, b_.tokens.data());
        turn_back(0, from, count, b_.tokens.data());
      }
    }
    if (refined())
      for (int q = 0; q < lanes_; ++q) turn_back_opened(q);
    for (int64_t e = 0; e < lanes_ * c_.dim; ++e) query_[e] *= c_.scale;
  }

 private:
  float* key_gradients(int64_t level, int64_t row) const {
    return s_.keys[level] + gradient_row(level, row) * c_.dim;
  }
  float* value_gradients(int64_t level, int64_t row) const {
    return s_.values[level] + gradient_row(level, row) * c_.value_dim;
  }
  int64_t gradient_row(int64_t level, int64_t row) const {
    const int64_t kv = head_ / (c_.heads / c_.kv_heads);
    return (row_ * c_.kv_heads + kv) * s_.rows[level] + row + (level ? 0 : c_.starts[row_]);
  }

  void read_gradients() {
    const int64_t head = row_ * c_.heads + head_, at = head * c_.queries + query_row_;
    grad_ = s_.grad + at * c_.value_dim;
    query_ = s_.query + at * c_.dim;
    block_bias_ = s_.block_bias + head;
    const float* out = c_.out + at * c_.value_dim;
    b_.grads.assign(c_.value_dim * kLanes, 0.0f);
    lse_ = splat(kInf);  // lanes without a query have no weights
    delta_ = Vec{};
    for (int q = 0; q < lanes_; ++q) {
      lse_[q] = c_.lse[at + q];
      float sum = 0;
      for (int64_t e = 0; e < c_.value_dim; ++e) {
        const float g = grad_[q * c_.value_dim + e];
        b_.grads[e * kLanes + q] = g;
        sum += g * out[q * c_.value_dim + e];
      }
      delta_[q] = sum;
      if (c_.sink_logit) s_.sink_logit[head] -= exponential<true>(splat(c_.sink_logit[head_] - lse_[q]))[0] * sum;
    }
  }

  // Gradients through `count` rows of a level; `logits` holds their logits, and then the gradients of these.
  void turn_back(int64_t level, int64_t first, int64_t count, float* logits) {
    if (static_cast<int64_t>(b_.weights.size()) < count * kLanes) b_.weights.resize(count * kLanes);
    float* products = b_.weights.data();
    const Run value_rows = values(level, first, count);
    logits_of(value_rows.at, value_rows.step, count, b_.grads.data(), c_.value_dim, products);
    for (int64_t r = 0; r < count * kLanes; r += kLanes) {
      const Vec weight = exponential<true>(load(logits + r) - lse_);
      store(logits + r, weight == 0 ? Vec{} : weight * (load(products + r) - delta_));  // hidden values may be NaN
      store(products + r, weight);
    }
    spread(products, grad_, c_.value_dim, lanes_, count, value_gradients(level, first));
    spread(logits, along_, c_.dim, lanes_, count, key_gradients(level, first));
    const Run key_rows = keys(level, first, count);
    if (level)
      add_values(logits, key_rows.at, key_rows.step, count, lanes_, query_, c_.dim);
    else
      add_tokens(logits, key_rows, first, count, query_, c_.dim);
  }

  // The same for what refinement opened to one query.
  void turn_back_opened(int q) {
    Opened& opened = b_.opened[q];
    if (static_cast<int64_t>(b_.weights.size()) < opened.count + kLanes) b_.weights.resize(opened.count + kLanes);
    float *logits = opened.logits.data(), *products = b_.weights.data();
    int64_t from = 0;
    for (int64_t level = c_.levels; level >= 0; --level) {
      const int64_t count = opened.ends[c_.levels - level] - from;
      const Table& t = tables_[level];
      b_.here.reserve(count + kLanes);
      int32_t* ids = b_.here.ids.data();
      std::copy_n(opened.ids.begin() + from, count, ids);
      std::fill_n(ids + count, kLanes, count ? ids[0] : 0);  // `dots` reads whole vectors
      t.value.dots_with(grad_ + q * c_.value_dim, ids, count, c_.value_dim, products);
      for (int64_t i = 0; i < count; ++i) {
        const float weight = std::exp(logits[from + i] - lse_[q]), g_logit = weight * (products[i] - delta_[q]);
        add_scaled(grad_ + q * c_.value_dim, weight, c_.value_dim, value_gradients(level, ids[i]));
        add_scaled(along_ + q * c_.dim, g_logit, c_.dim, key_gradients(level, ids[i]));
        products[i] = g_logit;
        if (level) *block_bias_ += g_logit;
      }
      t.key.add_to(query_ + q * c_.dim, products, ids, count, c_.dim);
      from += count;
    }
  }

  static void add_scaled(const float* from, float factor, int64_t count, float* to) {
    for (int64_t e = 0; e < count; e += kLanes) store(to + e, load(to + e) + factor * load(from + e));
  }

  const Gradients& s_;
  const float* grad_;
  float *query_, *block_bias_;
  Vec lse_, delta_;
};

}  // namespace
