// The kernels that touch KV memory, as every device provides them, and the views they work on.
//
// Views are plain: pointers, sizes and strides, valid on the device the kernels run on. They know
// nothing of schedulers or pools. All index arithmetic of KV memory is in KvView::region; offsets
// are 64-bit, for a block of a few hundred kilobytes passes 2^31 bytes at block 6,000.
//
// Contract of all kernels: keys and values are read as they were stored, also those that the same
// step wrote; a slot that was not written for the sequence is never read, whatever it holds; a
// query's result depends on its own sequence alone, not on what else is in the step or on how the
// prompt was cut into chunks. On the CPU that holds bit for bit.

#pragma once

#include <cstddef>
#include <cstdint>

#include "core/kv_format.h"

namespace kvledger {

// KV memory of one device and one format.
struct KvView {
  std::byte* base = nullptr;
  // Bytes from a block, layer or kv head to the next.
  std::int64_t block_stride = 0;
  std::int64_t layer_stride = 0;
  std::int64_t region_stride = 0;
  // Bytes from the start of a region to its V rows.
  std::int64_t value_offset = 0;
  std::int32_t slots_per_block = 0;
  std::int32_t tile_slots = 0;
  std::int32_t layers = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  KvFormat format = KvFormat::kF32;

  std::byte* region(std::int64_t block, std::int64_t layer, std::int64_t kv_head) const noexcept {
    return base + block * block_stride + layer * layer_stride + kv_head * region_stride;
  }
};

// The view of blocks in an arena at `base`: [block][layer][kv head][K tiles | V rows].
KvView paged_view(const KvLayout& layout, KvFormat format, std::byte* base) noexcept;

// The sequences of a step, ragged: sequence s computes tokens query_start[s] to query_start[s+1]
// and has context_length[s] tokens afterwards, so its first token in the step has position
// context_length[s] - (query_start[s+1] - query_start[s]).
struct BatchView {
  std::int64_t sequences = 0;
  std::int64_t tokens = 0;
  const std::int32_t* query_start = nullptr;     // [sequences + 1]
  const std::int32_t* context_length = nullptr;  // [sequences]
  const std::int32_t* rows = nullptr;            // [sequences], rows of `block_tables`
  const std::int32_t* positions = nullptr;       // [tokens]
  const std::int32_t* block_tables = nullptr;    // [row][table_width]
  std::int64_t table_width = 0;
};

// Rotary embedding: dimension i of the first half of a head turns with dimension i of the second
// half by the angle whose cosine and sine stand at [position][i].
struct RotaryView {
  const float* cosine = nullptr;  // [positions][head_dim / 2]
  const float* sine = nullptr;
  std::int64_t positions = 0;
};

// Queries, keys and values of a step's tokens, one row a token:
// [heads][head_dim] queries, then [kv_heads][head_dim] keys, then as many values, in f32.
struct QkvView {
  float* data = nullptr;
  std::int64_t row_stride = 0;  // floats
  std::int32_t heads = 0;
};

class KvKernels {
 public:
  virtual ~KvKernels() = default;

  // Takes up the sequences of the next step; the views must stay valid until the next call.
  // Work that is the same for every layer is done here, once.
  virtual void begin_step(const KvView& kv, const BatchView& batch, std::int32_t heads) = 0;

  // For every token: turns queries in place, turns keys, and stores keys and values of `layer` in
  // the token's slot.
  virtual void kv_append(std::int32_t layer, const RotaryView& rotary, const QkvView& qkv) = 0;

  // out[token][head][:] = softmax(scale * q . K^T) V over the token's context in `layer`, its own
  // key included, with an online softmax in f32 (Milakov and Gimelshein 2018). Query heads share
  // kv heads in order: head h reads kv head h / (heads / kv_heads).
  virtual void paged_attention(std::int32_t layer, const QkvView& qkv, float scale, float* out,
                               std::int64_t out_row_stride) = 0;
};

}  // namespace kvledger
