// Paged attention over one run of keys, for a group of query rows that share a kv head.
//
//   score[r][k] = q[r] . K[k]          p[r][k] = e^(score - maximum)
//   sum[r]      = sum over k of p      weighted[r] = sum over k of p * V[k]
//
// Keys are taken in tiles of up to 16 at absolute positions. In a tile every row does the same
// operations in the same order, whoever shares the tile with it:
//   - a score is two chains of multiply-adds, over even and over odd dimensions, then their sum;
//   - the running maximum is that of whole tiles; when it grows, sums are scaled down;
//   - values are added key by key.
// Up to kRowsMax rows go through a tile together, so each K and V load serves all of them: that is
// how the query heads of a group, and the tokens of a chunk, share their kv head. Bytes moved per
// key: those of its K and V, once per group of rows.
//
// Blocks lie anywhere in memory, so the hardware's prefetching ends with every region. While a tile
// is computed, the same tile of a later region is fetched, a cache line at a time between the
// multiplications: in one burst the lines would wait for each other.

#include "core/cpu/isa/table.h"
#include "core/cpu/isa/vec.h"

namespace kvledger::cpu::KVL_ISA {
namespace {

constexpr int kTile = 16;
constexpr int kCacheLine = 64;
// How many regions ahead memory is fetched: two take about as long to compute as one to arrive.
constexpr int kRegionsAhead = 3;
constexpr float kLowest = -__builtin_inff();

// Keys and values of one tile.
struct Tile {
  const char* keys;
  const char* values;
  const char* next_keys;  // what to fetch meanwhile
  const char* next_values;
  int stride;  // slots that a row of the K tile holds
  int count;   // keys that may be read
};

// Two dimensions of the tile's keys, 2 * pair and 2 * pair + 1.
template <class Element>
struct Keys;

template <>
struct Keys<float> {
  const float* p;

  KVL_INLINE Keys at(const Tile& tile, int pair) {
    return {reinterpret_cast<const float*>(tile.keys) + int64_t{2} * pair * tile.stride};
  }
  template <bool kWhole>
  KVL_INLINE F32 even(Keys keys, const Tile& tile) {
    return kWhole ? load(keys.p) : load_first(keys.p, tile.count);
  }
  template <bool kWhole>
  KVL_INLINE F32 odd(Keys keys, const Tile& tile) {
    return even<kWhole>({keys.p + tile.stride}, tile);
  }
};

template <>
struct Keys<uint16_t> {
  const uint32_t* p;

  KVL_INLINE Keys at(const Tile& tile, int pair) {
    return {reinterpret_cast<const uint32_t*>(tile.keys) + int64_t{pair} * tile.stride};
  }
  template <bool kWhole>
  KVL_INLINE F32 even(Keys keys, const Tile& tile) {
    return bf16_low(kWhole ? load(keys.p) : load_first(keys.p, tile.count));
  }
  template <bool kWhole>
  KVL_INLINE F32 odd(Keys keys, const Tile& tile) {
    return bf16_high(kWhole ? load(again(keys.p)) : load_first(again(keys.p), tile.count));
  }
};

KVL_INLINE F32 load_values(const float* p) {
  return load(p);
}
KVL_INLINE F32 load_values(const uint16_t* p) {
  return load_bf16(p);
}

// The running results of some consecutive rows.
struct Rows {
  const float* queries;
  float* maximum;
  float* sum;       // [rows][kTile], a lane each until the end
  float* weighted;  // [rows][head_dim]
};

// Which of the tile's dimensions a chain of multiply-adds takes.
enum class Dimensions { kEven, kOdd, kBoth };

// even_sum[r] += q[r] . K over even dimensions, odd_sum[r] over odd ones, or only one of them.
template <class Element, int kRows, bool kWhole, Dimensions kWhich>
KVL_INLINE void add_products(const Tile& tile, const float* queries, int head_dim,
                             F32 (&even_sum)[kRows], F32 (&odd_sum)[kRows]) {
  const int pairs = head_dim / 2;
  const int64_t pair_bytes = int64_t{tile.stride} * 2 * static_cast<int64_t>(sizeof(Element));
  for (int pair = 0; pair < pairs; ++pair) {
    if (kWhich != Dimensions::kOdd) {
      prefetch(tile.next_keys + pair * pair_bytes);
      if (sizeof(Element) == 4) {
        prefetch(tile.next_keys + pair * pair_bytes + kCacheLine);
      }
    }
    const Keys<Element> keys = Keys<Element>::at(tile, pair);
    const float* q = queries + int64_t{2} * pair;
    if (kWhich != Dimensions::kOdd) {
      const F32 even = Keys<Element>::template even<kWhole>(keys, tile);
      for (int r = 0; r < kRows; ++r) {
        even_sum[r] = fma(splat(q[int64_t{r} * head_dim]), even, even_sum[r]);
      }
    }
    if (kWhich != Dimensions::kEven) {
      const F32 odd = Keys<Element>::template odd<kWhole>(keys, tile);
      for (int r = 0; r < kRows; ++r) {
        odd_sum[r] = fma(splat(q[int64_t{r} * head_dim + 1]), odd, odd_sum[r]);
      }
    }
  }
}

// Both chains at once hide each other's latency where rows are few; many rows hide it themselves,
// and one chain after the other leaves their sums in registers.
template <class Element, int kRows, bool kWhole>
KVL_INLINE void scores(const Tile& tile, const float* queries, int head_dim, F32 (&score)[kRows]) {
  F32 even_sum[kRows];
  F32 odd_sum[kRows];
  for (int r = 0; r < kRows; ++r) {
    even_sum[r] = zero();
    odd_sum[r] = zero();
  }
  if (2 * kRows <= kSumsMax) {
    add_products<Element, kRows, kWhole, Dimensions::kBoth>(tile, queries, head_dim, even_sum,
                                                            odd_sum);
  } else {
    add_products<Element, kRows, kWhole, Dimensions::kEven>(tile, queries, head_dim, even_sum,
                                                            odd_sum);
    add_products<Element, kRows, kWhole, Dimensions::kOdd>(tile, queries, head_dim, even_sum,
                                                           odd_sum);
  }
  for (int r = 0; r < kRows; ++r) {
    score[r] = add(even_sum[r], odd_sum[r]);
  }
}

KVL_INLINE void scale_row(float* weighted, int head_dim, F32 factor) {
  for (int d = 0; d < head_dim; d += kTile) {
    store(weighted + d, mul(load(weighted + d), factor));
  }
}

// Turns the scores of one row into weights, and rescales its sums if the maximum grew.
template <bool kWhole>
KVL_INLINE void softmax_row(F32 score, int count, int head_dim, float* maximum, float* sum,
                            float* weighted, float* weights) {
  const float highest =
      kWhole ? reduce_max(score) : reduce_max(select_first(count, score, splat(kLowest)));
  if (highest > *maximum) {
    const F32 factor = exp(splat(*maximum - highest));
    *maximum = highest;
    store(sum, mul(load(sum), factor));
    scale_row(weighted, head_dim, factor);
  }
  F32 weight = exp(sub(score, splat(*maximum)));
  if (!kWhole) {
    weight = select_first(count, weight, zero());
  }
  store(sum, add(load(sum), weight));
  store(weights, weight);
}

// weighted[r][d..] += sum over keys of weights[r][k] * V[k][d..], for kVectors vectors at `d`.
template <class Element, int kRows, int kVectors>
KVL_INLINE void add_values(const Element* values, const Element* next, int count, int head_dim,
                           const float (&weights)[kRows][kTile], float* weighted) {
  F32 total[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kVectors; ++j) {
      total[r][j] = load(weighted + int64_t{r} * head_dim + j * kTile);
    }
  }
  for (int k = 0; k < count; ++k) {
    for (int j = 0; j < kVectors * kTile; j += kCacheLine / static_cast<int>(sizeof(Element))) {
      prefetch(next + int64_t{k} * head_dim + j);
    }
    for (int j = 0; j < kVectors; ++j) {
      const F32 value = load_values(values + int64_t{k} * head_dim + j * kTile);
      const float* weight = again(&weights[0][k]);
      for (int r = 0; r < kRows; ++r) {
        total[r][j] = fma(splat(weight[r * kTile]), value, total[r][j]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < kVectors; ++j) {
      store(weighted + int64_t{r} * head_dim + j * kTile, total[r][j]);
    }
  }
}

template <class Element, int kRows, bool kWhole>
void attend_tile(const Tile& tile, const Rows& rows, int head_dim) {
  F32 score[kRows];
  scores<Element, kRows, kWhole>(tile, rows.queries, head_dim, score);
  alignas(64) float weights[kRows][kTile];
  for (int r = 0; r < kRows; ++r) {
    softmax_row<kWhole>(score[r], tile.count, head_dim, rows.maximum + r, rows.sum + r * kTile,
                        rows.weighted + int64_t{r} * head_dim, weights[r]);
  }
  const int count = kWhole ? kTile : tile.count;
  constexpr int kVectors = 4 * kRows <= kSumsMax ? 4 : 2 * kRows <= kSumsMax ? 2 : 1;
  const Element* values = reinterpret_cast<const Element*>(tile.values);
  const Element* next = reinterpret_cast<const Element*>(tile.next_values);
  int d = 0;
  for (; d + kVectors * kTile <= head_dim; d += kVectors * kTile) {
    add_values<Element, kRows, kVectors>(values + d, next + d, count, head_dim, weights,
                                         rows.weighted + d);
  }
  for (; d < head_dim; d += kTile) {
    add_values<Element, kRows, 1>(values + d, next + d, count, head_dim, weights,
                                  rows.weighted + d);
  }
}

template <class Element, int kRows>
void attend_some(const Tile& tile, const Rows& rows, int head_dim) {
  if (tile.count == kTile) {
    attend_tile<Element, kRows, true>(tile, rows, head_dim);
  } else {
    attend_tile<Element, kRows, false>(tile, rows, head_dim);
  }
}

// One entry for each number of rows that go through a tile together.
template <class Element>
struct ByRows {
  using Function = void (*)(const Tile&, const Rows&, int);
  Function function[kRowsMax + 1];

  template <int... kCounts>
  static constexpr ByRows make(Numbers<kCounts...>) {
    return {{nullptr, &attend_some<Element, kCounts + 1>...}};
  }
};

template <class Element>
constexpr ByRows<Element> kByRows = ByRows<Element>::make(typename Count<kRowsMax>::Type{});

int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Start of the region that comes `ahead` regions after kv head `head` of block `index`, or of that
// one itself where the sequence has no such block.
const char* region_ahead(const AttentionItem& item, int64_t index, int32_t head, int32_t ahead) {
  int64_t next_index = index;
  int32_t next_head = head + ahead;
  while (next_head >= item.kv_heads) {
    next_head -= item.kv_heads;
    ++next_index;
  }
  if (next_index * item.slots_per_block >= item.prefetch_end) {
    next_index = index;
    next_head = head;
  }
  return item.base + int64_t{item.blocks[next_index]} * item.block_stride +
         next_head * item.region_stride;
}

// One tile of one kv head. Rows that see the same part of it go together.
template <class Element>
void attend_rows(const AttentionItem& item, int32_t head, Tile tile, int64_t key, int64_t end,
                 float* lane_sums) {
  const int32_t first_of_head = head * item.rows;
  for (int32_t first = 0; first < item.rows;) {
    const int64_t limit = smaller(item.limits[first], end);
    int32_t last = first + 1;
    while (last < item.rows && smaller(item.limits[last], end) == limit) {
      ++last;
    }
    // Groups of equal size: a last one of one row would load every key for itself.
    const int32_t groups = (last - first + kRowsMax - 1) / kRowsMax;
    last = first + (last - first + groups - 1) / groups;
    if (limit > key) {
      tile.count = static_cast<int>(limit - key);
      const int32_t row = first_of_head + first;
      const int64_t offset = int64_t{row} * item.head_dim;
      const Rows rows = {item.queries + offset, item.part.maximum + row, lane_sums + row * kTile,
                         item.part.weighted + offset};
      kByRows<Element>.function[last - first](tile, rows, item.head_dim);
      tile.next_keys = tile.keys;  // fetched once
      tile.next_values = tile.values;
    }
    first = last;
  }
}

// Block after block, and in each the regions of the kv heads, which lie side by side.
template <class Element>
void attend_keys(const AttentionItem& item, float* lane_sums) {
  const int64_t row_bytes = int64_t{item.head_dim} * static_cast<int64_t>(sizeof(Element));
  for (int64_t block_key = item.begin; block_key < item.end; block_key += item.slots_per_block) {
    const int64_t index = block_key / item.slots_per_block;
    const int64_t block_end = smaller(block_key + item.slots_per_block, item.end);
    for (int32_t head = 0; head < item.kv_heads; ++head) {
      const char* region = region_ahead(item, index, head, 0);
      const char* next = region_ahead(item, index, head, kRegionsAhead);
      for (int64_t key = block_key; key < block_end; key += item.tile_slots) {
        const int64_t in_region = (key - block_key) * row_bytes;  // of K tile and V row alike
        Tile tile;
        tile.keys = region + in_region;
        tile.values = tile.keys + item.value_offset;
        tile.next_keys = next + 2 * in_region;
        tile.next_values = tile.next_keys + row_bytes * item.tile_slots;
        tile.stride = item.tile_slots;
        tile.count = 0;
        attend_rows<Element>(item, head, tile, key, smaller(key + item.tile_slots, block_end),
                             lane_sums);
      }
    }
  }
}

}  // namespace

void attend(const AttentionItem& item) {
  alignas(64) float lane_sums[kAttentionRowsMax * kTile];
  const int32_t rows = item.kv_heads * item.rows;
  for (int32_t r = 0; r < rows; ++r) {
    item.part.maximum[r] = kLowest;
    store(lane_sums + r * kTile, zero());
  }
  for (int64_t i = 0; i < int64_t{rows} * item.head_dim; i += kTile) {
    store(item.part.weighted + i, zero());
  }
  if (item.format == 0) {
    attend_keys<float>(item, lane_sums);
  } else {
    attend_keys<uint16_t>(item, lane_sums);
  }
  for (int32_t r = 0; r < rows; ++r) {
    item.part.sum[r] = reduce_add(load(lane_sums + r * kTile));
  }
}

// Parts are merged from the first keys to the last, so the result does not depend on who computed
// which. A row without keys in `later` multiplies by one and adds zero.
void merge(const AttentionPart& part, const AttentionPart& later, int32_t rows, int32_t head_dim) {
  for (int32_t r = 0; r < rows; ++r) {
    if (later.maximum[r] == kLowest) {
      continue;
    }
    const bool higher = later.maximum[r] > part.maximum[r];
    const float maximum = higher ? later.maximum[r] : part.maximum[r];
    alignas(64) float factors[2 * kTile];
    store(factors, exp(splat(part.maximum[r] - maximum)));
    store(factors + kTile, exp(splat(later.maximum[r] - maximum)));
    part.maximum[r] = maximum;
    part.sum[r] = part.sum[r] * factors[0] + later.sum[r] * factors[kTile];
    float* weighted = part.weighted + int64_t{r} * head_dim;
    const float* later_weighted = later.weighted + int64_t{r} * head_dim;
    for (int d = 0; d < head_dim; d += kTile) {
      store(weighted + d, fma(load(weighted + d), splat(factors[0]),
                              mul(load(later_weighted + d), splat(factors[kTile]))));
    }
  }
}

void normalize(const AttentionPart& part, int32_t row, int32_t head_dim, float* out) {
  const F32 inverse = div(splat(1.0F), splat(part.sum[row]));
  for (int d = 0; d < head_dim; d += kTile) {
    store(out + d, mul(load(part.weighted + int64_t{row} * head_dim + d), inverse));
  }
}

}  // namespace kvledger::cpu::KVL_ISA
