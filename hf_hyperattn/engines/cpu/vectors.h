// One register of floats as a vector of the compiler's own, and the functions that scores need. There are no
// instructions of any one CPU here: the compiler turns a Vec into what the CPU has, which AVX-512, AVX, SSE and NEON
// differ in only by its width.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#if defined(__AVX__) && !defined(HYPER_PLAIN)
#include <immintrin.h>
#endif

namespace hyper {

// kLanes floats to a register, kWide registers side by side and kRows rows make the sums that products keep at once.
#if defined(__AVX512F__) && !defined(HYPER_PLAIN)
constexpr int kLanes = 16, kWide = 4, kRows = 6;
#elif defined(__AVX__) && !defined(HYPER_PLAIN)
constexpr int kLanes = 8, kWide = 2, kRows = 6;
#elif defined(__aarch64__)
constexpr int kLanes = 4, kWide = 4, kRows = 6;
#else
constexpr int kLanes = 4, kWide = 2, kRows = 4;
#endif
constexpr int kPanel = kLanes * kWide;

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float LooseVec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef int32_t LooseInts __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef uint32_t LooseWords __attribute__((vector_size(4 * kLanes), aligned(2), may_alias));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
constexpr float kInf = std::numeric_limits<float>::infinity();

// The next multiple of `to`, by default of whole registers.
inline int64_t padded(int64_t n, int64_t to = kLanes) { return (n + to - 1) / to * to; }

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
inline Ints load(const int32_t* p) { return *reinterpret_cast<const LooseInts*>(p); }
inline void store(int32_t* p, Ints v) { *reinterpret_cast<LooseInts*>(p) = v; }
inline Vec splat(float x) { return Vec{} + x; }
// Where one of the two is NaN, the first is taken: what may be NaN stands there, and the limit that it is cut at second.
inline Vec larger(Vec a, Vec b) { return b > a ? b : a; }
inline Vec smaller(Vec a, Vec b) { return b < a ? b : a; }
inline Vec magnitude(Vec a) { return larger(a, -a); }
inline Vec as_floats(Ints x) { return reinterpret_cast<Vec>(x); }
inline Ints as_bits(Vec x) { return reinterpret_cast<Ints>(x); }
inline Vec rounded(Ints x) { return __builtin_convertvector(x, Vec); }
inline Ints truncated(Vec x) { return __builtin_convertvector(x, Ints); }

inline Ints lane_numbers() {
  Ints found;
  for (int i = 0; i < kLanes; ++i) found[i] = i;
  return found;
}

inline float sum_of(Vec v) {
#if defined(__AVX512F__) && !defined(HYPER_PLAIN)
  return _mm512_reduce_add_ps(v);
#else
  float s = 0;
  for (int i = 0; i < kLanes; ++i) s += v[i];
  return s;
#endif
}

// Of numbers that are no NaN.
inline float largest_of(Vec v) {
#if defined(__AVX512F__) && !defined(HYPER_PLAIN)
  return _mm512_reduce_max_ps(v);
#else
  float s = v[0];
  for (int i = 1; i < kLanes; ++i) s = v[i] > s ? v[i] : s;
  return s;
#endif
}

// The lanes from column j on that are not in [first, last).
inline Ints outside(int32_t j, int32_t first, int32_t last) {
  const Ints at = lane_numbers() + j;
  return (at < first) | (at >= last);
}

// A bit for each lane of a comparison.
inline uint32_t bits_of(Ints mask) {
#if defined(__AVX512F__) && !defined(HYPER_PLAIN)
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask));
#elif defined(__AVX__) && !defined(HYPER_PLAIN)
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask));
#else
  uint32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= (mask[i] ? 1u : 0u) << i;
  return found;
#endif
}

inline bool any(Ints mask) { return bits_of(mask) != 0; }

// Writes the numbers at which the mask is set, side by side, and returns where the next one goes: a whole register may be
// written from `to` on.
inline int32_t* keep(Ints numbers, Ints mask, int32_t* to) {
  uint32_t set = bits_of(mask);
#if defined(__AVX512F__) && !defined(HYPER_PLAIN)
  store(to, reinterpret_cast<Ints>(_mm512_maskz_compress_epi32(set, reinterpret_cast<__m512i>(numbers))));
  return to + __builtin_popcount(set);
#else
  for (; set; set &= set - 1) *to++ = numbers[__builtin_ctz(set)];
  return to;
#endif
}

inline Vec root(Vec x) {
#if defined(__AVX512F__) && !defined(HYPER_PLAIN)
  return _mm512_sqrt_ps(x);
#elif defined(__AVX__) && !defined(HYPER_PLAIN)
  return _mm256_sqrt_ps(x);
#else
  Vec found;
  for (int i = 0; i < kLanes; ++i) found[i] = std::sqrt(x[i]);
  return found;
#endif
}

// x as a whole, whatever sum it is part of: -ffast-math may join constants that are apart for accuracy.
inline Vec as_it_is(Vec x) {
#if defined(__x86_64__) && (defined(__AVX512F__) || !defined(__clang__))
  asm("" : "+v"(x));
#elif defined(__x86_64__)
  asm("" : "+x"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#else
  asm("" : "+m"(x));
#endif
  return x;
}

// a · b + sum, rounded once where the CPU can, in sums whose order -ffast-math is to leave alone: it would add up lanes.
inline float in_turn(float a, float b, float sum) {
#ifdef __FP_FAST_FMAF
  return std::fma(a, b, sum);
#else
  return as_it_is(splat(a * b))[0] + sum;
#endif
}

// a / b, where -ffast-math makes a · (1 / b) of a division: exact where one number of bfloat16 is averaged alone.
inline float quotient(float a, float b, float inverse) {
  const float near = a * inverse;
  return std::abs(near) < kInf ? in_turn(-in_turn(near, b, -a), inverse, near) : near;
}

// e^x, relative error about 1e-7; 0 below the smallest normal number. `Negative` says that no x is above 0; otherwise
// x is cut at 88. NaN stays NaN.
template <bool Negative = false>
inline Vec exponential(Vec x) {
  const Vec low = splat(-87.3f);
#if defined(__AVX512F__) && !defined(HYPER_PLAIN)
  if constexpr (Negative) {  // 2^(n + r), r from -1/2 to 1/2, exactly 1 at 0
    const Vec base = splat(1.44269504f), n = _mm512_roundscale_ps(x * base, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Vec r = _mm512_fmadd_ps(x, splat(1.92596299e-8f), _mm512_fmsub_ps(x, base, n));
    Vec p = splat(1.3264727e-3f);
    p = p * r + 9.671513e-3f;
    p = p * r + 5.55073358e-2f;
    p = p * r + 2.40222424e-1f;
    p = p * r + 6.93147004e-1f;
    p = p * r + 1.0f;
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), p, n);
  }
#endif
  Vec y = larger(x, low), half = splat(-0.5f);
  if (!Negative) {
    y = smaller(y, splat(88.0f));
    half = y < Vec{} ? half : -half;
  }
  const Ints bits = truncated(y * 1.44269504f + half);  // to the nearest integer
  const Vec n = rounded(bits);
  Vec r = as_it_is(y - n * 0.693359375f);
  r = r + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return x < low ? Vec{} : as_floats(as_bits(p) + (bits << 23));
}

// log(1 + y) for y >= 0, relative error about 2e-7 however small y is. What is no number stays as it is.
inline Vec log_of_one_plus(Vec y) {
  const Vec u = y + 1.0f;
  // the power of 2 that leaves a number from sqrt(1/2) to sqrt(2)
  const Ints power = (as_bits(u) - 0x3f3504f3) >> 23;
  const Vec m = as_floats(as_bits(u) - (power << 23));
  const Vec f = power == 0 ? y : m - 1.0f;
  Vec p = splat(7.0376836292e-2f);
  p = p * f - 1.1514610310e-1f;
  p = p * f + 1.1676998740e-1f;
  p = p * f - 1.2420140846e-1f;
  p = p * f + 1.4249322787e-1f;
  p = p * f - 1.6668057665e-1f;
  p = p * f + 2.0000714765e-1f;
  p = p * f - 2.4999993993e-1f;
  p = p * f + 3.3333331174e-1f;
  const Vec square = f * f, n = rounded(power);
  const Vec found = n * 0.693359375f + (f + (p * f * square - 0.5f * square - n * 2.12194440e-4f));
  return y < splat(kInf) ? found : y;
}

// sinh x, |x| <= 80, relative error about 2e-7.
inline Vec hyperbolic_sine(Vec x) {
  const Vec square = x * x;
  Vec p = splat(2.81145725434e-8f);
  p = p * square + 2.75573192e-6f;
  p = p * square + 1.98412698e-4f;
  p = p * square + 8.33333333e-3f;
  p = p * square + 1.66666667e-1f;
  const Vec near = x + x * square * p;
  const Ints large = magnitude(x) >= splat(1.0f);
  if (!any(large)) return near;
  const Vec e = exponential(magnitude(x)), far = 0.5f * e - 0.5f / e;
  return large ? (x < Vec{} ? -far : far) : near;
}

inline Vec hyperbolic_tangent(Vec x) {
  const Vec square = x * x;
  Vec p = splat(-5.70498872745e-3f);
  p = p * square + 2.06390887954e-2f;
  p = p * square - 5.37397155531e-2f;
  p = p * square + 1.33314422036e-1f;
  p = p * square - 3.33332819422e-1f;
  const Vec near = x + x * square * p;
  const Vec far = 1.0f - 2.0f / (exponential(2.0f * magnitude(x)) + 1.0f);
  return magnitude(x) < splat(0.625f) ? near : (x < Vec{} ? -far : far);
}

// A number of either dtype as a float and back, and whole registers of them.
struct [[gnu::may_alias]] Bfloat {
  uint16_t bits;
};
inline float number(float x) { return x; }
inline float number(Bfloat x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float found;
  std::memcpy(&found, &bits, 4);
  return found;
}
inline Vec load_numbers(const float* p) { return load(p); }
inline Vec load_numbers(const Bfloat* p) {
  const Halves half = *reinterpret_cast<const Halves*>(p);
  return reinterpret_cast<Vec>(__builtin_convertvector(half, Words) << 16);
}
// The same of IEEE half precision, without the instructions for it, which not every CPU has.
struct [[gnu::may_alias]] Half {
  uint16_t bits;
};
inline Vec load_numbers(const Half* p) {
  const Words bits = __builtin_convertvector(*reinterpret_cast<const Halves*>(p), Words);
  const Words size = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16, exponent = size & 0x0f800000u;
  // exponents move by 112; of infinity and NaN to the largest, and numbers below 2^-14 get the digit that others imply
  const Words whole = size + (112u << 23), endless = size + (224u << 23);
  const Vec small = reinterpret_cast<Vec>(size + (113u << 23)) - 6.103515625e-05f;
  const Words found = exponent == 0 ? reinterpret_cast<Words>(small) : exponent == 0x0f800000u ? endless : whole;
  return reinterpret_cast<Vec>(found | sign);
}
inline float number(Half x) {
  Half all[kLanes] = {x};
  return load_numbers(all)[0];
}
// Register e / kLanes of a row, for sums in which order does not matter: of bfloat16 every second one of kTogether numbers,
// then the others, each by one operation where widening in order takes two.
template <typename T>
constexpr int kTogether = 4 * kLanes / sizeof(T);
inline Vec load_split(const float* row, int64_t e) { return load(row + e); }
inline Vec load_split(const Bfloat* row, int64_t e) {
  const Words both = *reinterpret_cast<const LooseWords*>(row + e / (2 * kLanes) * (2 * kLanes));
  return reinterpret_cast<Vec>(e % (2 * kLanes) ? both & 0xffff0000u : both << 16);
}
inline void put(float* p, float x) { *p = x; }
inline void put(Bfloat* p, float x) {  // to the nearest, ties to even; NaN stays one
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffff) > 0x7f800000;
  p->bits = static_cast<uint16_t>(nan ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace hyper
