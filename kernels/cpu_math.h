// Arithmetic that the CPU kernels share.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#ifdef __AVX2__
#include <immintrin.h>
#endif

// Eight floats at any address.
typedef float Eight __attribute__((vector_size(32), aligned(4)));

inline const Eight& eight(const float* x) { return *reinterpret_cast<const Eight*>(x); }
inline Eight& eight(float* x) { return *reinterpret_cast<Eight*>(x); }

inline float sum_of(const Eight& x) {
  const auto four = __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
  const auto two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return two[0] + two[1];
}

// a * b + c, rounded once: left to the compiler, that would differ from loop to loop.
inline Eight multiply_add(const Eight& a, const Eight& b, Eight c) {
#ifdef __FMA__
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < 8; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}

// exp for x <= 0 (Cephes' reduction and polynomial, about 1e-7 relative); below -87 it is nothing.
inline float exp_negative(float x) {
  float clamped = x < -87.0f ? -87.0f : x;
  float n = std::floor(clamped * 1.44269504088896341f + 0.5f);
  float r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t bits = (int32_t(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, 4);
  return x < -87.0f ? 0.0f : p * power;
}

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
  Eight sums = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) sums = multiply_add(eight(a + i), eight(b + i), sums);
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
