// Arithmetic that the CPU kernels share.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

// As many floats as a register holds, at any address.
#ifdef __AVX512BW__
constexpr int kWide = 16;
#else
constexpr int kWide = 8;
#endif
typedef float Wide __attribute__((vector_size(kWide * sizeof(float))));
typedef int32_t Words __attribute__((vector_size(kWide * sizeof(int32_t))));
typedef float WideAnywhere __attribute__((vector_size(kWide * sizeof(float)), aligned(4)));

inline Wide wide(const float* x) { return *reinterpret_cast<const WideAnywhere*>(x); }
inline WideAnywhere& wide(float* x) { return *reinterpret_cast<WideAnywhere*>(x); }
inline Wide all(float x) { return x - Wide{}; }

// x in a register: a compiler may read it from memory for each of its uses, and then loads are what a loop waits for.
inline Wide held(Wide x) {
#ifdef __AVX__
  asm("" : "+v"(x));
#endif
  return x;
}

typedef float Four __attribute__((vector_size(4 * sizeof(float)), aligned(4)));

inline Four& four(float* x) { return *reinterpret_cast<Four*>(x); }

// What `join` makes of the lanes of each of four vectors, all in one order.
template <typename Join>
inline Four across(const Wide& a, const Wide& b, const Wide& c, const Wide& d, Join join) {
#if defined(__AVX512BW__)
  const __m512 ab = join(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const __m512 cd = join(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512 four = join(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(four), 1));
  const __m256 two = join(_mm512_castps512_ps256(four), high);
  return join(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
#elif defined(__AVX__)
  const __m256 ab = join(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const __m256 cd = join(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256 two = join(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
  return join(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
#else
  Four whole = {a[0], b[0], c[0], d[0]};
  for (int i = 1; i < kWide; ++i) whole = join(whole, Four{a[i], b[i], c[i], d[i]});
  return whole;
#endif
}

inline Four sums_of(const Wide& a, const Wide& b, const Wide& c, const Wide& d) {
  return across(a, b, c, d, [](const auto& x, const auto& y) { return x + y; });
}

inline float sum_of(const Wide& x) { return sums_of(x, x, x, x)[0]; }

// a * b + c, rounded once: left to the compiler, that would differ from loop to loop.
inline Wide multiply_add(const Wide& a, const Wide& b, Wide c) {
#if defined(__AVX512BW__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < kWide; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}

// Room for floats where no vector of them lies on two cache lines. Threads keep theirs from call to call.
struct alignas(64) Line {
  float floats[16];
};

inline float* room_for(int64_t count, std::vector<Line>& lines) {
  if (int64_t(lines.size()) * 16 < count) lines.resize((count + 15) / 16);
  return lines.data()->floats;
}

// exp for x <= 0, relative to it about 1e-7 (1 + |x|); what is below -87 counts as that. For numbers and vectors, Int being
// as wide as Float. 2^r on [-1/2, 1/2] is a polynomial with the least relative error, 9e-8, that is exact at 0.
template <typename Float, typename Int>
inline Float exponential(const Float& x) {
  const Float lowest = Float{} - 87.0f, log2_e = Float{} + 1.44269504088896341f;
  const Float clamped = lowest > x ? lowest : x;
  // The sum's last bits are x / log 2, rounded; moved to the exponent's place they give the power of two.
  const Float rounding = Float{} + 12582912.0f;
  const Float shifted = clamped * log2_e + rounding;
  const Float r = clamped * log2_e - (shifted - rounding);
  Float p = Float{} + 1.3264726e-3f;
  p = p * r + 9.671513e-3f;
  p = p * r + 5.5507336e-2f;
  p = p * r + 2.4022242e-1f;
  p = p * r + 6.93147e-1f;
  p = p * r + 1.0f;
  Int bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << 23) + 0x3f800000;
  Float power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

inline float exp_negative(float x) { return exponential<float, int32_t>(x); }
inline Wide exp_negative(const Wide& x) { return exponential<Wide, Words>(x); }

// log for finite x > 0 (Cephes' polynomial, about 1e-7 relative).
inline float log_positive(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  int32_t exponent = (bits >> 23) - 126;
  bits = (bits & 0x007fffff) | 0x3f000000;
  float m;
  std::memcpy(&m, &bits, 4);
  const bool small = m < 0.707106781186547524f;
  const float e = float(exponent - small);
  m = small ? m + m - 1.0f : m - 1.0f;
  const float z = m * m;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  return m + (p * m * z - 2.12194440e-4f * e - 0.5f * z) + 0.693359375f * e;
}

inline float half_to_float(uint16_t h) {
#ifdef __F16C__
  return _cvtsh_ss(h);
#else
  uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023;
  uint32_t bits;
  if (exponent == 0) {
    float value = float(mantissa) * 5.9604644775390625e-8f;  // subnormal: units of 2^-24
    return sign ? -value : value;
  }
  bits = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (mantissa << 13);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
#endif
}

inline float bfloat_to_float(uint16_t b) {
  uint32_t bits = uint32_t(b) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float dot(const float* a, const float* b, int64_t n) {
  Wide sums = {};
  int64_t i = 0;
  for (; i + kWide <= n; i += kWide) sums = multiply_add(wide(a + i), wide(b + i), sums);
  float sum = sum_of(sums);
  for (; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// Asks for memory that is read soon: what is scattered is not foreseen by the processor.
inline void prefetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(from) + at, 0, 2);
}

inline float max_of(const float* x, int64_t n) {
  float best = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

inline float log_sum_exp(const float* x, int64_t n) {
  const float best = max_of(x, n);
  if (best == -std::numeric_limits<float>::infinity()) return best;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exp_negative(x[i] - best);
  return best + std::log(sum);
}
