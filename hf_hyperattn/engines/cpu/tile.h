// What the engine hands to a score: one tile of pairs. The engine (core.cpp) and the scores (score.h) are libraries of
// their own, so that a new score compiles in seconds; this is all that they share.
#pragma once

#include "vectors.h"

namespace hyper {

// Dropout is drawn from a number per pair, so that neither tiles nor threads matter.
struct Dropout {
  uint32_t below = 0;  // of 2^32: pairs whose number is below are dropped
  float factor = 1.0f;  // for the others
  uint32_t seed = 0;  // of this batch element and head

  // Factors for keys from `column` on of one query.
  Vec of(int64_t row, int64_t column) const {
    Words x = reinterpret_cast<Words>(lane_numbers()) + static_cast<uint32_t>(column);
    x = mixed(x * 0x9e3779b9u + mixed_number(seed ^ mixed_number(static_cast<uint32_t>(row) + 0x7f4a7c15u)));
    return x < (Words{} + below) ? Vec{} : splat(factor);
  }
  static Words mixed(Words x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
  }
  static uint32_t mixed_number(uint32_t x) { return mixed(Words{} + x)[0]; }
};

constexpr int kMostNumbers = 24;  // statistics of rows, of columns, and parameters that a score may have

struct Tile {
  int64_t rows, columns;        // of the tile; `step` numbers lie from one row to the next
  int64_t step;
  int64_t first_row, first_column;  // where the tile stands
  const int32_t *first, *last;  // of each row: the visible columns [first, last) of the tile
  const float* const* row;      // statistics of the tile's rows, one array each
  const float* const* column;   // of its columns, filled up to whole panels
  const float* head;            // parameters of this head
  const float* extra;           // what is added to the logits [rows, step], -inf where hidden; or null
  float softcap;                // 0: none
  float* dot;                   // products in; logits out, in backward the gradient of the products
  float* top;                   // out: the largest logit of each row
  float* logits;                // backward: memory for a row
  // for distances from differences of the features
  const float* query;           // [rows, query_step]
  int64_t query_step;
  const float* keys;            // panels
  int64_t dim;
  const float* gap;             // decoding: squared distances from differences, [rows, step]; or null
  // backward
  const float* key_rows;        // the features of the keys, [columns, key_step]
  int64_t key_step;
  float *d_query, *d_keys;      // gradients of the features, added to; laid out as `query` and `key_rows`
  float* weight;                // in: gradient of the weights, [rows, step]; out: the weights, as dropout leaves them
  const float *largest, *inverse, *delta;  // of the rows, see Call::lse
  float* const* d_row;          // gradients of the statistics, added to
  float* const* d_column;
  // of the parameters, and for each row what these need to be exact (backward.h): the sum of its logits' gradients, and
  // for each parameter the mean of the logits' slopes; all added to
  double* d_head;
  float* residue;
  float* const* mean;
  Dropout dropout;
};

constexpr int kMostSums = 4;  // numbers beside a value that may be averaged with it

// Decoding: from numbers of vectors to what is made of them; `count` vectors, whole registers.
//
//            column                                              statistic, factor
//   read     of keys or queries: the last number, the sum of     a term's statistics, and what the vector is multiplied
//            the squares of those that points have               with to be a point
//   lift     of values: the same                                 numbers that are averaged beside the value, and what
//                                                                it is multiplied with before
//   land     of averages: the sum of the squares, the averaged   none, and what the average is multiplied with
//            numbers, the sum of the weights
struct VectorTile {
  int64_t count;
  float dim;                    // of the vectors
  const float* const* column;
  const float* head;            // parameters of this head
  float* const* statistic;      // out
  float* factor;                // out
};

typedef void (*ScorePass)(const Tile*);
typedef void (*ReadPass)(const VectorTile*);

// What a library of scores exports for one of them.
struct ScoreTable {
  int32_t rows, columns, heads;
  ScorePass forward, backward, decode;
  ReadPass read;                // null where no statistic is read from vectors
  int32_t first_read;           // the first of the statistics that it makes
  int32_t reads_norms;          // whether it needs the sum of squares
  int32_t left_out;             // numbers at a vector's end that its point has not
  ReadPass lift, land;          // null where values are averaged as they are
  int32_t sums;                 // statistics of `lift`
};

}  // namespace hyper
