// How keys and values lie in a block: the one place that knows it.
//
// A block is one contiguous run of bytes in the arena:
//
//   block   = [layer 0][layer 1] ... [layer L-1]
//   layer   = [kv head 0][kv head 1] ... [kv head H-1]     a region each
//   region  = [K tiles][V rows][padding]                   slots of one layer and one head
//
//   K tile  = keys of `tile_slots` consecutive slots, transposed so that one vector register
//             holds one dimension of 16 keys:
//               f32   [dimension][slot]
//               bf16  [dimension / 2][slot][2]             pairs, as bf16 dot products read them
//   V row   = [slot][dimension]
//
// The number of bytes in a region is the same for every format, 4 x block_tokens x (head_dim + 2),
// so sequences in different formats live in one arena. What differs is how many slots fit:
// `block_tokens` counts slots in bf16. The two extra elements per token leave room for a scale
// beside quantized values; in bf16 and f32 they are padding (3.0 % at head_dim 64).
//
// All functions are pure and may be called from any thread.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "core/types.h"

namespace kvledger {

enum class KvFormat : std::uint8_t {
  kF32 = 0,
  kBf16 = 1,
};

inline constexpr std::array<KvFormat, 2> kKvFormats = {KvFormat::kF32, KvFormat::kBf16};

// The name used in settings, receipts and metrics: "f32", "bf16".
std::string_view name(KvFormat format) noexcept;

// The format of that name, or nothing.
std::optional<KvFormat> kv_format_named(std::string_view text) noexcept;

// The part of a model that decides the size of its cache. All counts are per device.
struct KvGeometry {
  std::int32_t layers = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
};

// Slots whose keys share a vector register.
inline constexpr std::int32_t kTileSlotsMax = 16;

inline constexpr std::int32_t kBlockTokensMin = 8;
inline constexpr std::int32_t kBlockTokensMax = 256;

// Whether `--block-tokens` may be `block_tokens`: a power of two from 8 to 256, so that a block
// holds whole K tiles in every format.
constexpr bool is_block_tokens(std::int64_t block_tokens) noexcept {
  return block_tokens >= kBlockTokensMin && block_tokens <= kBlockTokensMax &&
         (block_tokens & (block_tokens - 1)) == 0;
}

// Whether the kernels read this head dimension: a multiple of 16 from 16 to 256.
constexpr bool is_head_dim(std::int64_t head_dim) noexcept {
  return head_dim >= 16 && head_dim <= 256 && head_dim % 16 == 0;
}

// Byte arithmetic of one geometry at one block size.
class KvLayout {
 public:
  // `geometry.head_dim` satisfies is_head_dim and `block_tokens` is_block_tokens.
  KvLayout(KvGeometry geometry, std::int32_t block_tokens);

  const KvGeometry& geometry() const noexcept { return geometry_; }
  std::int32_t block_tokens() const noexcept { return block_tokens_; }

  // Tokens of one sequence that fit in a block.
  std::int32_t slots_per_block(KvFormat format) const noexcept;
  // Slots in one K tile: 16, or fewer where a block holds fewer.
  std::int32_t tile_slots(KvFormat format) const noexcept;

  ByteCount region_bytes() const noexcept { return region_bytes_; }
  ByteCount layer_bytes() const noexcept { return layer_bytes_; }
  ByteCount block_bytes() const noexcept { return block_bytes_; }
  // From the start of a region to its V rows.
  ByteCount value_offset(KvFormat format) const noexcept;
  // Bytes that a token's keys and values occupy in all layers and heads, without padding.
  ByteCount token_bytes(KvFormat format) const noexcept;
  // Blocks that hold `tokens` tokens.
  BlockCount blocks_for(std::int64_t tokens, KvFormat format) const noexcept;

 private:
  KvGeometry geometry_;
  std::int32_t block_tokens_;
  ByteCount region_bytes_;
  ByteCount layer_bytes_;
  ByteCount block_bytes_;
};

}  // namespace kvledger
