// The layers around attention for a few rows on the CPU: matrix products with what surrounds them, and rope. A decode step
// reads every weight once, so what counts is to stream them; a library's product for one row reaches a third of what the
// memory gives.
//
// A row's result depends on that row alone: each output is summed over the lanes of a vector along k, then across them,
// whatever rows stand beside it and however many threads there are.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_math.h"

namespace {

constexpr int64_t kAhead = 2048;  // bytes: how far before their use weights are asked for
constexpr int64_t kTileBytes = 1 << 15;  // weights that stay in a core's cache while all rows pass over them

// y[r * y_stride + j] = x[r]·w[j] for kRows rows and kOut outputs.
template <int kRows, int kOut>
void multiply(const float* x, int64_t x_stride, const float* w, int64_t size, float* y, int64_t y_stride) {
  Wide sums[kRows][kOut];
  for (int r = 0; r < kRows; ++r)
    for (int j = 0; j < kOut; ++j) sums[r][j] = Wide{};
  int64_t k = 0;
  for (; k + kWide <= size; k += kWide) {
    prefetch(reinterpret_cast<const char*>(w + kOut * (size + k)) + kAhead, kOut * sizeof(Wide));
    Wide values[kRows];
    for (int r = 0; r < kRows; ++r) values[r] = wide(x + r * x_stride + k);
    for (int j = 0; j < kOut; ++j) {
      const Wide weights = wide(w + j * size + k);
      for (int r = 0; r < kRows; ++r) sums[r][j] = multiply_add(weights, values[r], sums[r][j]);
    }
  }
  if (k < size) {
    for (int r = 0; r < kRows; ++r)
      for (int j = 0; j < kOut; ++j) {
        Wide weights = {}, values = {};
        std::memcpy(&weights, w + j * size + k, (size - k) * sizeof(float));
        std::memcpy(&values, x + r * x_stride + k, (size - k) * sizeof(float));
        sums[r][j] = multiply_add(weights, values, sums[r][j]);
      }
  }
  for (int r = 0; r < kRows; ++r)
    if constexpr (kOut == 4) four(y + r * y_stride) = sums_of(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    else
      for (int j = 0; j < kOut; ++j) y[r * y_stride + j] = sum_of(sums[r][j]);
}

template <int kRows>
void multiply_outputs(const float* x, const float* w, int64_t size, int64_t num_outputs, float* y, int64_t y_stride) {
  constexpr int kOut = kRows > 2 && kWide == 8 ? 2 : 4;  // what the registers hold
  int64_t j = 0;
  for (; j + kOut <= num_outputs; j += kOut) multiply<kRows, kOut>(x, size, w + j * size, size, y + j, y_stride);
  for (; j < num_outputs; ++j) multiply<kRows, 1>(x, size, w + j * size, size, y + j, y_stride);
}

void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* y) {
  Wide lanes = {};
  int64_t i = 0;
  for (; i + kWide <= size; i += kWide) lanes += wide(x + i) * wide(x + i);
  float sum = sum_of(lanes);
  for (; i < size; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / float(size) + eps);
  for (i = 0; i < size; ++i) y[i] = x[i] * scale * weight[i];
}

void gate(const float* x, int64_t size, float* y) {
  const float* up = x + size;
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float small = exp_negative(-std::fabs(x[i]));
    y[i] = x[i] * up[i] * (x[i] >= 0 ? 1.0f : small) / (1.0f + small);
  }
}

}  // namespace

extern "C" {

struct Linear {  // y = f(x) Wᵀ + bias + residual; null: left out
  const float* weight;       // [outputs, inputs]
  const float* bias;         // [outputs]
  const float* norm_weight;  // [inputs]: f is the root-mean-square norm
  float norm_eps;
  int32_t gated;             // f is silu(first half of x) * second half, x [rows, 2 * inputs]
  int64_t inputs, outputs;
};

void oasis_linear(const Linear* linear, const float* x, const float* residual, float* y, int64_t num_rows,
                  int64_t num_threads) {
  const int64_t inputs = linear->inputs, outputs = linear->outputs;
  thread_local std::vector<Line> lines;
  if (linear->norm_weight != nullptr || linear->gated) {
    float* scratch = room_for(num_rows * inputs, lines);
    for (int64_t r = 0; r < num_rows; ++r)
      if (linear->gated) gate(x + r * 2 * inputs, inputs, scratch + r * inputs);
      else rms_norm(x + r * inputs, linear->norm_weight, linear->norm_eps, inputs, scratch + r * inputs);
    x = scratch;
  }
  const int64_t tile = std::max<int64_t>(4, kTileBytes / int64_t(sizeof(float)) / inputs / 4 * 4);
  // Guided: threads that take tiles in turn ask for each other's memory ahead of time, so each gets a long run first.
#pragma omp parallel for num_threads(num_threads) schedule(guided)
  for (int64_t first = 0; first < outputs; first += tile) {
    const int64_t count = std::min(tile, outputs - first);
    const float* w = linear->weight + first * inputs;
    for (int64_t r = 0; r < num_rows; r += 4) {
      const float* here = x + r * inputs;
      float* out = y + r * outputs + first;
      switch (std::min<int64_t>(4, num_rows - r)) {
        case 1: multiply_outputs<1>(here, w, inputs, count, out, outputs); break;
        case 2: multiply_outputs<2>(here, w, inputs, count, out, outputs); break;
        case 3: multiply_outputs<3>(here, w, inputs, count, out, outputs); break;
        default: multiply_outputs<4>(here, w, inputs, count, out, outputs);
      }
    }
    for (int64_t r = 0; r < num_rows; ++r)
      for (int64_t j = first; j < first + count; ++j) {
        float& value = y[r * outputs + j];
        if (linear->bias != nullptr) value += linear->bias[j];
        if (residual != nullptr) value += residual[r * outputs + j];
      }
  }
}

// Splits qkv [row, q heads | k heads | v heads, dim] and turns q and k, each head normed first where there is a norm.
// cos and sin [row, dim / 2].
void oasis_rope(const float* qkv, const float* cos, const float* sin, const float* q_norm, const float* k_norm, float eps,
                float* q, float* k, float* v, int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t dim) {
  const int64_t half = dim / 2;
  std::vector<float> normed(dim);
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t h = 0; h < num_heads + num_kv_heads; ++h, qkv += dim) {
      const bool is_query = h < num_heads;
      const float* norm = is_query ? q_norm : k_norm;
      const float* from = qkv;
      if (norm != nullptr) {
        rms_norm(qkv, norm, eps, dim, normed.data());
        from = normed.data();
      }
      float* to = is_query ? q + (r * num_heads + h) * dim : k + (r * num_kv_heads + h - num_heads) * dim;
      const float *c = cos + r * half, *s = sin + r * half;
      for (int64_t i = 0; i < half; ++i) {
        to[i] = from[i] * c[i] - from[half + i] * s[i];
        to[half + i] = from[half + i] * c[i] + from[i] * s[i];
      }
    }
    std::memcpy(v + r * num_kv_heads * dim, qkv, num_kv_heads * dim * sizeof(float));
    qkv += num_kv_heads * dim;
  }
}

}  // extern "C"
