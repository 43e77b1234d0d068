// Decode attention of one layer on the CPU, in two calls with the copies between them. oasis_select: for every (row, KV
// head), score the candidates' sketches, choose the best, look up where they are and make room for the missing ones.
// oasis_attend: attend the chosen blocks' pages and add the tail estimate. fp32; what each step means is in
// kernels/reference.py.
//
// A pair's result depends on its own query and the KV alone: pairs share nothing, the residency tables of a (row, head) are
// its own, and every sum runs in an order that the list of attended blocks fixes. So answers do not depend on where blocks
// are, on the batch, or on the number of threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "cpu_math.h"

namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

enum SketchKind : int64_t { kMinMax = 0, kOneBit = 1, kTwoBit = 2 };

}  // namespace

extern "C" {

struct SketchLayer {  // one layer of sparse/sketch.py's tensors
  int64_t kind;
  const uint8_t* codes;         // [block, head, token, head_dim / (8 / bits)]
  const uint16_t* token_scales; // fp16 [block, head, token]
  const int8_t* means;          // [block, head, K|V, head_dim]
  const uint16_t* mean_scales;  // fp16 [block, head, K|V]
  const uint16_t* bounds;       // bf16 [block, head, max|min, head_dim]
  const float* rotation;        // [head_dim, head_dim]
};

struct Layer {
  int64_t num_heads, group, head_dim, block_size;
  const float* pool;  // [page, head, K|V, token, head_dim]
  int64_t wide_tables;  // 0: int16 tables, 1: int32
  void* block_in_slot;  // [row, head, max_slots], -1 = empty
  void* slot_of_block;  // [row, head, max_blocks], -1 = not resident
  int32_t* last_selected;  // [row, head, max_slots]
  int64_t max_slots, max_blocks;
};

struct Row {
  const SketchLayer* sketches;  // [layer], or null
  const int64_t* pages;         // [num_slots]
  const int64_t* host_blocks;   // [total blocks]
  int64_t table_row, position, first, last;  // candidates: blocks [first, last)
  int64_t budget;                            // blocks, < 0: attend everything
  int64_t num_slots;
  int64_t resident;  // slot i is block i, nothing ever moves
  int64_t use_tail, recall, tick;
};

struct Work {  // what oasis_select leaves for the copies and for oasis_attend; a pair is a (row, head)
  int64_t max_blocks, max_chosen, max_candidates;
  int64_t* num_blocks;  // [pair]
  int64_t* pages;       // [pair, max_blocks]: of the attended blocks in ascending id, -1 = left out
  int64_t* num_chosen;  // [pair]
  int64_t* chosen;      // [pair, max_chosen]: positions among the candidates, ascending
  float* coarse;        // [pair, group * max_candidates], used as [group, candidates]: q·mean + log B of each
  int64_t* loads;       // [3, pair * max_blocks]: head, host block and page of what must be fetched
  double* missed_mass;     // [pair], added to: estimated mass outside, summed over the group
  int64_t* missed_blocks;  // [pair], added to
};

}  // extern "C"

namespace {

float half_to_float(uint16_t h) {
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
}

float bfloat_to_float(uint16_t b) {
  uint32_t bits = uint32_t(b) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline float dot(const float* a, const float* b, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// The inner loops are unrolled over a head's N eights; N = 0 takes any head_dim.

// logits[g * stride + t] = q[g]·keys[t]
template <int N>
void score_tokens(const float* q, const float* keys, int64_t tokens, int64_t group, int64_t, float* logits,
                  int64_t stride) {
  for (int64_t t = 0; t < tokens; ++t) {
    Eight key[N];
    for (int i = 0; i < N; ++i) key[i] = eight(keys + (t * N + i) * 8);
    for (int64_t g = 0; g < group; ++g) {
      Eight sum = key[0] * eight(q + g * N * 8);
      for (int i = 1; i < N; ++i) sum += key[i] * eight(q + (g * N + i) * 8);
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

float max_of(const float* x, int64_t n) {
  float best = kMinusInfinity;
#pragma omp simd reduction(max : best)
  for (int64_t i = 0; i < n; ++i) best = x[i] > best ? x[i] : best;
  return best;
}

// x becomes exp(x - offset); returns the sum.
float exponentiate(float* x, int64_t n, float offset) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) {
    x[i] = exp_negative(x[i] - offset);
    sum += x[i];
  }
  return sum;
}

float log_sum_exp(const float* x, int64_t n) {
  float best = max_of(x, n), sum = 0;
  if (best == kMinusInfinity) return best;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < n; ++i) sum += exp_negative(x[i] - best);
  return best + std::log(sum);
}

// Queries are taken four at a time: a table entry then is one vector load, whatever the group's size.
constexpr int64_t kLanes = 4;
typedef float Lanes __attribute__((vector_size(kLanes * sizeof(float))));

template <>
void score_tokens<0>(const float* q, const float* keys, int64_t tokens, int64_t group, int64_t dim, float* logits,
                     int64_t stride) {
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t g = 0; g < group; ++g) logits[g * stride + t] = dot(q + g * dim, keys + t * dim, dim);
}

template <>
void add_values<0>(const float* weights, int64_t stride, const float* values, int64_t tokens, int64_t group, int64_t dim,
                   float* out) {
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

BlockLoops loops_for(int64_t head_dim) {
  switch (head_dim) {
    case 64: return kLoops<8>;
    case 80: return kLoops<10>;
    case 96: return kLoops<12>;
    case 128: return kLoops<16>;
    case 256: return kLoops<32>;
  }
  return kLoops<0>;
}

struct Scratch {
  std::vector<float> query, rotated, estimate, score, logits, mean, token;
  std::vector<Lanes> tables;
  std::vector<int64_t> order, blocks, slots;
  std::vector<std::pair<int32_t, int32_t>> victims;
};

// For each half byte of a token's codes and each of its 16 values, what those channels add to q·residual:
// tables [half byte, value, lane]. A token then costs one addition per half byte instead of unpacking and multiplying.
void build_tables(const SketchLayer& sketch, const float* rotated, int64_t lanes_used, int64_t dim, std::vector<Lanes>& tables) {
  static constexpr float kTwoBitLevels[4] = {-10, -3, 3, 10};
  const int64_t bits = sketch.kind == kTwoBit ? 2 : 1, channels = 4 / bits, halves = dim / channels;
  tables.resize(halves * 16);
  for (int64_t half = 0; half < halves; ++half)
    for (int64_t value = 0; value < 16; ++value) {
      Lanes entry = {};
      for (int64_t c = 0; c < channels; ++c) {
        const int64_t code = (value >> (c * bits)) & ((1 << bits) - 1);
        const float level = bits == 2 ? kTwoBitLevels[code] : float(2 * code - 1);
        for (int64_t lane = 0; lane < lanes_used; ++lane) entry[lane] += level * rotated[lane * dim + half * channels + c];
      }
      tables[half * 16 + value] = entry;
    }
}

Lanes look_up(const Lanes* tables, const uint8_t* codes, int64_t bytes) {
  Lanes sums[4] = {};
  int64_t i = 0;
  for (; i + 2 <= bytes; i += 2, tables += 64) {
    sums[0] += tables[codes[i] & 15];
    sums[1] += tables[16 + (codes[i] >> 4)];
    sums[2] += tables[32 + (codes[i + 1] & 15)];
    sums[3] += tables[48 + (codes[i + 1] >> 4)];
  }
  for (; i < bytes; ++i, tables += 32) {
    sums[0] += tables[codes[i] & 15];
    sums[1] += tables[16 + (codes[i] >> 4)];
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// s.estimate [group, n]: log mass of each candidate; coarse [group, n] (kinds with means): q·mean + log B.
void score_candidates(const Layer& layer, const Row& row, const SketchLayer& sketch, int64_t head, const float* q,
                      float* coarse, Scratch& s) {
  const int64_t n = row.last - row.first, group = layer.group, dim = layer.head_dim, tokens = layer.block_size;
  const float log_tokens = std::log(float(tokens));
  const int64_t* ids = row.host_blocks + row.first;
  s.estimate.resize(group * n);
  if (sketch.kind == kMinMax) {
    s.mean.resize(2 * dim);
    for (int64_t j = 0; j < n; ++j) {
      const uint16_t* bounds = sketch.bounds + (ids[j] * layer.num_heads + head) * 2 * dim;
      for (int64_t d = 0; d < 2 * dim; ++d) s.mean[d] = bfloat_to_float(bounds[d]);
      for (int64_t g = 0; g < group; ++g) {
        const float* query = q + g * dim;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t d = 0; d < dim; ++d) sum += query[d] * (query[d] > 0 ? s.mean[d] : s.mean[dim + d]);
        s.estimate[g * n + j] = sum + log_tokens;
      }
    }
    return;
  }
  const int64_t bytes = dim * (sketch.kind == kTwoBit ? 2 : 1) / 8;
  s.rotated.assign(group * dim, 0.0f);
  for (int64_t g = 0; g < group; ++g)
    for (int64_t i = 0; i < dim; ++i) {
      const float value = q[g * dim + i];
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) s.rotated[g * dim + d] += value * sketch.rotation[i * dim + d];
    }
  s.mean.resize(dim);
  s.logits.resize(tokens * kLanes);
  float* logits = s.logits.data();
  for (int64_t base = 0; base < group; base += kLanes) {
    const int64_t used = std::min(kLanes, group - base);
    build_tables(sketch, s.rotated.data() + base * dim, used, dim, s.tables);
    for (int64_t j = 0; j < n; ++j) {
      const int64_t at = ids[j] * layer.num_heads + head;
      const uint8_t* codes = sketch.codes + at * tokens * bytes;
      Lanes best = {kMinusInfinity, kMinusInfinity, kMinusInfinity, kMinusInfinity};
      for (int64_t t = 0; t < tokens; ++t) {
        Lanes sum = look_up(s.tables.data(), codes + t * bytes, bytes) * half_to_float(sketch.token_scales[at * tokens + t]);
        std::memcpy(logits + t * kLanes, &sum, sizeof sum);
        best = sum > best ? sum : best;
      }
      float mass[kLanes] = {};
      for (int64_t t = 0; t < tokens; ++t)
#pragma omp simd
        for (int64_t lane = 0; lane < kLanes; ++lane) mass[lane] += exp_negative(logits[t * kLanes + lane] - best[lane]);
      const int8_t* mean = sketch.means + at * 2 * dim;
      const float mean_scale = half_to_float(sketch.mean_scales[at * 2]);
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) s.mean[d] = mean[d] * mean_scale;
      for (int64_t lane = 0; lane < used; ++lane) {
        const float at_mean = dot(q + (base + lane) * dim, s.mean.data(), dim);
        coarse[(base + lane) * n + j] = at_mean + log_tokens;
        s.estimate[(base + lane) * n + j] = at_mean + best[lane] + std::log(mass[lane]);
      }
    }
  }
}

// s.order: the budget's best candidates, ascending; equal scores go to the lower one.
void choose(const Row& row, int64_t group, Scratch& s) {
  const int64_t n = row.last - row.first;
  s.score.assign(n, kMinusInfinity);
  for (int64_t g = 0; g < group; ++g) {
    const float* estimate = s.estimate.data() + g * n;
    const float whole = log_sum_exp(estimate, n);
    for (int64_t j = 0; j < n; ++j) s.score[j] = std::max(s.score[j], estimate[j] - whole);
  }
  s.order.resize(n);
  for (int64_t j = 0; j < n; ++j) s.order[j] = j;
  const float* score = s.score.data();
  std::nth_element(s.order.begin(), s.order.begin() + row.budget, s.order.end(), [score](int64_t a, int64_t b) {
    return score[a] > score[b] || (score[a] == score[b] && a < b);
  });
  s.order.resize(row.budget);
  std::sort(s.order.begin(), s.order.end());
}

// Slots of s.blocks; with recall the missing ones get a slot (and stay negative, as -2 - slot, so that the caller knows what
// to fetch), without it they are -1. Returns how many were missing, -1 if there was no room for them.
template <typename Entry>
int64_t make_resident(const Layer& layer, const Row& row, int64_t head, Scratch& s) {
  const int64_t pair = row.table_row * layer.num_heads + head;
  Entry* held = static_cast<Entry*>(layer.block_in_slot) + pair * layer.max_slots;
  Entry* here = static_cast<Entry*>(layer.slot_of_block) + pair * layer.max_blocks;
  int32_t* stamps = layer.last_selected + pair * layer.max_slots;
  int64_t missing = 0;
  for (size_t i = 0; i < s.blocks.size(); ++i) {
    s.slots[i] = here[s.blocks[i]];
    if (s.slots[i] < 0) ++missing;
    else stamps[s.slots[i]] = int32_t(row.tick);
  }
  if (missing == 0 || !row.recall) return missing;
  s.victims.clear();
  for (int64_t slot = 0; slot < row.num_slots; ++slot) {
    if (held[slot] < 0) s.victims.emplace_back(-2, int32_t(slot));
    else if (held[slot] >= row.first && held[slot] < row.last && stamps[slot] != row.tick)
      s.victims.emplace_back(stamps[slot], int32_t(slot));
  }
  if (int64_t(s.victims.size()) < missing) return -1;
  std::partial_sort(s.victims.begin(), s.victims.begin() + missing, s.victims.end());
  int64_t next = 0;
  for (size_t i = 0; i < s.blocks.size(); ++i) {
    if (s.slots[i] >= 0) continue;
    const int64_t slot = s.victims[next++].second, block = s.blocks[i];
    if (held[slot] >= 0) here[held[slot]] = -1;
    held[slot] = Entry(block);
    here[block] = Entry(slot);
    stamps[slot] = int32_t(row.tick);
    s.slots[i] = -2 - slot;
  }
  return missing;
}

void attend(const Layer& layer, const Row& row, const SketchLayer* sketch, const Work& work, int64_t pair, const float* q,
            float* out, Scratch& s) {
  const int64_t head = pair % layer.num_heads, group = layer.group, dim = layer.head_dim, tokens = layer.block_size;
  const int64_t count = work.num_blocks[pair], n = row.last - row.first, size = 2 * tokens * dim;
  const int64_t length = (count - 1) * tokens + row.position % tokens + 1;
  const int64_t* pages = work.pages + pair * work.max_blocks;
  const int64_t* chosen = work.chosen + pair * work.max_chosen;
  const int64_t* chosen_end = chosen + work.num_chosen[pair];
  float* coarse = work.coarse + pair * group * work.max_candidates;
  const BlockLoops loops = loops_for(dim);
  s.logits.resize(group * length);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = i * tokens, here = std::min(tokens, length - begin);
    const float* keys = pages[i] < 0 ? nullptr : layer.pool + (pages[i] * layer.num_heads + head) * size;
    if (keys != nullptr) loops.score_tokens(q, keys, here, group, dim, s.logits.data() + begin, length);
    else
      for (int64_t g = 0; g < group; ++g) std::fill_n(s.logits.data() + g * length + begin, here, kMinusInfinity);
  }
  const bool has_tail = sketch != nullptr && sketch->kind != kMinMax;
  double missed = 0;
  s.token.resize(group);
  for (int64_t g = 0; g < group; ++g) {
    float* inside = s.logits.data() + g * length;
    float* outside = coarse + g * n;
    float best = max_of(inside, length);
    if (has_tail) {
      for (const int64_t* at = chosen; at != chosen_end; ++at) outside[*at] = kMinusInfinity;
      best = std::max(best, max_of(outside, n));
    }
    const float mass = exponentiate(inside, length, best);
    const float left_out = has_tail ? exponentiate(outside, n, best) : 0.0f;
    missed += left_out / (mass + left_out);
    s.token[g] = 1.0f / (mass + (row.use_tail ? left_out : 0.0f));
  }
  if (has_tail) work.missed_mass[pair] += missed;
  std::fill(out, out + group * dim, 0.0f);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = i * tokens, here = std::min(tokens, length - begin);
    if (pages[i] < 0) continue;
    const float* values = layer.pool + (pages[i] * layer.num_heads + head) * size + tokens * dim;
    loops.add_values(s.logits.data() + begin, length, values, here, group, dim, out);
  }
  if (has_tail && row.use_tail) {
    const int64_t* next = chosen;
    for (int64_t j = 0; j < n; ++j) {
      if (next != chosen_end && *next == j) {
        ++next;
        continue;
      }
      const int64_t at = row.host_blocks[row.first + j] * layer.num_heads + head;
      const int8_t* mean = sketch->means + (at * 2 + 1) * dim;
      const float mean_scale = half_to_float(sketch->mean_scales[at * 2 + 1]);
      for (int64_t g = 0; g < group; ++g) {
        const float weight = coarse[g * n + j] * mean_scale;
        float* sum = out + g * dim;
#pragma omp simd
        for (int64_t d = 0; d < dim; ++d) sum[d] += weight * mean[d];
      }
    }
  }
  for (int64_t g = 0; g < group; ++g)
    for (int64_t d = 0; d < dim; ++d) out[g * dim + d] *= s.token[g];
}

const SketchLayer* sketch_of(const Row& row, int64_t layer_index) {
  const bool selects = row.budget >= 0 && row.last - row.first > row.budget;
  return selects ? row.sketches + layer_index : nullptr;
}

void scale_query(const Layer& layer, const float* q, Scratch& s) {
  const float scale = 1.0f / std::sqrt(float(layer.head_dim));
  s.query.resize(layer.group * layer.head_dim);
  for (size_t d = 0; d < s.query.size(); ++d) s.query[d] = q[d] * scale;
}

}  // namespace

extern "C" {

// q [row, head, group, head_dim] roped. Fills `work`; returns how many blocks must be fetched before oasis_attend, or -1 if a
// row had too few slots (admission is there to prevent it).
int64_t oasis_select(const Layer* layer, int64_t layer_index, const Row* rows, int64_t num_rows, const float* q,
                     const Work* work, int64_t num_threads) {
  const int64_t heads = layer->num_heads, pairs = num_rows * heads, width = layer->group * layer->head_dim;
  std::vector<char> fits(pairs);
  std::vector<int64_t> requests;  // first row of each: rows of one request share its tables and go in turn
  for (int64_t r = 0; r < num_rows; ++r)
    if (r == 0 || rows[r].table_row != rows[r - 1].table_row) requests.push_back(r);
  requests.push_back(num_rows);
  std::vector<std::vector<std::pair<int64_t, int64_t>>> wanted(pairs);  // host block, page
#pragma omp parallel num_threads(num_threads)
  {
    Scratch s;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < int64_t(requests.size() - 1) * heads; ++item)
      for (int64_t r = requests[item / heads]; r < requests[item / heads + 1]; ++r) {
      const Row& row = rows[r];
      const int64_t head = item % heads, pair = r * heads + head, open = row.position / layer->block_size;
      s.order.clear();
      s.blocks.clear();
      if (const SketchLayer* sketch = sketch_of(row, layer_index)) {
        scale_query(*layer, q + pair * width, s);
        float* coarse = work->coarse + pair * layer->group * work->max_candidates;
        score_candidates(*layer, row, *sketch, head, s.query.data(), coarse, s);
        choose(row, layer->group, s);
        for (int64_t block = 0; block < row.first; ++block) s.blocks.push_back(block);
        for (int64_t chosen : s.order) s.blocks.push_back(row.first + chosen);
        for (int64_t block = row.last; block <= open; ++block) s.blocks.push_back(block);
      } else {
        for (int64_t block = 0; block <= open; ++block) s.blocks.push_back(block);
      }
      s.slots = s.blocks;
      int64_t missing = 0;
      if (!row.resident)
        missing = layer->wide_tables ? make_resident<int32_t>(*layer, row, head, s)
                                     : make_resident<int16_t>(*layer, row, head, s);
      work->num_blocks[pair] = int64_t(s.blocks.size());
      work->num_chosen[pair] = int64_t(s.order.size());
      std::copy(s.order.begin(), s.order.end(), work->chosen + pair * work->max_chosen);
      work->missed_blocks[pair] += missing;
      fits[pair] = missing >= 0;
      int64_t* pages = work->pages + pair * work->max_blocks;
      for (size_t i = 0; i < s.slots.size(); ++i) {
        const int64_t slot = s.slots[i] <= -2 ? -2 - s.slots[i] : s.slots[i];
        pages[i] = slot < 0 ? -1 : row.pages[slot];
        if (s.slots[i] <= -2) wanted[pair].emplace_back(row.host_blocks[s.blocks[i]], pages[i]);
      }
    }
  }
  int64_t total = 0, room = pairs * work->max_blocks;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (!fits[pair]) return -1;
    for (const auto& [host_block, page] : wanted[pair]) {
      work->loads[total] = pair % heads;
      work->loads[room + total] = host_block;
      work->loads[2 * room + total] = page;
      ++total;
    }
  }
  return total;
}

// out like q. Every page named in `work` holds its block now.
void oasis_attend(const Layer* layer, int64_t layer_index, const Row* rows, int64_t num_rows, const float* q,
                  const Work* work, float* out, int64_t num_threads) {
  const int64_t heads = layer->num_heads, pairs = num_rows * heads, width = layer->group * layer->head_dim;
#pragma omp parallel num_threads(num_threads)
  {
    Scratch s;
#pragma omp for schedule(dynamic, 1)
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const Row& row = rows[pair / heads];
      scale_query(*layer, q + pair * width, s);
      attend(*layer, row, sketch_of(row, layer_index), *work, pair, s.query.data(), out + pair * width, s);
    }
  }
}

}  // extern "C"
