// Block scores on the CPU: the estimated attention mass of every candidate block under each query head, from the sketches.
//
// Work is cut into chunks of candidates, so that one long row keeps all cores busy; a block's numbers depend on its sketch and
// the query alone.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "cpu_block.h"
#include "cpu_decode.h"
#include "cpu_math.h"

namespace {

constexpr int64_t kChunk = 64;  // candidates
constexpr int64_t kAhead = 4;   // candidates: how far before their use sketches are asked for
constexpr int64_t kLanes = 4;   // query heads are taken four at a time
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

// What one (row, head)'s queries look like to the loops below.
struct Query {
  const Row* row = nullptr;
  const SketchLayer* sketch = nullptr;
  std::vector<float> scaled;    // [group, dim], divided by sqrt(dim)
  std::vector<Lanes> tables;    // [lane group, half byte, value]: what those channels add to q·residual
  std::vector<int16_t> packed;  // [lane group, lane, 64-channel part, channel % 4, channel / 4]: rotated, in steps of `unit`
  std::vector<Lanes> unit, offset;  // [lane group]
};

struct Chunk {  // candidates [begin, end) of a pair
  int64_t pair, begin, end;
};

// Codes of 64 channels fill 16 bytes, a vector. Their levels are -10, -3, 3 and 10; ten is added, so that a byte holds them.
bool packs(const SketchLayer& sketch, int64_t dim) {
#ifdef __AVX2__
  return sketch.kind == kTwoBit && dim % 64 == 0 && dim <= 256;
#else
  return false;
#endif
}

void pack_lanes(const float* rotated, int64_t used, int64_t dim, Query& query, int64_t lane_group) {
  const int64_t parts = dim / 64;
  int16_t* packed = query.packed.data() + lane_group * kLanes * dim;
  for (int64_t lane = 0; lane < used; ++lane) {
    const float* from = rotated + lane * dim;
    float largest = 0;
    for (int64_t d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(from[d]));
    const float unit = largest > 0 ? largest / 32767.0f : 1.0f;
    int64_t sum = 0;
    for (int64_t d = 0; d < dim; ++d) {
      const int16_t step = int16_t(std::lrint(from[d] / unit));
      packed[((lane * parts + d / 64) * 4 + d % 4) * 16 + d % 64 / 4] = step;
      sum += step;
    }
    query.unit[lane_group][lane] = unit;
    query.offset[lane_group][lane] = float(10 * sum);
  }
}

void tabulate_lanes(const SketchLayer& sketch, const float* rotated, int64_t used, int64_t dim, Lanes* tables) {
  static constexpr float kTwoBitLevels[4] = {-10, -3, 3, 10};
  const int64_t bits = sketch.kind == kTwoBit ? 2 : 1, channels = 4 / bits, halves = dim / channels;
  for (int64_t half = 0; half < halves; ++half)
    for (int64_t value = 0; value < 16; ++value) {
      Lanes entry = {};
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t code = (value >> (c * bits)) & ((1 << bits) - 1);
        const float level = bits == 2 ? kTwoBitLevels[code] : float(2 * code - 1);
        for (int64_t lane = 0; lane < used; ++lane) entry[lane] += level * rotated[lane * dim + half * channels + c];
      }
      tables[half * 16 + value] = entry;
    }
}

void prepare(const Layer& layer, const Row& row, const SketchLayer& sketch, const float* q, Query& query) {
  const int64_t group = layer.group, dim = layer.head_dim;
  const float scale = 1.0f / std::sqrt(float(dim));
  query.row = &row;
  query.sketch = &sketch;
  query.scaled.resize(group * dim);
  for (int64_t d = 0; d < group * dim; ++d) query.scaled[d] = q[d] * scale;
  if (sketch.kind == kMinMax) return;
  std::vector<float> rotated(group * dim);
  for (int64_t g = 0; g < group; ++g)
    for (int64_t i = 0; i < dim; ++i) {
      const float value = query.scaled[g * dim + i];
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) rotated[g * dim + d] += value * sketch.rotation[i * dim + d];
    }
  const int64_t lane_groups = (group + kLanes - 1) / kLanes;
  const int64_t table_size = dim / (sketch.kind == kTwoBit ? 2 : 4) * 16;
  const bool packed = packs(sketch, dim);
  query.unit.assign(lane_groups, Lanes{});
  query.offset.assign(lane_groups, Lanes{});
  if (packed) query.packed.assign(lane_groups * kLanes * dim, 0);
  else query.tables.resize(lane_groups * table_size);
  for (int64_t base = 0; base < group; base += kLanes) {
    const int64_t used = std::min(kLanes, group - base), lane_group = base / kLanes;
    if (packed) pack_lanes(rotated.data() + base * dim, used, dim, query, lane_group);
    else tabulate_lanes(sketch, rotated.data() + base * dim, used, dim, query.tables.data() + lane_group * table_size);
  }
}

// logits [token, lane] of a block: q·residual of each.
void look_up_tokens(const Lanes* tables, const uint8_t* codes, const uint16_t* scales, int64_t tokens, int64_t bytes,
                    float* logits) {
  for (int64_t t = 0; t < tokens; ++t, codes += bytes) {
    Lanes sums[2] = {};
    for (int64_t i = 0; i < bytes; ++i) {
      sums[0] += tables[i * 32 + (codes[i] & 15)];
      sums[1] += tables[i * 32 + 16 + (codes[i] >> 4)];
    }
    const Lanes logit = (sums[0] + sums[1]) * half_to_float(scales[t]);
    std::memcpy(logits + t * kLanes, &logit, sizeof logit);
  }
}

#ifdef __AVX2__
// sums + pairwise products of 16-bit numbers.
inline __m256i multiply_add_pairs(__m256i sums, __m256i a, __m256i b) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpwssd_epi32(sums, a, b);
#else
  return _mm256_add_epi32(sums, _mm256_madd_epi16(a, b));
#endif
}

template <int kHeads, int kParts>
void multiply_tokens(const int16_t* packed, const Lanes& unit, const Lanes& offset, const uint8_t* codes,
                     const uint16_t* scales, int64_t tokens, float* logits) {
  const __m256i levels = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 7, 13, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0));
  const __m256i three = _mm256_set1_epi16(3);
  for (int64_t t = 0; t < tokens; ++t) {
    __m256i sums[kLanes];
    for (int h = 0; h < kLanes; ++h) sums[h] = _mm256_setzero_si256();
    for (int part = 0; part < kParts; ++part) {
      const __m128i* at = reinterpret_cast<const __m128i*>(codes + (t * kParts + part) * 16);
      __m256i bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(at));
      for (int c = 0; c < 4; ++c) {
        const __m256i level = _mm256_shuffle_epi8(levels, _mm256_and_si256(bytes, three));
        bytes = _mm256_srli_epi16(bytes, 2);
        for (int h = 0; h < kHeads; ++h) {
          const __m256i* q = reinterpret_cast<const __m256i*>(packed + ((h * kParts + part) * 4 + c) * 16);
          sums[h] = multiply_add_pairs(sums[h], level, _mm256_loadu_si256(q));
        }
      }
    }
    const __m256i low = _mm256_hadd_epi32(sums[0], sums[1]), high = _mm256_hadd_epi32(sums[2], sums[3]);
    const __m256i both = _mm256_hadd_epi32(low, high);
    const __m128i whole = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    const Lanes logit = (Lanes(_mm_cvtepi32_ps(whole)) - offset) * unit * half_to_float(scales[t]);
    std::memcpy(logits + t * kLanes, &logit, sizeof logit);
  }
}

typedef decltype(&multiply_tokens<1, 1>) MultiplyTokens;

MultiplyTokens multiply_for(int64_t heads, int64_t parts) {
  static constexpr MultiplyTokens kTable[4][4] = {
      {multiply_tokens<1, 1>, multiply_tokens<1, 2>, multiply_tokens<1, 3>, multiply_tokens<1, 4>},
      {multiply_tokens<2, 1>, multiply_tokens<2, 2>, multiply_tokens<2, 3>, multiply_tokens<2, 4>},
      {multiply_tokens<3, 1>, multiply_tokens<3, 2>, multiply_tokens<3, 3>, multiply_tokens<3, 4>},
      {multiply_tokens<4, 1>, multiply_tokens<4, 2>, multiply_tokens<4, 3>, multiply_tokens<4, 4>}};
  return kTable[heads - 1][parts - 1];
}
#endif

// estimate [g * n + candidate] of candidates [begin, end): the mean's, in coarse, and what the tokens' codes say beyond it.
void score_codes(const Layer& layer, const Query& query, int64_t head, int64_t begin, int64_t end, const float* coarse,
                  float* estimate) {
  const SketchLayer& sketch = *query.sketch;
  const int64_t n = query.row->last - query.row->first, group = layer.group, dim = layer.head_dim;
  const int64_t tokens = layer.block_size, bytes = dim * (sketch.kind == kTwoBit ? 2 : 1) / 8;
  const int64_t* ids = query.row->host_blocks + query.row->first;
  const float log_tokens = std::log(float(tokens));
  const int64_t count = end - begin;
  std::vector<float> logits(tokens * kLanes), mass(count * kLanes);
  for (int64_t base = 0; base < group; base += kLanes) {
    const int64_t used = std::min(kLanes, group - base), lane_group = base / kLanes;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = ids[begin + i] * layer.num_heads + head;
      if (i + kAhead < count) {
        const int64_t ahead = ids[begin + i + kAhead] * layer.num_heads + head;
        prefetch(sketch.codes + ahead * tokens * bytes, tokens * bytes);
        prefetch(sketch.token_scales + ahead * tokens, tokens * sizeof(uint16_t));
      }
      const uint8_t* codes = sketch.codes + at * tokens * bytes;
      const uint16_t* scales = sketch.token_scales + at * tokens;
#ifdef __AVX2__
      if (!query.packed.empty())
        multiply_for(used, dim / 64)(query.packed.data() + lane_group * kLanes * dim, query.unit[lane_group],
                                     query.offset[lane_group], codes, scales, tokens, logits.data());
      else
#endif
        look_up_tokens(query.tables.data() + lane_group * bytes * 32, codes, scales, tokens, bytes, logits.data());
      Lanes best, sum = {};
      std::memcpy(&best, logits.data(), sizeof best);
      for (int64_t t = 1; t < tokens; ++t) {
        Lanes logit;
        std::memcpy(&logit, logits.data() + t * kLanes, sizeof logit);
        best = logit > best ? logit : best;
      }
      float bests[2 * kLanes], sums[2 * kLanes] = {};
      for (int64_t lane = 0; lane < 2 * kLanes; ++lane) bests[lane] = best[lane % kLanes];
      int64_t k = 0;
      for (; k + 2 * kLanes <= tokens * kLanes; k += 2 * kLanes)
#pragma omp simd
        for (int64_t lane = 0; lane < 2 * kLanes; ++lane) sums[lane] += exp_negative(logits[k + lane] - bests[lane]);
      for (; k < tokens * kLanes; ++k) sums[k % kLanes] += exp_negative(logits[k] - bests[k % kLanes]);
      for (int64_t lane = 0; lane < kLanes; ++lane) sum[lane] = sums[lane] + sums[lane + kLanes];
      for (int64_t lane = 0; lane < used; ++lane) {
        mass[lane * count + i] = sum[lane];
        const int64_t to = (base + lane) * n + begin + i;
        estimate[to] = coarse[to] + best[lane] - log_tokens;
      }
    }
#pragma omp simd
    for (int64_t i = 0; i < used * count; ++i) mass[i] = log_positive(mass[i]);
    for (int64_t lane = 0; lane < used; ++lane)
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) estimate[(base + lane) * n + begin + i] += mass[lane * count + i];
  }
}

// q·mean + log B of candidates [begin, end).
void score_means(const Layer& layer, const Query& query, int64_t head, int64_t begin, int64_t end, float* coarse) {
  const SketchLayer& sketch = *query.sketch;
  const int64_t n = query.row->last - query.row->first, dim = layer.head_dim;
  const int64_t* ids = query.row->host_blocks + query.row->first;
  const float log_tokens = std::log(float(layer.block_size));
  std::vector<float> steps((end - begin) * dim), scales(end - begin);
  for (int64_t j = begin; j < end; ++j) {
    const int64_t at = ids[j] * layer.num_heads + head;
    if (j + kAhead < end) prefetch(sketch.means + (ids[j + kAhead] * layer.num_heads + head) * 2 * dim, dim);
    const int8_t* mean = sketch.means + at * 2 * dim;
    float* to = steps.data() + (j - begin) * dim;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) to[d] = mean[d];
    scales[j - begin] = half_to_float(sketch.mean_scales[at * 2]);
  }
  loops_for(dim).score_tokens(query.scaled.data(), steps.data(), end - begin, layer.group, dim, coarse + begin, n, steps.data());
  for (int64_t g = 0; g < layer.group; ++g)
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) coarse[g * n + j] = coarse[g * n + j] * scales[j - begin] + log_tokens;
}

// The upper bound of every token's logit, as if all of them met it.
void score_bounds(const Layer& layer, const Query& query, int64_t head, int64_t begin, int64_t end, float* estimate) {
  const int64_t n = query.row->last - query.row->first, dim = layer.head_dim;
  const float log_tokens = std::log(float(layer.block_size));
  std::vector<float> ends(2 * dim);
  for (int64_t j = begin; j < end; ++j) {
    const int64_t at = query.row->host_blocks[query.row->first + j] * layer.num_heads + head;
    const uint16_t* bounds = query.sketch->bounds + at * 2 * dim;
    for (int64_t d = 0; d < 2 * dim; ++d) ends[d] = bfloat_to_float(bounds[d]);
    for (int64_t g = 0; g < layer.group; ++g) {
      const float* q = query.scaled.data() + g * dim;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < dim; ++d) sum += q[d] * (q[d] > 0 ? ends[d] : ends[dim + d]);
      estimate[g * n + j] = sum + log_tokens;
    }
  }
}

}  // namespace

void score_rows(const Layer& layer, int64_t layer_index, const Row* rows, int64_t num_rows, const float* q, const Work& work,
                int64_t num_threads) {
  const int64_t heads = layer.num_heads, group = layer.group, width = group * layer.head_dim;
  std::vector<Query> queries(num_rows * heads);
  std::vector<Chunk> chunks;
  for (int64_t pair = 0; pair < num_rows * heads; ++pair) {
    const Row& row = rows[pair / heads];
    if (sketch_of(row, layer_index) == nullptr) continue;
    const int64_t n = row.last - row.first;
    for (int64_t begin = 0; begin < n; begin += kChunk) chunks.push_back({pair, begin, std::min(n, begin + kChunk)});
  }
  if (chunks.empty()) return;
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (int64_t pair = 0; pair < num_rows * heads; ++pair)
      if (const SketchLayer* sketch = sketch_of(rows[pair / heads], layer_index))
        prepare(layer, rows[pair / heads], *sketch, q + pair * width, queries[pair]);
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < chunks.size(); ++i) {
      const auto [pair, begin, end] = chunks[i];
      float* estimate = work.estimate + pair * group * work.max_candidates;
      float* coarse = work.coarse + pair * group * work.max_candidates;
      if (queries[pair].sketch->kind == kMinMax) {
        score_bounds(layer, queries[pair], pair % heads, begin, end, estimate);
      } else {
        score_means(layer, queries[pair], pair % heads, begin, end, coarse);
        score_codes(layer, queries[pair], pair % heads, begin, end, coarse, estimate);
      }
    }
  }
}
