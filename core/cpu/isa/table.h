// What each instruction set provides: functions of plain arguments over one item of work, called
// from the thread pool by core/cpu/. See vec.h for why nothing here is shared as a template.

#pragma once

#include <stdint.h>

namespace kvledger::cpu {

// Most query rows in one item, of all its kv heads.
constexpr int kAttentionRowsMax = 96;

// What some query rows found in some keys. A row that read none has maximum -infinity and sums 0.
struct AttentionPart {
  float* maximum;   // [rows] largest score
  float* sum;       // [rows] sum of e^(score - maximum)
  float* weighted;  // [rows][head_dim] sum of e^(score - maximum) * value
};

// Part of one sequence's context in some kv heads, and the query rows that read it.
struct AttentionItem {
  // Region of the h-th of these kv heads in the sequence's i-th block:
  // base + int64(blocks[i]) * block_stride + h * region_stride.
  const char* base;
  const int32_t* blocks;
  int64_t block_stride;
  int64_t region_stride;
  int64_t value_offset;
  int32_t slots_per_block;
  int32_t tile_slots;
  int32_t head_dim;
  int32_t format;  // KvFormat
  // Keys from `begin` to `end`, positions in the sequence; `begin` is the first of a block.
  int64_t begin;
  int64_t end;
  // Blocks up to this key may be fetched ahead.
  int64_t prefetch_end;
  // Query rows, scaled: [kv_heads][rows][head_dim]. Row r of each head reads keys below limits[r];
  // limits do not fall. Results have the same order.
  const float* queries;
  const int64_t* limits;
  int32_t rows;
  int32_t kv_heads;
  AttentionPart part;  // overwritten
};

// Weights of one tile of 32 outputs, dequantized on the way; see packed_weight.h for the layouts.
struct LinearItem {
  const void* tile;
  int32_t format;   // WeightFormat
  int64_t inputs;   // length of a row of x, a multiple of the format's group
  int64_t outputs;  // outputs of this tile that exist, 1 to 32
  const float* x;   // [rows][x_stride]
  int64_t x_stride;
  int64_t rows;
  float* y;  // [rows][y_stride], at the tile's first output
  int64_t y_stride;
  bool accumulate;  // y += x W^T instead of y =
  float* scratch;   // [inputs][32] floats, 64-byte aligned
};

struct KernelTable {
  void (*attend)(const AttentionItem& item);
  // Writes the turned key and the value of one token and kv head into its slot.
  void (*append)(const float* key, const float* value, char* region, int64_t value_offset,
                 int32_t slot, int32_t tile_slots, int32_t head_dim, int32_t format);
  // Turns `heads` consecutive heads in place.
  void (*rotate)(float* heads_data, int32_t heads, int32_t head_dim, const float* cosine,
                 const float* sine);
  // Adds what the same rows found in later keys to `part`.
  void (*merge)(const AttentionPart& part, const AttentionPart& later, int32_t rows,
                int32_t head_dim);
  // out[head_dim] = weighted / sum of one row.
  void (*normalize)(const AttentionPart& part, int32_t row, int32_t head_dim, float* out);
  void (*linear)(const LinearItem& item);
  // Dequantizes a packed tile to out[inputs][32].
  void (*unpack_tile)(const void* tile, int32_t format, int64_t inputs, float* out);
  // Dequantizes one output of a packed tile to out[inputs].
  void (*unpack_row)(const void* tile, int32_t format, int64_t inputs, int32_t output, float* out);
  void (*rms_norm)(const float* x, const float* weight, float epsilon, int64_t length, float* out);
  // out[i] = silu(gate[i]) * up[i].
  void (*silu_multiply)(const float* gate, const float* up, int64_t length, float* out);
  // Place of the first of the largest floats; -1 if the largest is not finite or any is NaN.
  int32_t (*likeliest)(const float* x, int64_t length);
  // Sum of all 64-bit words: the cheapest way to read memory once.
  uint64_t (*read)(const void* data, int64_t bytes);
};

namespace portable {
const KernelTable& table();
}
#if defined(__x86_64__)
namespace avx2 {
const KernelTable& table();
}
namespace avx512 {
const KernelTable& table();
}
#endif

}  // namespace kvledger::cpu
