// What the select and attend kernels of the CPU share: the step as kernels/cpu.py lays it out.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "cpu_math.h"

enum SketchKind : int64_t { kMinMax = 0, kOneBit = 1, kTwoBit = 2 };

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
  float* pool;  // [page, head, K|V, token, head_dim]
  int64_t wide_tables;  // 0: int16 tables, 1: int32
  void* block_in_slot;  // [row, head, max_slots], -1 = empty
  void* slot_of_block;  // [row, head, max_blocks], -1 = not resident
  int32_t* last_selected;  // [row, head, max_slots]
  int32_t* fetched;        // [row, head, max_slots]: tick of the background load into a slot, -1 = none, or selected since
  int64_t max_slots, max_blocks;
  int64_t in_flight;  // tick of the background load under way, kNothing = none
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
  int64_t probe;  // attends what has landed and fetches nothing on the path
  int64_t reach, fetch_limit;  // > 0: give slots to at most fetch_limit of the `reach` best blocks, for a background load
};

struct Work {  // what oasis_select leaves for the copies and for oasis_attend; a pair is a (row, head)
  int64_t max_blocks, max_chosen, max_candidates;
  int64_t* num_blocks;  // [pair]
  int64_t* pages;       // [pair, max_blocks]: of the attended blocks in ascending id, -1 = left out
  int64_t* num_chosen;  // [pair]
  int64_t* chosen;      // [pair, max_chosen]: positions among the candidates, ascending
  float* estimate;      // [pair, group * max_candidates], used as [group, candidates]: estimated log mass of each
  float* coarse;        // [pair, group * max_candidates], used as [group, candidates]: q·mean + log B of each
  int64_t* loads;       // [3, pair * max_blocks]: head, host block and page of what must be fetched
  double* missed_mass;     // [pair], added to: estimated mass outside, summed over the group
  int64_t* missed_blocks;  // [pair], added to
  int64_t max_fetches;
  int64_t* fetches;      // [3, pair * max_fetches]: head, host block and page of what the background may load
  int64_t* num_fetches;  // [pair]
  int64_t* prefetched;   // [pair, 3], added to: blocks ordered, selected after they landed, selected before
  int64_t* must_wait;    // [1]: a selected block, or a slot that is overwritten, is in flight
};

constexpr int64_t kNothing = -2;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Fills work.estimate and, for sketches with means, work.coarse of every row that selects.
void score_rows(const Layer& layer, int64_t layer_index, const Row* rows, int64_t num_rows, const float* q, const Work& work,
                int64_t num_threads);

// score [n] from log masses [group, n]: the largest share that any query head gives a block, in the log domain.
inline void group_scores(const float* log_mass, int64_t group, int64_t n, float* score) {
  std::fill_n(score, n, kMinusInfinity);
  for (int64_t g = 0; g < group; ++g) {
    const float whole = log_sum_exp(log_mass + g * n, n);
    for (int64_t j = 0; j < n; ++j) score[j] = std::max(score[j], log_mass[g * n + j] - whole);
  }
}

struct Better {  // of two candidates; equal scores go to the lower one
  const float* score;
  bool operator()(int64_t a, int64_t b) const { return score[a] > score[b] || (score[a] == score[b] && a < b); }
};

// best: the `count` best of the candidates, ascending; there are more than that. `sorted` is a buffer.
inline void keep_best(const std::vector<float>& score, int64_t count, std::vector<float>& sorted, std::vector<int64_t>& best) {
  best.clear();
  if (count == 0) return;
  sorted = score;
  std::nth_element(sorted.begin(), sorted.begin() + count - 1, sorted.end(), std::greater<float>());
  const float least = sorted[count - 1];
  int64_t equal = count - std::count_if(score.begin(), score.end(), [&](float x) { return x > least; });
  for (size_t j = 0; j < score.size(); ++j)
    if (score[j] > least || (score[j] == least && equal-- > 0)) best.push_back(int64_t(j));
}

inline const SketchLayer* sketch_of(const Row& row, int64_t layer_index) {
  const bool selects = row.budget >= 0 && row.last - row.first > row.budget;
  return selects ? row.sketches + layer_index : nullptr;
}
