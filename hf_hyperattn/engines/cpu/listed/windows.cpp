// Key-tied attention over windows on the CPU, in float32, forward and backward (arXiv 2509.15448), and the means that it
// reads. Tokens of a forward pass may be in half precision (table.h). Agrees with mechanisms/hsa/tree/key.py; mechanisms/hsa/reference.py says
// in words what is open and what is closed. Work goes tile by tile (windows.h, windows_backward.h).

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "engines/cpu/listed/windows_backward.h"

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

// The tiles of one batch row: queries [from, to) are real, and stand in `windows` bottom windows from `first` on.
struct RowPlan {
  int64_t from, to, first, tiles;
};

int64_t bottom(const Call& c) { return c.levels ? c.widths[1] : kLanes; }
int64_t tiles_per_window(const Call& c) { return (bottom(c) + kLanes - 1) / kLanes; }

RowPlan plan_of(const Call& c, int64_t row) {
  RowPlan p;
  p.from = std::min(c.queries, std::max<int64_t>(0, c.starts[row] - c.offset));
  p.to = std::max(p.from, std::min(c.queries, c.stops[row] - c.offset));
  const int64_t place = c.offset - c.starts[row], size = bottom(c);
  p.first = (p.from + place) / size;
  p.tiles = p.to > p.from ? ((p.to + place - 1) / size - p.first + 1) * tiles_per_window(c) : 0;
  return p;
}

// Calls `run(window, first position, queries)` for tile number `tile` of a row, if there are queries in it.
template <class Run>
void with_tile(const Call& c, const RowPlan& p, int64_t row, int64_t tile, Run run) {
  const int64_t groups = tiles_per_window(c), size = bottom(c), place = c.offset - c.starts[row];
  const int64_t window = p.first + tile / groups, start = window * size + tile % groups * kLanes;
  const int64_t low = std::max(start, p.from + place);
  const int64_t high = std::min({start + kLanes, (window + 1) * size, p.to + place});
  if (low < high) run(window, low, static_cast<int>(high - low));
}

void clear_padding(const Call& c, const RowPlan& p, int64_t row) {
  for (int64_t h = 0; h < c.heads; ++h)
    for (int64_t i = 0; i < c.queries; ++i)
      if (i < p.from || i >= p.to) {
        const int64_t at = (row * c.heads + h) * c.queries + i;
        std::fill(c.out + at * c.value_dim, c.out + (at + 1) * c.value_dim, 0.0f);
        c.lse[at] = kInf;
      }
}

}  // namespace

extern "C" void hyper_windows_forward(const Call* call) {
  const Call& c = *call;
  std::vector<RowPlan> plans;
  std::vector<int64_t> first_task = {0};
  for (int64_t row = 0; row < c.batch; ++row) {
    plans.push_back(plan_of(c, row));
    first_task.push_back(first_task.back() + c.heads * plans[row].tiles);
    clear_padding(c, plans[row], row);
  }
  in_parallel(first_task.back(), c.threads, [&](int64_t begin, int64_t end) {
    Buffers buffers;
    int64_t row = 0;
    for (int64_t task = begin; task < end; ++task) {
      while (task >= first_task[row + 1]) ++row;
      const int64_t place = task - first_task[row], head = place / plans[row].tiles;
      with_tile(c, plans[row], row, place % plans[row].tiles, [&](int64_t window, int64_t first, int lanes) {
        Tile(c, buffers, row, head, window, first, lanes).run();
      });
    }
  });
}

// Every task owns the gradients of one key head, so nothing is added twice at once and the order is always the same.
extern "C" void hyper_windows_backward(const Call* call, const Gradients* gradients) {
  const Call& c = *call;
  const int64_t group = c.heads / c.kv_heads;
  in_parallel(c.batch * c.kv_heads, c.threads, [&](int64_t begin, int64_t end) {
    Buffers buffers;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / c.kv_heads;
      const RowPlan p = plan_of(c, row);
      for (int64_t tile = 0; tile < p.tiles; ++tile)
        for (int64_t head = task % c.kv_heads * group; head < (task % c.kv_heads + 1) * group; ++head)
          with_tile(c, p, row, tile, [&](int64_t window, int64_t first, int lanes) {
            BackwardTile(c, *gradients, buffers, row, head, window, first, lanes).run();
          });
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
