// Arithmetic that the CPU kernels share.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __FMA__
#include <immintrin.h>
#endif

// Eight floats at any address.
typedef float Eight __attribute__((vector_size(32), aligned(4)));

inline const Eight& eight(const float* x) { return *reinterpret_cast<const Eight*>(x); }
inline Eight& eight(float* x) { return *reinterpret_cast<Eight*>(x); }

inline float sum_of(const Eight& x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

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
