// A few queries by rules of their heads, as in generation: of the keys and values that a head sees every one is read where
// it lies, and once for all heads that share it.
#pragma once

#include <optional>

#include "engines/cpu/listed/forward.h"

namespace hyper {

template <typename T>
class SelectedFew {
 public:
  explicit SelectedFew(const Selected& call)
      : c(call), dim(padded(c.dim)), wide(padded(c.value_dim)), group(c.group()), length(c.blocks() * kLanes),
        heads_(group, Blocks(c.blocks())), next_(group), running_(group), scratch_(group * (dim + wide + length) + kLanes * (dim + wide) + 256) {
    queries_ = scratch_.take(group * dim);
    out_ = scratch_.take(group * wide);
    logits_ = scratch_.take(group * length);
    rows_ = scratch_.take(kLanes * std::max(dim, wide));
  }

  // One query of the heads that share a key head.
  void run(int64_t b, int64_t kv, int64_t row) {
    const int64_t p = c.place(b, row);
    for (int64_t g = 0; g < group; ++g) {
      auto query = c.rows_of<T>(c.query, b, kv * group + g, row);
      query.scale = c.scale;
      copy_rows(query, 1, 0, c.dim, dim, queries_ + g * dim);
      heads_[g].listed.clear();
      if (p >= 0) heads_[g].list(c, b, kv * group + g, p, 1);
    }
    std::fill_n(out_, group * wide, 0.0f);
    over_blocks(c.key, b, kv, c.dim, dim, [&](int64_t g, int64_t i, const float* keys, int64_t step, int64_t there) {
      const float *query = queries_ + g * dim, *bias = c.biases(b, kv * group + g);
      const auto finish = [&](float* x) { store(x, logits_of(c, load(x), bias, heads_[g].listed[i], c.length(b))); };
      const bool is_plain = !c.softcap && !bias;
      const auto term = [&](Vec key, int64_t, int64_t e, bool) { return key * load(query + e); };
      float* to = logits_ + g * length + i * kLanes;
      const uint32_t seen = heads_[g].seen(i, p);
      if (__builtin_popcount(seen) <= kLoose) {
        store(to, Vec{});
        over_bits(seen, [&](int j) {
          Vec sum = {};
          for (int64_t e = 0; e < dim; e += kLanes) sum += load(keys + j * step + e) * load(query + e);
          to[j] = sum_of(sum);
        });
      } else {
        sum_rows(keys, step, there, dim, term, [](int64_t) {}, to);
      }
      if (!is_plain) finish(to);
      if (!heads_[g].whole[i]) store(to, heads_[g].hidden(i, p) ? splat(-kInf) : load(to));
    });
    for (int64_t g = 0; g < group; ++g) {
      running_[g] = c.start(kv * group + g);
      take(logits_ + g * length, heads_[g].listed.size() * kLanes, running_[g]);
    }
    over_blocks(c.value, b, kv, c.value_dim, wide, [&](int64_t g, int64_t i, const float* values, int64_t step, int64_t there) {
      const float* weights = logits_ + g * length + i * kLanes;
      const uint32_t seen = heads_[g].seen(i, p);
      if (__builtin_popcount(seen) > kLoose)
        return product(weights, 0, 1, values, step, there, out_ + g * wide, wide, 1, wide, true);
      over_bits(seen, [&](int j) { add_rows(weights + j, values + j * step, step, 1, wide, out_ + g * wide); });
    });
    for (int64_t g = 0; g < group; ++g) {
      const int64_t at = (b * c.heads + kv * group + g) * c.queries + row;
      const float share = running_[g].share();
      for (int64_t e = 0; e < c.value_dim; ++e) c.out[at * c.value_dim + e] = out_[g * wide + e] * share;
      c.lse[at] = running_[g].top, c.lse[c.batch * c.heads * c.queries + at] = share;
    }
  }

 private:
  static constexpr int kLoose = kLanes / 4;  // of a block of which no more keys are seen, these alone are read

  template <class Body>
  static void over_bits(uint32_t bits, Body body) {
    for (; bits; bits &= bits - 1) body(__builtin_ctz(bits));
  }

  // f(head, its block's place in the list, rows of floats, their step, how many) for the blocks of all heads in order.
  template <class Body>
  void over_blocks(const Matrix& m, int64_t b, int64_t kv, int64_t width, int64_t filled, Body body) {
    constexpr int32_t none = std::numeric_limits<int32_t>::max();
    const auto block_of = [&](int64_t g) {
      return next_[g] < heads_[g].listed.size() ? heads_[g].listed[next_[g]] : none;
    };
    std::fill(next_.begin(), next_.end(), size_t{0});
    for (;;) {
      int32_t block = none;
      for (int64_t g = 0; g < group; ++g) block = std::min(block, block_of(g));
      if (block == none) return;
      const int64_t there = std::min<int64_t>(kLanes, c.length(b) - block * kLanes);
      const auto from = c.rows_of<T>(m, b, kv, c.starts[b] + block * kLanes);
      const float* rows = rows_;
      int64_t step = filled;
      if constexpr (std::is_same_v<T, float>) rows = width == filled ? from.at : rows_, step = width == filled ? m.row : filled;
      if (rows == rows_) copy_rows(from, there, 0, width, filled, rows_);
      for (int64_t g = 0; g < group; ++g)
        if (block_of(g) == block) body(g, static_cast<int64_t>(next_[g]++), rows, step, there);
    }
  }

  const Selected& c;
  const int64_t dim, wide, group, length;
  std::vector<Blocks> heads_;
  std::vector<size_t> next_;
  std::vector<Running> running_;
  Scratch scratch_;
  float *queries_, *out_, *logits_, *rows_;
};

template <typename T>
void selected_forward(const Selected& c) {
  const bool few = c.queries <= kFew;
  const int64_t spans = few ? c.queries : (c.queries + kSpan - 1) / kSpan;
  const int64_t tasks = c.batch * (few ? c.kv_heads : c.heads) * spans;
  std::optional<Packed> packed;
  if (!few) packed.emplace(c, T{}, false);
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(tasks, c.threads)))
  {
    std::optional<SelectedTask<T>> task;
    std::optional<SelectedFew<T>> some;
    few ? (void)some.emplace(c) : (void)task.emplace(c, *packed);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < tasks; ++i) {
      if (few) {
        some->run(i / spans / c.kv_heads, i / spans % c.kv_heads, i % spans);
        continue;
      }  // the last queries see most keys; heads that share theirs follow each other
      const int64_t g = i % c.group(), span = spans - 1 - i / c.group() % spans, head = i / c.group() / spans;
      const int64_t row = span * kSpan, h = head % c.kv_heads * c.group() + g;
      task->run(head / c.kv_heads, h, row, std::min(c.queries, row + kSpan));
    }
  }
}

}  // namespace hyper
