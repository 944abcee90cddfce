// Key-tied attention over windows on the CPU, float32, forward (math.md A4), and the means that it reads. Agrees with
// windows.py; cover.py says in words what is open and what is closed. A task is one tile (key_tile.h).

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "key_tile.h"

namespace {

// Tiles of one batch row: queries [from, to) are real.
struct RowPlan {
  int64_t from, to, window, tiles;
};

}  // namespace

extern "C" void hsa_key_forward(const Call* call) {
  const Call& c = *call;
  const int64_t size = c.levels ? c.widths[1] : kLanes, groups = (size + kLanes - 1) / kLanes;
  std::vector<RowPlan> plans;
  std::vector<int64_t> first_task = {0};
  for (int64_t row = 0; row < c.batch; ++row) {
    RowPlan p;
    p.from = std::min(c.queries, std::max<int64_t>(0, c.starts[row] - c.offset));
    p.to = std::max(p.from, std::min(c.queries, c.stops[row] - c.offset));
    const int64_t position = p.from + c.offset - c.starts[row], end = p.to + c.offset - c.starts[row];
    p.window = position / size;
    p.tiles = p.to > p.from ? ((end - 1) / size - p.window + 1) * groups : 0;
    plans.push_back(p);
    first_task.push_back(first_task.back() + c.heads * p.tiles);
    for (int64_t h = 0; h < c.heads; ++h)  // padding
      for (int64_t i = 0; i < c.queries; ++i)
        if (i < p.from || i >= p.to) {
          const int64_t at = (row * c.heads + h) * c.queries + i;
          std::fill(c.out + at * c.value_dim, c.out + (at + 1) * c.value_dim, 0.0f);
          c.lse[at] = kInf;
        }
  }
  at::parallel_for(0, first_task.back(), 1, [&](int64_t begin, int64_t end) {
    Buffers buffers;
    int64_t row = 0;
    for (int64_t task = begin; task < end; ++task) {
      while (task >= first_task[row + 1]) ++row;
      const RowPlan& p = plans[row];
      const int64_t head = (task - first_task[row]) / p.tiles, tile = (task - first_task[row]) % p.tiles;
      const int64_t window = p.window + tile / groups, place = c.offset - c.starts[row];
      int64_t low = window * size + tile % groups * kLanes;
      const int64_t high = std::min({low + kLanes, (window + 1) * size, p.to + place});
      low = std::max(low, p.from + place);
      if (low < high) Tile(c, buffers, row, head, window, low, static_cast<int>(high - low)).run();
    }
  });
}

// Means over windows: `levels` tables [B, H, blocks, dim] from tokens [B, H, M, dim]. A mean without tokens is 0.
extern "C" void hsa_pool(const float* tokens, const int64_t* steps, int64_t batch, int64_t heads, int64_t dim,
                         const int64_t* starts, const int64_t* stops, int64_t levels, const int64_t* widths,
                         float* const* tables, const int64_t* blocks) {
  at::parallel_for(0, batch * heads, 1, [&](int64_t begin, int64_t end) {
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
