// A block's inner loops, unrolled over a head's N eights; N = 0 takes any head_dim.

#pragma once

#include <cstdint>

#include "cpu_math.h"

// logits[g * stride + t] = q[g]·keys[t]
template <int N>
void score_tokens(const float* q, const float* keys, int64_t tokens, int64_t group, int64_t, float* logits,
                  int64_t stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    Eight key[N];
    for (int i = 0; i < N; ++i) key[i] = eight(keys + (t * N + i) * 8);
    for (int64_t g = 0; g < group; ++g) {
      Eight sum = key[0] * eight(q + g * N * 8);
      for (int i = 1; i < N; ++i) sum = multiply_add(key[i], eight(q + (g * N + i) * 8), sum);
      logits[g * stride + t] = sum_of(sum);
    }
  }
}

// out[g] += sum of weights[g * stride + t] * values[t]
template <int N>
void add_values(const float* weights, int64_t stride, const float* values, int64_t tokens, int64_t group, int64_t,
                float* out) {
  for (int64_t g = 0; g < group; ++g) {
    Eight sum[N];
    for (int i = 0; i < N; ++i) sum[i] = eight(out + (g * N + i) * 8);
    for (int64_t t = 0; t < tokens; ++t)
      for (int i = 0; i < N; ++i) sum[i] += weights[g * stride + t] * eight(values + (t * N + i) * 8);
    for (int i = 0; i < N; ++i) eight(out + (g * N + i) * 8) = sum[i];
  }
}

template <>
inline void score_tokens<0>(const float* q, const float* keys, int64_t tokens, int64_t group, int64_t dim,
                            float* logits, int64_t stride) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t g = 0; g < group; ++g) logits[g * stride + t] = dot(q + g * dim, keys + t * dim, dim);
}

template <>
inline void add_values<0>(const float* weights, int64_t stride, const float* values, int64_t tokens, int64_t group,
                          int64_t dim, float* out) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t g = 0; g < group; ++g) {
      const float weight = weights[g * stride + t];
      float* sum = out + g * dim;
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) sum[d] += weight * values[t * dim + d];
    }
}

struct BlockLoops {
  decltype(&score_tokens<0>) score_tokens;
  decltype(&add_values<0>) add_values;
};

template <int N>
constexpr BlockLoops kLoops = {score_tokens<N>, add_values<N>};

inline BlockLoops loops_for(int64_t head_dim) {
  switch (head_dim) {
    case 64: return kLoops<8>;
    case 80: return kLoops<10>;
    case 96: return kLoops<12>;
    case 128: return kLoops<16>;
    case 256: return kLoops<32>;
  }
  return kLoops<0>;
}
