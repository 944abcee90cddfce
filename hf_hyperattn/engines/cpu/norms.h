// Norms of rows, or their squares, summed in double: no square overflows, and what is rounded is the sum alone.
#pragma once

#include <cmath>

#include "call.h"

namespace hyper {

struct NormCall {
  Matrix rows;
  int64_t half, batch, heads, length, width, all;  // the first `width` of `all` numbers a row count
  int64_t root, threads;
  float* norms;        // contiguous [B, H, L]
  const float* grad;   // backward: of the norms
  void* to;            // backward: of the rows, contiguous, in their dtype
};

template <typename T, class Body>
void over_rows(const NormCall& c, Body body) {
  const int64_t count = c.batch * c.heads * c.length;
#pragma omp parallel for num_threads(c.threads) schedule(static) if (count * c.all > 65536)
  for (int64_t i = 0; i < count; ++i) {
    const int64_t h = i / c.length;
    body(i, at<T>(c.rows, h / c.heads, h % c.heads, i % c.length));
  }
}

template <typename T>
void norms(const NormCall& c) {
  over_rows<T>(c, [&](int64_t i, const T* row) {
    double sum = 0;
    for (int64_t e = 0; e < c.width; ++e) {
      const double x = number(row[e]);
      sum += x * x;
    }
    c.norms[i] = static_cast<float>(c.root ? std::sqrt(sum) : sum);
  });
}

template <typename T>
void norms_backward(const NormCall& c) {
  over_rows<T>(c, [&](int64_t i, const T* row) {
    T* to = static_cast<T*>(c.to) + i * c.all;
    float factor = c.root ? c.grad[i] / c.norms[i] : 2.0f * c.grad[i];
    if (c.root && !(c.norms[i] > 0)) factor = 0;
    for (int64_t e = 0; e < c.width; ++e) put(to + e, number(row[e]) * factor);
    for (int64_t e = c.width; e < c.all; ++e) put(to + e, 0.0f);
  });
}

}  // namespace hyper
