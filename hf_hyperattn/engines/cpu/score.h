// A score of one or more pieces on a tile: logits in the forward pass, gradients in the backward pass.
//
// A piece's arithmetic is a functor that is written from its Python term (engines/emit_cpp.py): a type with
//   rows, columns, heads       how many statistics and parameters it reads, in the order of its Python term
//   State open(pair)           its logit (State::logit) and what its derivative needs, for one register of pairs
//   Slopes pull(pair, state, grad)   from the gradient of the logit to those of the product and the statistics; for the
//                              parameters the slopes of the logit itself, which the engine weighs in two ways.
//   Ints inexact(state)        optional: where the product is too inexact. The forward pass then computes rows that hold
//                              such a pair again, with Pair::exact set, and others without asking each pair.
//                              Where a distance was taken from differences, so are the gradients of the features, which
//                              `pull` adds itself (add_differences): those by the product and by the norms cancel
#pragma once

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <tuple>
#include <utility>

#include "tile.h"

namespace hyper {

// As torch's maximum and minimum: NaN where either is.
inline Vec larger_or_nan(Vec a, Vec b) { return b == b ? larger(a, b) : b; }
inline Vec smaller_or_nan(Vec a, Vec b) { return b == b ? smaller(a, b) : b; }

// log x, relative error about 1e-7; -inf at 0.
inline Vec logarithm(Vec x) {
  const Ints power = (as_bits(x) - 0x3f3504f3) >> 23;  // leaves a number from sqrt(1/2) to sqrt(2)
  const Vec near = log_of_one_plus(as_floats(as_bits(x) - (power << 23)) - 1.0f);
  const Vec log = rounded(power) * 0.693359375f + (near - rounded(power) * 2.12194440e-4f);
  return x > Vec{} ? (x < splat(kInf) ? log : x) : (x == Vec{} ? splat(-kInf) : splat(std::nanf("")));
}

// e^x - 1, relative error about 2e-7 however small x is.
inline Vec exponential_less_one(Vec x) {
  const Vec tanh = hyperbolic_tangent(0.5f * x);
  return magnitude(x) < splat(1.0f) ? 2.0f * tanh / (1.0f - tanh) : exponential(x) - 1.0f;
}

inline Vec hyperbolic_cosine(Vec x) {
  const Vec e = exponential(magnitude(x));
  return 0.5f * e + 0.5f / e;
}

// cosh x of sinh x.
inline Vec cosine_of_sine(Vec sine) {
  const Vec size = magnitude(sine), kept = smaller(size, splat(1e9f));
  return size > splat(1e9f) ? size : root(1.0f + kept * kept);
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

// What a functor sees: one query against kLanes keys.
struct Pair {
  Vec dot;
  const float* row;     // the query's statistics
  const Vec* column;
  const float* head;
  const Vec* gap = nullptr;  // the squared distance from differences, where that is known already
  // where the features stand, for `exact_squared_distance`
  const float* query = nullptr;
  const float* keys = nullptr;
  int64_t dim = 0;
  // where the pairs stand, for `add_differences`
  const Tile* tile = nullptr;
  int64_t at_row = 0, at_column = 0;
  bool exact = true;  // whether the functor is to take what the product form cancels in from differences at once
};

// |query_factor · q - key_factor · k|² over the first `width` features; 0 for points that coincide but for rounding.
inline Vec exact_squared_distance(const Pair& p, Vec query_factor, Vec key_factor, int64_t width) {
  Vec sum = {}, size = {};
  for (int64_t e = 0; e < width; ++e) {
    const Vec x = p.query[e] * query_factor, apart = x - load(p.keys + e * kPanel) * key_factor;
    sum += apart * apart, size += x * x;
  }
  constexpr float kBlur = 4.0f * 1.1920929e-07f;
  return sum <= kBlur * kBlur * size ? Vec{} : sum;
}

struct FactorGradients {
  Vec query = {}, key = {};
};

// From the gradient of that distance, 0 where it was not taken: adds those of the features, and returns the slopes of
// the distance by the factors.
[[gnu::noinline, gnu::cold]] inline FactorGradients add_differences(Pair p, Vec query_factor, Vec key_factor,
                                                                    int64_t width, Vec grad) {
  FactorGradients to;
  for (int i = 0; i < kLanes; ++i) {
    if (grad[i] == 0) continue;
    const int64_t start = (p.at_column + i) * p.tile->key_step;
    const float q = query_factor[i], k = key_factor[i], twice = 2.0f * grad[i], *key = p.tile->key_rows + start;
    float *d_q = p.tile->d_query + p.at_row * p.tile->query_step, *d_k = p.tile->d_keys + start;
    float by_query = 0, by_key = 0;
    for (int64_t e = 0; e < width; ++e) {
      const float apart = q * p.query[e] - k * key[e];
      by_query += apart * p.query[e], by_key += apart * key[e];
      d_q[e] += twice * q * apart, d_k[e] -= twice * k * apart;
    }
    to.query[i] = 2.0f * by_query, to.key[i] = -2.0f * by_key;
  }
  return to;
}

// Gradients, but for `head`: those of the parameters are that times the gradient of the logit.
template <int R, int C, int H>
struct Slopes {
  static constexpr int heads = H;
  Vec dot = {};
  Vec row[R + 1] = {}, column[C + 1] = {}, head[H + 1] = {};

  // Leaves out lanes that are no pairs: what stands there may have infinite slopes.
  void leave_out(Ints lanes) {
    dot = lanes ? Vec{} : dot;
    for (int i = 0; i < R; ++i) row[i] = lanes ? Vec{} : row[i];
    for (int i = 0; i < C; ++i) column[i] = lanes ? Vec{} : column[i];
    for (int i = 0; i < H; ++i) head[i] = lanes ? Vec{} : head[i];
  }
};

// A term with what a score makes of it: `Gated` multiplies with one more parameter, `Capped` caps before that.
template <class Term, bool Gated, bool Capped>
struct Piece {
  using term = Term;
  static constexpr bool gated = Gated, capped = Capped;
  static constexpr int rows = Term::rows, columns = Term::columns, heads = Term::heads + Gated;
};

template <class Term>
concept Measures = requires { &Term::inexact; };

constexpr int begin(int piece, std::initializer_list<int> counts) {
  int n = 0;
  for (int i = 0; i < piece; ++i) n += counts.begin()[i];
  return n;
}

template <class... P>
struct Score {
  static constexpr int count = sizeof...(P);
  static constexpr int rows = (P::rows + ...), columns = (P::columns + ...), heads = (P::heads + ...);
  template <int I>
  using At = std::tuple_element_t<I, std::tuple<P...>>;

  // where the numbers of piece I begin
  template <int I>
  static constexpr int row0 = begin(I, {P::rows...});
  template <int I>
  static constexpr int column0 = begin(I, {P::columns...});
  template <int I>
  static constexpr int head0 = begin(I, {P::heads...});

  using States = std::tuple<typename P::term::State...>;

  static constexpr bool measures = (Measures<typename P::term> || ...);

  // The pairs for which the product is too inexact for some piece.
  template <int I = 0>
  static Ints inexact(const States& states) {
    Ints all = {};
    if constexpr (Measures<typename At<I>::term>) all = At<I>::term::inexact(std::get<I>(states));
    if constexpr (I + 1 < count) all |= inexact<I + 1>(states);
    return all;
  }

  template <int I>
  static Pair part(const Pair& p) {
    Pair q = p;
    q.row += row0<I>, q.column += column0<I>, q.head += head0<I>;
    return q;
  }

  template <int I>
  static float gate(const Pair& p) {
    if constexpr (At<I>::gated) return p.head[head0<I> + At<I>::heads - 1];
    return 1.0f;
  }

  template <int I>
  static void add_logit(const Pair& p, States& states, float cap, Vec& logit) {
    using Piece = At<I>;
    auto& state = std::get<I>(states) = Piece::term::open(part<I>(p));
    Vec x = state.logit;
    if constexpr (Piece::capped)
      if (cap > 0) x = cap * hyperbolic_tangent(x / cap);
    logit += gate<I>(p) * x;
    if constexpr (I + 1 < count) add_logit<I + 1>(p, states, cap, logit);
  }

  static Vec logit(const Pair& p, States& states, float cap) {
    Vec sum = {};
    add_logit<0>(p, states, cap, sum);
    return sum;
  }

  template <int I>
  static void pull(const Pair& p, const States& states, float cap, Vec grad, Slopes<rows, columns, heads>& all) {
    using Piece = At<I>;
    const auto& state = std::get<I>(states);
    Vec x = state.logit, slope = splat(gate<I>(p));
    if constexpr (Piece::capped)
      if (cap > 0) {
        const Vec tanh = hyperbolic_tangent(x / cap);
        x = cap * tanh;
        slope *= 1.0f - tanh * tanh;
      }
    const auto found = Piece::term::pull(part<I>(p), state, grad * slope);
    all.dot += found.dot;
    for (int i = 0; i < Piece::rows; ++i) all.row[row0<I> + i] = found.row[i];
    for (int i = 0; i < Piece::columns; ++i) all.column[column0<I> + i] = found.column[i];
    for (int i = 0; i < Piece::term::heads; ++i) all.head[head0<I> + i] = found.head[i] * slope;
    if constexpr (Piece::gated) all.head[head0<I> + Piece::heads - 1] = x;
    if constexpr (I + 1 < count) pull<I + 1>(p, states, cap, grad, all);
  }
};

// Calls body(column, edge) for the registers that hold [first, last); `edge` says that some lanes are outside.
template <class Body>
inline void over_columns(int32_t first, int32_t last, Body body) {
  if (first >= last) return;
  int32_t j = first / kLanes * kLanes;
  if (j < first) body(j, std::true_type{}), j += kLanes;
  for (; j + kLanes <= last; j += kLanes) body(j, std::false_type{});
  if (j < last) body(j, std::true_type{});
}

// Logits with mask and bias added; a hidden pair is hidden whatever its logit is.
inline Vec with_extra(Vec x, Vec extra) { return extra == splat(-kInf) ? extra : x + extra; }

template <class S>
struct Reader {
  const Tile& t;
  int64_t r;
  float row[S::rows + 1];

  Reader(const Tile& tile, int64_t at) : t(tile), r(at) {
    for (int i = 0; i < S::rows; ++i) row[i] = t.row[i][r];
  }
  Pair pair(int64_t j, Vec (&column)[S::columns + 1], const float* head) const {
    for (int i = 0; i < S::columns; ++i) column[i] = load(t.column[i] + j);
    return {load(t.dot + r * t.step + j), row, column, head, nullptr, t.query + r * t.query_step,
            t.keys + j / kPanel * kPanel * t.dim + j % kPanel, t.dim, &t, r, j};
  }
};

// The logits of one row from its products, or with `Exact` from the vectors; returns lanes in which some product is too
// inexact.
template <class S, bool Extra, bool Gap, bool Exact>
inline Ints forward_row(const Tile& t, int64_t r) {
  const Reader<S> reader(t, r);
  Vec top = splat(-kInf);
  Ints inexact = {};
  over_columns(t.first[r], t.last[r], [&](int32_t j, auto edge) {
    Vec column[S::columns + 1];
    typename S::States states;
    Pair pair = reader.pair(j, column, t.head);
    Vec gap;
    if constexpr (Gap) gap = load(t.gap + r * t.step + j), pair.gap = &gap;
    pair.exact = Exact || !S::measures;
    if constexpr (Exact) {  // where the products were there are logits by now
      pair.dot = Vec{};
      for (int64_t e = 0; e < t.dim; ++e) pair.dot += pair.query[e] * load(pair.keys + e * kPanel);
    }
    Vec x = S::logit(pair, states, t.softcap);
    if constexpr (S::measures && !Gap && !Exact) {
      const Ints some = S::inexact(states);
      inexact |= edge ? some & ~outside(j, t.first[r], t.last[r]) : some;
    }
    if constexpr (Extra) x = with_extra(x, load(t.extra + r * t.step + j));
    if constexpr (edge) x = outside(j, t.first[r], t.last[r]) ? splat(-kInf) : x;
    top = larger(top, x);
    store(t.dot + r * t.step + j, x);
  });
  t.top[r] = largest_of(top);
  return inexact;
}

template <class S, bool Extra>
[[gnu::noinline, gnu::cold]] void exact_row(const Tile& t, int64_t r) {
  forward_row<S, Extra, false, true>(t, r);
}

// One function, that both passes call: inlined here and there, the same source gives other last digits.
template <class S, bool Extra, bool Gap>
[[gnu::noinline, gnu::noclone]] void logits_of_row(const Tile& t, int64_t r) {
  const Ints inexact = forward_row<S, Extra, Gap, false>(t, r);
  if constexpr (S::measures && !Gap)
    if (any(inexact)) [[unlikely]] exact_row<S, Extra>(t, r);
}

template <class S, bool Extra, bool Gap = false>
void forward_rows(const Tile& t) {
  for (int64_t r = 0; r < t.rows; ++r) logits_of_row<S, Extra, Gap>(t, r);
}

// From this size on of a row's largest logit the backward pass takes the very logits of the forward pass. Float32
// numbers lie 1e-6 apart there and more farther out: weights from others would not add up to 1.
constexpr float kLarge = 16.0f;

// The logits of one row in t.logits; its products stay.
template <class S, bool Extra>
[[gnu::noinline, gnu::cold]] void keep_logits(const Tile& t, int64_t r) {
  float* dot = t.dot + r * t.step;
  const int64_t first = t.first[r] / kLanes * kLanes, last = (t.last[r] + kLanes - 1) / kLanes * kLanes;
  if (first >= last) return;
  std::copy(dot + first, dot + last, t.logits + first);
  logits_of_row<S, Extra, false>(t, r);
  std::swap_ranges(dot + first, dot + last, t.logits + first);
}

template <class S, bool Extra, bool Drop>
void backward_rows(const Tile& t) {
  double sums[S::heads + 1] = {};  // over all pairs of a tile, of terms that cancel
  for (int64_t r = 0; r < t.rows; ++r) {
    const Reader<S> reader(t, r);
    Vec d_row[S::rows + 1] = {}, d_head[S::heads + 1] = {}, mean[S::heads + 1] = {}, residue = {};
    float *dot = t.dot + r * t.step, *weight = t.weight + r * t.step;
    const float largest = t.largest[r] == -kInf ? kInf : t.largest[r], inverse = t.inverse[r];
    const bool large = std::abs(largest) > kLarge;
    if (large) [[unlikely]] keep_logits<S, Extra>(t, r);
    over_columns(t.first[r], t.last[r], [&](int32_t j, auto edge) {
      Vec column[S::columns + 1];
      typename S::States states;
      const Pair pair = reader.pair(j, column, t.head);
      Vec x = S::logit(pair, states, t.softcap);
      if constexpr (Extra) x = with_extra(x, load(t.extra + r * t.step + j));
      if (large) [[unlikely]] x = load(t.logits + j);
      Vec p = exponential<true>(smaller(x - largest, Vec{})) * inverse, grad = load(weight + j);
      if constexpr (edge) p = outside(j, t.first[r], t.last[r]) ? Vec{} : p;
      Vec kept = p;
      if constexpr (Drop) {
        const Vec keep = t.dropout.of(t.first_row + r, t.first_column + j);
        grad *= keep, kept *= keep;
      }
      grad = p * (grad - t.delta[r]);
      if constexpr (edge) grad = outside(j, t.first[r], t.last[r]) ? Vec{} : grad;
      Slopes<S::rows, S::columns, S::heads> slopes;
      S::template pull<0>(pair, states, t.softcap, grad, slopes);
      if constexpr (edge) slopes.leave_out(outside(j, t.first[r], t.last[r]));
      store(weight + j, kept);
      store(dot + j, slopes.dot);
      for (int i = 0; i < S::rows; ++i) d_row[i] += slopes.row[i];
      for (int i = 0; i < S::heads; ++i) d_head[i] += grad * slopes.head[i], mean[i] += p * slopes.head[i];
      if constexpr (S::heads > 0) residue += grad;
      for (int i = 0; i < S::columns; ++i) store(t.d_column[i] + j, load(t.d_column[i] + j) + slopes.column[i]);
    });
    for (int i = 0; i < S::rows; ++i) t.d_row[i][r] += sum_of(d_row[i]);
    for (int i = 0; i < S::heads; ++i) sums[i] += sum_of(d_head[i]), t.mean[i][r] += sum_of(mean[i]);
    if constexpr (S::heads > 0) t.residue[r] += sum_of(residue);
  }
  for (int i = 0; i < S::heads; ++i) t.d_head[i] += sums[i];
}

// What a reader R (engines/emit_cpp.py) makes of vectors, one register of them after another; it has
//   inputs, statistics         how many numbers of a vector it reads and makes, at most those of VectorTile
//   reads_norms, left_out      whether it reads the second input, others are not filled then; see ScoreTable
//   read(column, dim, head, statistic) -> factor
template <class R>
void read_vectors(const VectorTile* t) {
  for (int64_t j = 0; j < t->count; j += kLanes) {
    Vec column[R::inputs], found[R::statistics + 1] = {};
    for (int i = 0; i < R::inputs; ++i) column[i] = load(t->column[i] + j);
    store(t->factor + j, R::read(column, t->dim, t->head, found));
    for (int i = 0; i < R::statistics; ++i) store(t->statistic[i] + j, found[i]);
  }
}

// Piece I's statistics are read by R from keys and queries.
template <int I, class R>
struct ReadBy {
  template <class S>
  static constexpr void fill(ScoreTable& t) {
    static_assert(S::template column0<I> == S::template row0<I>, "queries and keys have the same statistics");
    static_assert(R::statistics <= S::template At<I>::columns);
    t.read = read_vectors<R>, t.first_read = S::template column0<I>;
    t.reads_norms = R::reads_norms, t.left_out = R::left_out;
  }
};

// The same, and values are averaged as the readers Lift and Land say.
template <class Read, class Lift, class Land>
struct Averaging {
  template <class S>
  static constexpr void fill(ScoreTable& t) {
    Read::template fill<S>(t);
    static_assert(Lift::statistics <= kMostSums && Land::inputs == Lift::statistics + 2);
    t.lift = read_vectors<Lift>, t.land = read_vectors<Land>, t.sums = Lift::statistics;
  }
};

template <class S, class Read = void>
struct Passes {
  static_assert(S::rows <= kMostNumbers && S::columns <= kMostNumbers && S::heads <= kMostNumbers);
  static void forward(const Tile* t) { t->extra ? forward_rows<S, true>(*t) : forward_rows<S, false>(*t); }
  static void backward(const Tile* t) {
    const bool drop = t->dropout.below > 0;
    if (t->extra)
      drop ? backward_rows<S, true, true>(*t) : backward_rows<S, true, false>(*t);
    else
      drop ? backward_rows<S, false, true>(*t) : backward_rows<S, false, false>(*t);
  }
  static void decode(const Tile* t) {
    if (!t->gap)
      forward(t);
    else
      t->extra ? forward_rows<S, true, true>(*t) : forward_rows<S, false, true>(*t);
  }
  static constexpr ScoreTable make() {
    ScoreTable t = {};
    t.rows = S::rows, t.columns = S::columns, t.heads = S::heads;
    t.forward = forward, t.backward = backward, t.decode = decode;
    if constexpr (!std::is_void_v<Read>) Read::template fill<S>(t);
    return t;
  }
  static constexpr ScoreTable table = make();
};

}  // namespace hyper
