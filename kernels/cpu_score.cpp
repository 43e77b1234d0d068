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
constexpr int64_t kAhead = 8;   // candidates: how far before their use sketches are asked for
constexpr int64_t kMeansAhead = 24;  // the same for means, which are read faster
constexpr int64_t kLanes = 4;   // query heads are taken four at a time
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

// What one (row, head)'s queries look like to the loops below.
struct Query {
  const Row* row = nullptr;
  const SketchLayer* sketch = nullptr;
  std::vector<float> scaled;    // [group, dim], divided by sqrt(dim)
  std::vector<float> rotated;   // [group, dim], of these
  std::vector<Lanes> tables;    // [lane group, half byte, value]: what those channels add to q·residual
  std::vector<int32_t> packed;  // [head, 16-channel part, channel % 4, high|low]: the bytes of four channels
  std::vector<float> unit;      // [head]: of a step
  std::vector<int32_t> offset;  // [head]: steps of the levels' own offset
};

// Some tokens of a block, and where their logits go: [lane, token].
struct Tokens {
  const uint8_t* codes;
  const uint16_t* scales;
  float* logits;
};

// Buffers of a thread.
struct Scratch {
  std::vector<Tokens> tokens;
  std::vector<Line> steps, logits;
  std::vector<float> scales, best, mass;
};

struct Chunk {  // candidates [begin, end) of a pair
  int64_t pair, begin, end;
};

// Codes of 64 channels fill 16 bytes, of which a register takes those of its tokens. Levels are -10, -3, 3 and 10; ten is
// added, so that a byte without sign holds them.
bool packs(const Layer& layer, const SketchLayer& sketch) {
#ifdef __AVX2__
  return sketch.kind == kTwoBit && layer.head_dim % 64 == 0 && layer.head_dim <= 256 && layer.block_size % kWide == 0;
#else
  return false;
#endif
}

// A channel is 256 * high + low steps, both bytes with a sign.
void pack_head(const float* rotated, int64_t dim, int64_t head, Query& query) {
  float largest = 0;
  for (int64_t d = 0; d < dim; ++d) largest = std::max(largest, std::fabs(rotated[d]));
  const float unit = largest > 0 ? largest / (127 * 256) : 1.0f;
  int8_t* bytes = reinterpret_cast<int8_t*>(query.packed.data() + head * dim / 2);
  int32_t sum = 0;
  for (int64_t d = 0; d < dim; ++d) {
    const int32_t step = int32_t(std::lrint(rotated[d] / unit)), high = (step + 128) >> 8;
    int8_t* to = bytes + (d / 16 * 4 + d % 4) * 8 + d % 16 / 4;
    to[0] = int8_t(high);
    to[4] = int8_t(step - high * 256);
    sum += step;
  }
  query.unit[head] = unit;
  query.offset[head] = 10 * sum;
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
  std::vector<float>& rotated = query.rotated;
  rotated.assign(group * dim, 0.0f);
  for (int64_t g = 0; g < group; ++g)
    for (int64_t i = 0; i < dim; ++i) {
      const float value = query.scaled[g * dim + i];
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) rotated[g * dim + d] += value * sketch.rotation[i * dim + d];
    }
  if (packs(layer, sketch)) {
    query.packed.resize(group * dim / 2);
    query.unit.resize(group);
    query.offset.resize(group);
    for (int64_t g = 0; g < group; ++g) pack_head(rotated.data() + g * dim, dim, g, query);
    return;
  }
  query.packed.clear();
  const int64_t table_size = dim / (sketch.kind == kTwoBit ? 2 : 4) * 16;
  query.tables.resize((group + kLanes - 1) / kLanes * table_size);
  for (int64_t base = 0; base < group; base += kLanes)
    tabulate_lanes(sketch, rotated.data() + base * dim, std::min(kLanes, group - base), dim,
                   query.tables.data() + base / kLanes * table_size);
}

// Logits of `count` tokens, q·residual of each; a lane's lie `stride` from the one's before.
void look_up_tokens(const Lanes* tables, const Tokens& tokens, int64_t count, int64_t bytes, int64_t stride) {
  for (int64_t t = 0; t < count; ++t) {
    const uint8_t* codes = tokens.codes + t * bytes;
    Lanes sums[2] = {};
    for (int64_t i = 0; i < bytes; ++i) {
      sums[0] += tables[i * 32 + (codes[i] & 15)];
      sums[1] += tables[i * 32 + 16 + (codes[i] >> 4)];
    }
    const Lanes logit = (sums[0] + sums[1]) * half_to_float(tokens.scales[t]);
    for (int64_t lane = 0; lane < kLanes; ++lane) tokens.logits[lane * stride + t] = logit[lane];
  }
}

#ifdef __AVX2__
#ifdef __AVX512BW__
// 16 bytes each of tokens t, t + 4, t + 8 and t + 12.
inline Words load_tokens(const uint8_t* codes, int64_t bytes, int t) {
  const auto at = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + (t + 4 * i) * bytes)); };
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(at(0)), at(1), 1);
  return Words(_mm512_inserti32x4(_mm512_inserti32x4(two, at(2), 2), at(3), 3));
}

// words[i] becomes the tokens' i-th four bytes, a token in each lane.
inline void transpose(Words (&words)[4]) {
  const __m512i low01 = _mm512_unpacklo_epi32(__m512i(words[0]), __m512i(words[1]));
  const __m512i high01 = _mm512_unpackhi_epi32(__m512i(words[0]), __m512i(words[1]));
  const __m512i low23 = _mm512_unpacklo_epi32(__m512i(words[2]), __m512i(words[3]));
  const __m512i high23 = _mm512_unpackhi_epi32(__m512i(words[2]), __m512i(words[3]));
  words[0] = Words(_mm512_unpacklo_epi64(low01, low23));
  words[1] = Words(_mm512_unpackhi_epi64(low01, low23));
  words[2] = Words(_mm512_unpacklo_epi64(high01, high23));
  words[3] = Words(_mm512_unpackhi_epi64(high01, high23));
}

inline Words levels_of(const Words& codes, __m128i levels) {
  return Words(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(levels), __m512i(codes)));
}

// sums + products of each lane's four bytes, those of a without sign.
inline Words multiply_add_bytes(const Words& a, const Words& b, const Words& sums) {
#ifdef __AVX512VNNI__
  return Words(_mm512_dpbusd_epi32(__m512i(sums), __m512i(a), __m512i(b)));
#else
  return sums + Words(_mm512_madd_epi16(_mm512_maddubs_epi16(__m512i(a), __m512i(b)), _mm512_set1_epi16(1)));
#endif
}

inline Wide halves_to_floats(const uint16_t* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}
#else
inline Words load_tokens(const uint8_t* codes, int64_t bytes, int t) {
  const auto at = [&](int i) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + (t + 4 * i) * bytes)); };
  return Words(_mm256_inserti128_si256(_mm256_castsi128_si256(at(0)), at(1), 1));
}

inline void transpose(Words (&words)[4]) {
  const __m256i low01 = _mm256_unpacklo_epi32(__m256i(words[0]), __m256i(words[1]));
  const __m256i high01 = _mm256_unpackhi_epi32(__m256i(words[0]), __m256i(words[1]));
  const __m256i low23 = _mm256_unpacklo_epi32(__m256i(words[2]), __m256i(words[3]));
  const __m256i high23 = _mm256_unpackhi_epi32(__m256i(words[2]), __m256i(words[3]));
  words[0] = Words(_mm256_unpacklo_epi64(low01, low23));
  words[1] = Words(_mm256_unpackhi_epi64(low01, low23));
  words[2] = Words(_mm256_unpacklo_epi64(high01, high23));
  words[3] = Words(_mm256_unpackhi_epi64(high01, high23));
}

inline Words levels_of(const Words& codes, __m128i levels) {
  return Words(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(levels), __m256i(codes)));
}

inline Words multiply_add_bytes(const Words& a, const Words& b, const Words& sums) {
  return sums + Words(_mm256_madd_epi16(_mm256_maddubs_epi16(__m256i(a), __m256i(b)), _mm256_set1_epi16(1)));
}

inline Wide halves_to_floats(const uint16_t* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}
#endif

// The same for vectors of tokens, kHeads heads from `first` on and 64 * kParts channels.
template <int kHeads, int kParts>
void multiply_tokens(const Query& query, int64_t first, const std::vector<Tokens>& tokens, int64_t stride) {
  constexpr int kTogether = kWide == 16 ? 2 : 1;  // vectors that meet a part of the query, as far as registers hold their sums
  constexpr int kBytes = 16 * kParts;
  const __m128i levels = _mm_setr_epi8(0, 7, 13, 20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
  const Words low_bits = Words{} + 0x03030303;
  for (size_t at = 0; at < tokens.size(); at += kTogether) {
    Words high[kTogether][kHeads], low[kTogether][kHeads];
    for (int v = 0; v < kTogether; ++v)
      for (int h = 0; h < kHeads; ++h) high[v][h] = low[v][h] = Words{};
    for (int part = 0; part < kParts; ++part) {
      Words words[kTogether][4];
      for (int v = 0; v < kTogether; ++v) {
        for (int i = 0; i < 4; ++i) words[v][i] = load_tokens(tokens[at + v].codes + 16 * part, kBytes, i);
        transpose(words[v]);
      }
      const int32_t* packed = query.packed.data() + (first * kBytes + 16 * part) * 2;
      asm("" : "+r"(packed));  // or the compiler spreads the query out first, to more than the registers hold
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c) {
          Words level[kTogether];
          for (int v = 0; v < kTogether; ++v) level[v] = levels_of((words[v][i] >> (2 * c)) & low_bits, levels);
          for (int h = 0; h < kHeads; ++h) {
            const int32_t* q = packed + (h * kBytes + i * 4 + c) * 2;
            const Words q_high = Words{} + q[0], q_low = Words{} + q[1];
            for (int v = 0; v < kTogether; ++v) {
              high[v][h] = multiply_add_bytes(level[v], q_high, high[v][h]);
              low[v][h] = multiply_add_bytes(level[v], q_low, low[v][h]);
            }
          }
        }
    }
    for (int v = 0; v < kTogether; ++v) {
      const Wide scale = halves_to_floats(tokens[at + v].scales);
      for (int h = 0; h < kHeads; ++h) {
        const Words steps = (high[v][h] << 8) + low[v][h] - query.offset[first + h];
        wide(tokens[at + v].logits + h * stride) = __builtin_convertvector(steps, Wide) * query.unit[first + h] * scale;
      }
    }
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

// best [4] and mass [4] of four blocks' logits, which are `stride` apart and whole vectors: the greatest, and the sum of
// exp(logit - greatest).
void sum_blocks(const float* logits, int64_t stride, int64_t count, float* best, float* mass) {
  Wide most[4], sums[4];
  for (int i = 0; i < 4; ++i) most[i] = wide(logits + i * stride);
  for (int64_t t = kWide; t < count; t += kWide)
    for (int i = 0; i < 4; ++i) most[i] = wide(logits + i * stride + t) > most[i] ? wide(logits + i * stride + t) : most[i];
  const Four greatest = across(most[0], most[1], most[2], most[3], [](const auto& x, const auto& y) { return x > y ? x : y; });
  for (int i = 0; i < 4; ++i) sums[i] = exp_negative(wide(logits + i * stride) - greatest[i]);
  for (int64_t t = kWide; t < count; t += kWide)
    for (int i = 0; i < 4; ++i) sums[i] += exp_negative(wide(logits + i * stride + t) - greatest[i]);
  four(best) = greatest;
  four(mass) = sums_of(sums[0], sums[1], sums[2], sums[3]);
}

// estimate [g * n + candidate] of candidates [begin, end): the mean's, in coarse, and what the tokens' codes say beyond it.
void score_codes(const Layer& layer, const Query& query, int64_t head, int64_t begin, int64_t end, const float* coarse,
                 float* estimate, Scratch& s) {
  const SketchLayer& sketch = *query.sketch;
  const int64_t n = query.row->last - query.row->first, group = layer.group, dim = layer.head_dim;
  const int64_t tokens = layer.block_size, bytes = dim * (sketch.kind == kTwoBit ? 2 : 1) / 8;
  const int64_t* ids = query.row->host_blocks + query.row->first;
  const float log_tokens = std::log(float(tokens));
  const auto place = [&](int64_t j) { return ids[std::min(j, end - 1)] * layer.num_heads + head; };
  const bool packed = !query.packed.empty();
  const int64_t together = packed ? kWide : tokens, stride = (tokens + kWide - 1) / kWide * kWide;
  float* logits = room_for(4 * kLanes * stride, s.logits);
  std::fill_n(logits, 4 * kLanes * stride, kMinusInfinity);  // what fills the last vector counts for nothing
  s.best.resize(kLanes * kChunk);
  s.mass.resize(kLanes * kChunk);
  for (int64_t base = 0; base < group; base += kLanes) {
    const int64_t used = std::min(kLanes, group - base);
    for (int64_t j = begin; j < end; j += 4) {
      s.tokens.clear();
      for (int64_t i = 0; i < 4; ++i) {
        const int64_t ahead = place(j + i + kAhead), at = place(j + i) * tokens;
        prefetch(sketch.codes + ahead * tokens * bytes, tokens * bytes);
        prefetch(sketch.token_scales + ahead * tokens, tokens * sizeof(uint16_t));
        for (int64_t t = 0; t < tokens; t += together)
          s.tokens.push_back(
              {sketch.codes + (at + t) * bytes, sketch.token_scales + at + t, logits + i * kLanes * stride + t});
      }
#ifdef __AVX2__
      if (packed) multiply_for(used, dim / 64)(query, base, s.tokens, stride);
#endif
      if (!packed)
        for (const Tokens& block : s.tokens)
          look_up_tokens(query.tables.data() + base / kLanes * bytes * 32, block, tokens, bytes, stride);
      for (int64_t lane = 0; lane < used; ++lane)
        sum_blocks(logits + lane * stride, kLanes * stride, stride, s.best.data() + lane * kChunk + (j - begin),
                   s.mass.data() + lane * kChunk + (j - begin));
    }
    for (int64_t lane = 0; lane < used; ++lane) {
      const float *best = s.best.data() + lane * kChunk, *mass = s.mass.data() + lane * kChunk;
      const int64_t to = (base + lane) * n + begin;
#pragma omp simd
      for (int64_t i = 0; i < end - begin; ++i)
        estimate[to + i] = coarse[to + i] + best[i] - log_tokens + log_positive(mass[i]);
    }
  }
}

// q·mean + log B of candidates [begin, end).
void score_means(const Layer& layer, const Query& query, int64_t head, int64_t begin, int64_t end, float* coarse,
                 Scratch& s) {
  const SketchLayer& sketch = *query.sketch;
  const int64_t n = query.row->last - query.row->first, dim = layer.head_dim;
  const int64_t* ids = query.row->host_blocks + query.row->first;
  const float log_tokens = std::log(float(layer.block_size));
  float* steps = room_for((end - begin) * dim, s.steps);
  s.scales.resize(kChunk);
  for (int64_t j = begin; j < end; ++j) {
    const int64_t at = ids[j] * layer.num_heads + head;
    if (j + kMeansAhead < end) prefetch(sketch.means + (ids[j + kMeansAhead] * layer.num_heads + head) * 2 * dim, dim);
    const int8_t* mean = sketch.means + at * 2 * dim;
    float* to = steps + (j - begin) * dim;
#pragma omp simd
    for (int64_t d = 0; d < dim; ++d) to[d] = mean[d];
    s.scales[j - begin] = half_to_float(sketch.mean_scales[at * 2]);
  }
  loops_for(dim).score_tokens(query.scaled.data(), steps, end - begin, layer.group, dim, coarse + begin, n, nullptr);
  for (int64_t g = 0; g < layer.group; ++g)
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) coarse[g * n + j] = coarse[g * n + j] * s.scales[j - begin] + log_tokens;
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
  thread_local std::vector<Query> kept;  // this thread's, and filled by all
  std::vector<Query>& queries = kept;
  if (int64_t(queries.size()) < num_rows * heads) queries.resize(num_rows * heads);
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
    thread_local Scratch s;
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
        score_means(layer, queries[pair], pair % heads, begin, end, coarse, s);
        score_codes(layer, queries[pair], pair % heads, begin, end, coarse, estimate, s);
      }
    }
  }
}
