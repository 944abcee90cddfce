// Key-tied attention over windows on the CPU, forward and backward (arXiv 2509.15448), and the means that it reads. Queries
// and tokens of a forward pass may be in half precision; means and gradients are float32. Agrees with
// mechanisms/hsa/tree/key.py.

#include <omp.h>

#include "engines/cpu/listed/windows_backward.h"

using namespace hyper;

namespace {

// Calls `run(begin, end)` for parts of [0, count), one for each thread.
template <class Run>
void in_parallel(int64_t count, int64_t threads, Run run) {
#pragma omp parallel num_threads(std::max<int64_t>(1, std::min(count, threads)))
  {
    const int64_t i = omp_get_thread_num(), n = omp_get_num_threads();
    run(count * i / n, count * (i + 1) / n);
  }
}

// The tiles of one batch element: its real queries [from, to), in `tiles` tiles from tile `first` on.
struct Plan {
  int64_t from, to, first, tiles;
};

Plan plan_of(const Windows& c, int64_t b) {
  Plan p;
  p.from = std::min(c.queries, std::max<int64_t>(0, c.starts[b] - c.offset));
  p.to = std::max(p.from, std::min(c.queries, c.stops[b] - c.offset));
  p.first = c.place(b, p.from) / kShared;
  p.tiles = p.to > p.from ? c.place(b, p.to - 1) / kShared - p.first + 1 : 0;
  return p;
}

// Calls `run(first position, queries)` for tile number `tile`.
template <class Run>
void with_tile(const Windows& c, const Plan& p, int64_t b, int64_t tile, Run run) {
  const int64_t start = (p.first + tile) * kShared, low = std::max(start, c.place(b, p.from));
  run(low, std::min(start + kShared, c.place(b, p.to)) - low);
}

void clear_padding(const Windows& c, const Plan& p, int64_t b) {
  for (int64_t h = 0; h < c.heads; ++h)
    for (int64_t i = 0; i < c.queries; ++i)
      if (i < p.from || i >= p.to) {
        const int64_t at = (b * c.heads + h) * c.queries + i;
        std::fill(c.out + at * c.value_dim, c.out + (at + 1) * c.value_dim, 0.0f);
        if (c.lse) c.lse[at] = kInf;
      }
}

template <typename T>
void forward_windows(const Windows& c) {
  std::vector<Plan> plans;
  std::vector<int64_t> first_task = {0};
  for (int64_t b = 0; b < c.batch; ++b) {
    plans.push_back(plan_of(c, b));
    first_task.push_back(first_task.back() + c.heads * plans[b].tiles);
    clear_padding(c, plans[b], b);
  }
  in_parallel(first_task.back(), c.threads, [&](int64_t begin, int64_t end) {
    WindowTile<T> tile(c);
    int64_t b = 0;
    for (int64_t task = begin; task < end; ++task) {
      while (task >= first_task[b + 1]) ++b;
      const int64_t place = task - first_task[b], h = place / plans[b].tiles;
      with_tile(c, plans[b], b, place % plans[b].tiles, [&](int64_t first, int64_t count) { tile.run(b, h, first, count); });
    }
  });
}

}  // namespace

extern "C" void hyper_windows_forward(const Windows* call) {
  if (call->kind == kFloat) forward_windows<float>(*call);
  else if (call->kind == kBfloat) forward_windows<Bfloat>(*call);
  else forward_windows<Half>(*call);
}

// Every task owns the gradients of one key head, so nothing is added twice at once and the order is always the same.
extern "C" void hyper_windows_backward(const Windows* call, const WindowGradients* gradients) {
  const Windows& c = *call;
  in_parallel(c.batch * c.kv_heads, c.threads, [&](int64_t begin, int64_t end) {
    WindowBackward backward(c, *gradients);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t b = task / c.kv_heads;
      const Plan p = plan_of(c, b);
      for (int64_t tile = 0; tile < p.tiles; ++tile)
        for (int64_t h = task % c.kv_heads * c.group(); h < (task % c.kv_heads + 1) * c.group(); ++h)
          with_tile(c, p, b, tile, [&](int64_t first, int64_t count) { backward.run(b, h, first, count); });
    }
  });
}

// Means over windows: `levels` tables [B, H, blocks, dim] from tokens [B, H, M, dim]. A mean without tokens is 0.
extern "C" void hyper_windows_pool(const float* tokens, const int64_t* steps, int64_t batch, int64_t heads, int64_t dim,
                         const int64_t* starts, const int64_t* stops, int64_t levels, const int64_t* widths,
                         float* const* tables, const int64_t* blocks, int64_t threads) {
  in_parallel(batch * heads, threads, [&](int64_t begin, int64_t end) {
    std::vector<float> sums;
    for (int64_t z = begin; z < end; ++z) {
      const int64_t row = z / heads, count = stops[row] - starts[row];
      const float* below = tokens + row * steps[0] + z % heads * steps[1] + starts[row] * steps[2];
      int64_t below_step = steps[2], below_count = count;
      for (int64_t l = 1; l <= levels; ++l) {  // sums of sums; divided at the end
        const int64_t children = widths[l] / widths[l - 1];
        float* table = tables[l] + z * blocks[l] * dim;
        std::fill(table, table + blocks[l] * dim, 0.0f);
        for (int64_t i = 0; i < below_count; ++i) {
          float* to = table + i / children * dim;
          const float* from = below + i * below_step;
          for (int64_t e = 0; e < dim; ++e) to[e] += from[e];
        }
        below = table, below_step = dim, below_count = (below_count + children - 1) / children;
      }
      for (int64_t l = 1; l <= levels; ++l)
        for (int64_t i = 0; i * widths[l] < count; ++i) {
          float* mean = tables[l] + (z * blocks[l] + i) * dim;
          const float inverse = 1.0f / static_cast<float>(std::min(widths[l], count - i * widths[l]));
          for (int64_t e = 0; e < dim; ++e) mean[e] *= inverse;
        }
    }
  });
}
