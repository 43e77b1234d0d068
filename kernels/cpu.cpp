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

#include "cpu_block.h"
#include "cpu_decode.h"
#include "cpu_math.h"

namespace {

constexpr int64_t kTogether = 4;  // blocks whose keys are read before their values, and meanwhile these are asked for
constexpr int64_t kTailTogether = 16;  // mean values that are added at once

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

struct Scratch {
  std::vector<float> score, sorted;
  std::vector<Line> query, logits, values;
  std::vector<int64_t> order, ranked, blocks, slots;
  std::vector<std::pair<int32_t, int32_t>> victims;
  std::vector<std::pair<int64_t, int64_t>> ahead;  // block, slot
};

// s.order: the budget's best candidates by their estimates [group, n], ascending; equal scores go to the lower one.
// For a row that looks ahead, s.ranked: the `reach` best, best first.
void choose(const Row& row, int64_t group, const float* estimates, Scratch& s) {
  const int64_t n = row.last - row.first;
  s.score.resize(n);
  group_scores(estimates, group, n, s.score.data());
  keep_best(s.score, row.budget, s.sorted, s.order);
  s.ranked.clear();
  if (row.fetch_limit > 0) {
    s.ranked.resize(n);
    for (int64_t j = 0; j < n; ++j) s.ranked[j] = j;
    const int64_t reach = std::min(n, row.reach);
    std::partial_sort(s.ranked.begin(), s.ranked.begin() + reach, s.ranked.end(), Better{s.score.data()});
    s.ranked.resize(reach);
  }
}

// The residency of one (row, head).
template <typename Entry>
struct Tables {
  Entry *held, *here;
  int32_t *stamps, *fetched;

  Tables(const Layer& layer, const Row& row, int64_t head) {
    const int64_t pair = row.table_row * layer.num_heads + head;
    held = static_cast<Entry*>(layer.block_in_slot) + pair * layer.max_slots;
    here = static_cast<Entry*>(layer.slot_of_block) + pair * layer.max_blocks;
    stamps = layer.last_selected + pair * layer.max_slots;
    fetched = layer.fetched + pair * layer.max_slots;
  }

  // `wanted` slots that hold candidates (or nothing) and were not selected in this step, least recently selected first;
  // slots in flight last.
  void find_victims(const Row& row, int64_t in_flight, int64_t wanted, std::vector<std::pair<int32_t, int32_t>>& victims) {
    victims.clear();
    for (int64_t slot = 0; slot < row.num_slots; ++slot) {
      if (held[slot] < 0) victims.emplace_back(-2, int32_t(slot));
      else if (held[slot] >= row.first && held[slot] < row.last && stamps[slot] != row.tick)
        victims.emplace_back(fetched[slot] == in_flight ? std::numeric_limits<int32_t>::max() : stamps[slot], int32_t(slot));
    }
    const int64_t count = std::min(wanted, int64_t(victims.size()));
    std::partial_sort(victims.begin(), victims.begin() + count, victims.end());
    victims.resize(count);
  }

  void put(const Row& row, int64_t block, int64_t slot, int64_t tick_of_load) {
    if (held[slot] >= 0) here[held[slot]] = -1;
    held[slot] = Entry(block);
    here[block] = Entry(slot);
    stamps[slot] = int32_t(row.tick);
    fetched[slot] = int32_t(tick_of_load);
  }
};

// Slots of s.blocks; with recall the missing ones get a slot (and stay negative, as -2 - slot, so that the caller knows what
// to fetch), without it they are -1, and for a probe also those in flight. Returns how many were missing, -1 if there was no
// room for them.
template <typename Entry>
int64_t make_resident(const Layer& layer, const Row& row, int64_t head, int64_t* prefetched, bool& must_wait, Scratch& s) {
  Tables<Entry> tables(layer, row, head);
  int64_t missing = 0;
  for (size_t i = 0; i < s.blocks.size(); ++i) {
    const int64_t slot = s.slots[i] = tables.here[s.blocks[i]];
    if (slot < 0) {
      ++missing;
      continue;
    }
    tables.stamps[slot] = int32_t(row.tick);
    if (tables.fetched[slot] < 0) continue;
    const bool late = tables.fetched[slot] == layer.in_flight;
    if (row.probe) {
      if (late) s.slots[i] = -1;
      continue;
    }
    ++prefetched[late ? 2 : 1];
    must_wait |= late;
    tables.fetched[slot] = -1;
  }
  if (missing == 0 || !row.recall || row.probe) return missing;
  tables.find_victims(row, layer.in_flight, missing, s.victims);
  if (int64_t(s.victims.size()) < missing) return -1;
  int64_t next = 0;
  for (size_t i = 0; i < s.blocks.size(); ++i) {
    if (s.slots[i] >= 0) continue;
    const int64_t slot = s.victims[next++].second;
    must_wait |= tables.fetched[slot] == layer.in_flight;
    tables.put(row, s.blocks[i], slot, -1);
    s.slots[i] = -2 - slot;
  }
  return missing;
}

// Slots for the missing ones of s.ranked, as far as limit and victims go: what to load in the background.
template <typename Entry>
void fetch_ahead(const Layer& layer, const Row& row, int64_t head, Scratch& s) {
  Tables<Entry> tables(layer, row, head);
  s.ahead.clear();
  for (size_t i = 0; i < s.ranked.size() && int64_t(s.ahead.size()) < row.fetch_limit; ++i)
    if (tables.here[row.first + s.ranked[i]] < 0) s.ahead.emplace_back(row.first + s.ranked[i], -1);
  tables.find_victims(row, kNothing, int64_t(s.ahead.size()), s.victims);
  s.ahead.resize(s.victims.size());
  for (size_t i = 0; i < s.ahead.size(); ++i) {
    s.ahead[i].second = s.victims[i].second;
    tables.put(row, s.ahead[i].first, s.ahead[i].second, row.tick);
  }
}

void store_token(const Layer& layer, const Row& row, int64_t head, int64_t row_index, const float* k, const float* v) {
  const int64_t open = row.position / layer.block_size, offset = row.position % layer.block_size;
  const int64_t at = (row.table_row * layer.num_heads + head) * layer.max_blocks + open, dim = layer.head_dim;
  int64_t slot = open;
  if (!row.resident)
    slot = layer.wide_tables ? static_cast<int32_t*>(layer.slot_of_block)[at] : static_cast<int16_t*>(layer.slot_of_block)[at];
  float* keys = layer.pool + (row.pages[slot] * layer.num_heads + head) * 2 * layer.block_size * dim;
  const int64_t from = (row_index * layer.num_heads + head) * dim;
  std::copy(k + from, k + from + dim, keys + offset * dim);
  std::copy(v + from, v + from + dim, keys + (layer.block_size + offset) * dim);
}

// The weighted values of what one (row, head) attends, [group, dim], before they are divided by the weights' sum. Weights
// are exp(logit - best): `best` grows as logits are met.
struct Sums {
  int64_t group, dim;
  float* out;
  std::vector<float> best, mass;

  Sums(int64_t group, int64_t dim, float* out)
      : group(group), dim(dim), out(out), best(group, kMinusInfinity), mass(group, 0.0f) {
    std::fill_n(out, group * dim, 0.0f);
  }

  void meet(int64_t g, float logit) {
    if (logit <= best[g]) return;
    const float scale = exp_negative(best[g] - logit);
    for (int64_t d = 0; d < dim; ++d) out[g * dim + d] *= scale;
    mass[g] *= scale;
    best[g] = logit;
  }
};

void attend_pages(const Layer& layer, const Row& row, const Work& work, int64_t pair, const float* q, Sums& sums,
                  Scratch& s) {
  const int64_t head = pair % layer.num_heads, group = layer.group, dim = layer.head_dim, tokens = layer.block_size;
  const int64_t count = work.num_blocks[pair], size = 2 * tokens * dim, stride = kTogether * tokens;
  const int64_t* pages = work.pages + pair * work.max_blocks;
  const BlockLoops loops = loops_for(dim);
  float* logits = room_for(group * stride, s.logits);
  const auto block_at = [&](int64_t i) {  // its keys, then its values
    return i < count && pages[i] >= 0 ? layer.pool + (pages[i] * layer.num_heads + head) * size : nullptr;
  };
  const auto tokens_of = [&](int64_t i) { return i < count - 1 ? tokens : row.position % tokens + 1; };
  for (int64_t first = 0; first < count; first += kTogether) {
    const int64_t last = std::min(count, first + kTogether);
    int64_t length = 0;
    for (int64_t i = first; i < last; ++i) {
      const float* keys = block_at(i);
      if (keys == nullptr) continue;
      loops.score_tokens(q, keys, tokens_of(i), group, dim, logits + length, stride, keys + tokens * dim);
      length += tokens_of(i);
    }
    if (length == 0) continue;
    for (int64_t g = 0; g < group; ++g) {
      sums.meet(g, max_of(logits + g * stride, length));
      sums.mass[g] += exponentiate(logits + g * stride, length, sums.best[g]);
    }
    length = 0;
    for (int64_t i = first; i < last; ++i) {
      const float* keys = block_at(i);
      if (keys == nullptr) continue;
      loops.add_values(logits + length, stride, keys + tokens * dim, tokens_of(i), group, dim, sums.out,
                       block_at(i + kTogether));
      length += tokens_of(i);
    }
  }
}

// The candidates left out, by their mean values; weights [group, n].
void add_tail(const Layer& layer, const Row& row, const SketchLayer& sketch, const Work& work, int64_t pair,
              const float* weights, float* out, Scratch& s) {
  const int64_t head = pair % layer.num_heads, group = layer.group, dim = layer.head_dim, n = row.last - row.first;
  const int64_t *next = work.chosen + pair * work.max_chosen, *end = next + work.num_chosen[pair];
  const BlockLoops loops = loops_for(dim);
  float* values = room_for(kTailTogether * dim, s.values);
  float* scaled = room_for(kTailTogether * group, s.logits);
  int64_t count = 0;
  const auto place = [&](int64_t j) {
    return (row.host_blocks[row.first + std::min(j, n - 1)] * layer.num_heads + head) * 2 + 1;
  };
  for (int64_t j = 0; j < n; ++j) {
    prefetch(sketch.means + place(j + kTailTogether) * dim, dim);
    if (next != end && *next == j) {
      ++next;
    } else {
      const int64_t at = place(j);
      const int8_t* mean = sketch.means + at * dim;
      const float mean_scale = half_to_float(sketch.mean_scales[at]);
#pragma omp simd
      for (int64_t d = 0; d < dim; ++d) values[count * dim + d] = mean[d];
      for (int64_t g = 0; g < group; ++g) scaled[g * kTailTogether + count] = weights[g * n + j] * mean_scale;
      ++count;
    }
    if (count < kTailTogether && j + 1 < n) continue;
    loops.add_values(scaled, kTailTogether, values, count, group, dim, out, nullptr);
    count = 0;
  }
}

void attend(const Layer& layer, const Row& row, const SketchLayer* sketch, const Work& work, int64_t pair, const float* q,
            float* out, Scratch& s) {
  const int64_t group = layer.group, dim = layer.head_dim, n = row.last - row.first;
  Sums sums(group, dim, out);
  attend_pages(layer, row, work, pair, q, sums, s);
  if (sketch != nullptr && sketch->kind != kMinMax) {
    const int64_t *chosen = work.chosen + pair * work.max_chosen, *chosen_end = chosen + work.num_chosen[pair];
    float* coarse = work.coarse + pair * group * work.max_candidates;
    double missed = 0;
    for (int64_t g = 0; g < group; ++g) {
      float* outside = coarse + g * n;
      for (const int64_t* at = chosen; at != chosen_end; ++at) outside[*at] = kMinusInfinity;
      sums.meet(g, max_of(outside, n));
      const float left_out = exponentiate(outside, n, sums.best[g]);
      missed += left_out / (sums.mass[g] + left_out);
      if (row.use_tail) sums.mass[g] += left_out;
    }
    work.missed_mass[pair] += missed;
    if (row.use_tail) add_tail(layer, row, *sketch, work, pair, coarse, out, s);
  }
  for (int64_t g = 0; g < group; ++g)
    for (int64_t d = 0; d < dim; ++d) out[g * dim + d] /= sums.mass[g];
}

const float* scale_query(const Layer& layer, const float* q, Scratch& s) {
  const float scale = 1.0f / std::sqrt(float(layer.head_dim));
  float* scaled = room_for(layer.group * layer.head_dim, s.query);
  for (int64_t d = 0; d < layer.group * layer.head_dim; ++d) scaled[d] = q[d] * scale;
  return scaled;
}

}  // namespace

extern "C" {

// q [row, head, group, head_dim] and k [row, head, head_dim] roped, v like k. The rows' tokens go to their blocks' pages, whose
// slots the tables name. Fills `work`; returns how many blocks must be fetched before oasis_attend, or -1 if a
// row had too few slots (admission is there to prevent it). With must_wait the background load comes first.
int64_t oasis_select(const Layer* layer, int64_t layer_index, const Row* rows, int64_t num_rows, const float* q,
                     const float* k, const float* v, const Work* work, int64_t num_threads) {
  const int64_t heads = layer->num_heads, pairs = num_rows * heads;
  std::vector<char> fits(pairs), waits(pairs);
  std::vector<int64_t> requests;  // first row of each: rows of one request share its tables and go in turn
  for (int64_t r = 0; r < num_rows; ++r)
    if (r == 0 || rows[r].table_row != rows[r - 1].table_row) requests.push_back(r);
  requests.push_back(num_rows);
  std::vector<std::vector<std::pair<int64_t, int64_t>>> wanted(pairs);  // host block, page
  score_rows(*layer, layer_index, rows, num_rows, q, *work, num_threads);
#pragma omp parallel num_threads(num_threads)
  {
    thread_local Scratch s;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < int64_t(requests.size() - 1) * heads; ++item) {
      for (int64_t r = requests[item / heads]; r < requests[item / heads + 1]; ++r)
        store_token(*layer, rows[r], item % heads, r, k, v);
      for (int64_t r = requests[item / heads]; r < requests[item / heads + 1]; ++r) {
        const Row& row = rows[r];
        const int64_t head = item % heads, pair = r * heads + head, open = row.position / layer->block_size;
        s.order.clear();
        s.ranked.clear();
        s.blocks.clear();
        if (sketch_of(row, layer_index) != nullptr) {
          choose(row, layer->group, work->estimate + pair * layer->group * work->max_candidates, s);
          for (int64_t block = 0; block < row.first; ++block) s.blocks.push_back(block);
          for (int64_t chosen : s.order) s.blocks.push_back(row.first + chosen);
          for (int64_t block = row.last; block <= open; ++block) s.blocks.push_back(block);
        } else {
          for (int64_t block = 0; block <= open; ++block) s.blocks.push_back(block);
        }
        s.slots = s.blocks;
        s.ahead.clear();
        int64_t missing = 0;
        bool must_wait = false;
        if (!row.resident) {
          int64_t* prefetched = work->prefetched + pair * 3;
          missing = layer->wide_tables ? make_resident<int32_t>(*layer, row, head, prefetched, must_wait, s)
                                       : make_resident<int16_t>(*layer, row, head, prefetched, must_wait, s);
          if (row.fetch_limit > 0 && layer->in_flight == kNothing)
            layer->wide_tables ? fetch_ahead<int32_t>(*layer, row, head, s) : fetch_ahead<int16_t>(*layer, row, head, s);
          prefetched[0] += int64_t(s.ahead.size());
        }
        waits[pair] = must_wait;
        work->num_fetches[pair] = int64_t(s.ahead.size());
        for (size_t i = 0; i < s.ahead.size(); ++i) {
          int64_t* fetch = work->fetches + pair * work->max_fetches + i;
          const int64_t room = pairs * work->max_fetches;
          fetch[0] = head;
          fetch[room] = row.host_blocks[s.ahead[i].first];
          fetch[2 * room] = row.pages[s.ahead[i].second];
        }
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
  }
  int64_t total = 0, room = pairs * work->max_blocks;
  *work->must_wait = 0;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    if (!fits[pair]) return -1;
    *work->must_wait |= waits[pair];
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
    thread_local Scratch s;
#pragma omp for schedule(dynamic, 1)
    for (int64_t pair = 0; pair < pairs; ++pair) {
      const Row& row = rows[pair / heads];
      const float* scaled = scale_query(*layer, q + pair * width, s);
      attend(*layer, row, sketch_of(row, layer_index), *work, pair, scaled, out + pair * width, s);
    }
  }
}

// target[targets[i]] = source[sources[i]], whole blocks.
void oasis_copy_blocks(char* target, const int64_t* targets, const char* source, const int64_t* sources, int64_t count,
                       int64_t block_bytes, int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1)
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(target + targets[i] * block_bytes, source + sources[i] * block_bytes, block_bytes);
}

}  // extern "C"
