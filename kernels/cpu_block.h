// A block's inner loops, unrolled over a head's N vectors; N = 0 takes any head_dim.

#pragma once

#include <cstdint>

#include "cpu_math.h"

// logits[h * stride + t] = q[h]·keys[t] for kHeads heads
template <int N, int kHeads>
void score_heads(const float* q, const float* keys, int64_t tokens, float* logits, int64_t stride, const float* ahead) {
  int64_t t = 0;
  for (; t + 4 <= tokens; t += 4) {
    if (ahead != nullptr) prefetch(ahead + t * N * kWide, 4 * N * sizeof(Wide));
    Wide sums[kHeads][4];
    for (int h = 0; h < kHeads; ++h)
      for (int j = 0; j < 4; ++j) sums[h][j] = Wide{};
    for (int i = 0; i < N; ++i) {
      Wide query[kHeads];
      for (int h = 0; h < kHeads; ++h) query[h] = held(wide(q + (h * N + i) * kWide));
      for (int j = 0; j < 4; ++j) {
        const Wide key = held(wide(keys + ((t + j) * N + i) * kWide));
        for (int h = 0; h < kHeads; ++h) sums[h][j] = multiply_add(key, query[h], sums[h][j]);
      }
    }
    for (int h = 0; h < kHeads; ++h)
      four(logits + h * stride + t) = sums_of(sums[h][0], sums[h][1], sums[h][2], sums[h][3]);
  }
  for (; t < tokens; ++t)
    for (int h = 0; h < kHeads; ++h) logits[h * stride + t] = dot(keys + t * N * kWide, q + h * N * kWide, N * kWide);
}

// out[h] += sum of weights[h * stride + t] * values[t] for kHeads heads
template <int N, int kHeads>
void add_heads(const float* weights, int64_t stride, const float* values, int64_t tokens, float* out,
               const float* ahead) {
  Wide sums[kHeads][N];
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < N; ++i) sums[h][i] = wide(out + (h * N + i) * kWide);
  for (int64_t t = 0; t < tokens; ++t) {
    if (ahead != nullptr) prefetch(ahead + t * N * kWide, N * sizeof(Wide));
    for (int i = 0; i < N; ++i) {
      const Wide value = held(wide(values + (t * N + i) * kWide));
      for (int h = 0; h < kHeads; ++h) sums[h][i] = multiply_add(all(weights[h * stride + t]), value, sums[h][i]);
    }
  }
  for (int h = 0; h < kHeads; ++h)
    for (int i = 0; i < N; ++i) wide(out + (h * N + i) * kWide) = sums[h][i];
}

// logits[g * stride + t] = q[g]·keys[t]. Meanwhile as much is asked for at `ahead` as is read here; null: nothing.
template <int N>
void score_tokens(const float* q, const float* keys, int64_t tokens, int64_t group, int64_t, float* logits,
                  int64_t stride, const float* ahead) {
  constexpr int kHeads = kWide / 4;  // with four sums each, what the registers hold
  int64_t g = 0;
  for (; g + kHeads <= group; g += kHeads)
    score_heads<N, kHeads>(q + g * N * kWide, keys, tokens, logits + g * stride, stride, ahead);
  if (group - g == 3) score_heads<N, 3>(q + g * N * kWide, keys, tokens, logits + g * stride, stride, ahead);
  if (group - g == 2) score_heads<N, 2>(q + g * N * kWide, keys, tokens, logits + g * stride, stride, ahead);
  if (group - g == 1) score_heads<N, 1>(q + g * N * kWide, keys, tokens, logits + g * stride, stride, ahead);
}

// out[g] += sum of weights[g * stride + t] * values[t]; `ahead` as above.
template <int N>
void add_values(const float* weights, int64_t stride, const float* values, int64_t tokens, int64_t group, int64_t,
                float* out, const float* ahead) {
  constexpr int kHeads = N > kWide ? 1 : N * 4 > kWide ? kWide / N : 4;  // with N sums each, what the registers hold
  int64_t g = 0;
  for (; g + kHeads <= group; g += kHeads)
    add_heads<N, kHeads>(weights + g * stride, stride, values, tokens, out + g * N * kWide, ahead);
  if (group - g == 3) add_heads<N, 3>(weights + g * stride, stride, values, tokens, out + g * N * kWide, ahead);
  if (group - g == 2) add_heads<N, 2>(weights + g * stride, stride, values, tokens, out + g * N * kWide, ahead);
  if (group - g == 1) add_heads<N, 1>(weights + g * stride, stride, values, tokens, out + g * N * kWide, ahead);
}

template <>
inline void score_tokens<0>(const float* q, const float* keys, int64_t tokens, int64_t group, int64_t dim,
                            float* logits, int64_t stride, const float* ahead) {
  if (ahead != nullptr) prefetch(ahead, tokens * dim * sizeof(float));
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t g = 0; g < group; ++g) logits[g * stride + t] = dot(q + g * dim, keys + t * dim, dim);
}

template <>
inline void add_values<0>(const float* weights, int64_t stride, const float* values, int64_t tokens, int64_t group,
                          int64_t dim, float* out, const float* ahead) {
  if (ahead != nullptr) prefetch(ahead, tokens * dim * sizeof(float));
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
    case 64: return kLoops<64 / kWide>;
    case 80: return kLoops<80 / kWide>;
    case 96: return kLoops<96 / kWide>;
    case 128: return kLoops<128 / kWide>;
    case 256: return kLoops<256 / kWide>;
  }
  return kLoops<0>;
}
