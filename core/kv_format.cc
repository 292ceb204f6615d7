#include "core/kv_format.h"

#include <algorithm>

#include "core/check.h"

namespace kvledger {
namespace {

struct FormatTraits {
  std::string_view name;
  std::int32_t element_bytes;
  // Slots per block for each bf16 slot, as a fraction.
  std::int32_t slots_numerator;
  std::int32_t slots_denominator;
};

constexpr FormatTraits kTraits[] = {
    {"f32", 4, 1, 2},
    {"bf16", 2, 1, 1},
};

const FormatTraits& traits(KvFormat format) noexcept {
  return kTraits[static_cast<std::size_t>(format)];
}

}  // namespace

std::string_view name(KvFormat format) noexcept {
  return traits(format).name;
}

std::optional<KvFormat> kv_format_named(std::string_view text) noexcept {
  for (const KvFormat format : kKvFormats) {
    if (name(format) == text) {
      return format;
    }
  }
  return std::nullopt;
}

KvLayout::KvLayout(KvGeometry geometry, std::int32_t block_tokens)
    : geometry_(geometry), block_tokens_(block_tokens) {
  KVL_CHECK_GT(geometry.layers, 0);
  KVL_CHECK_GT(geometry.kv_heads, 0);
  KVL_CHECK(is_head_dim(geometry.head_dim));
  KVL_CHECK(is_block_tokens(block_tokens));
  region_bytes_ = ByteCount{std::int64_t{4} * block_tokens * (geometry.head_dim + 2)};
  layer_bytes_ = ByteCount{region_bytes_.value() * geometry.kv_heads};
  block_bytes_ = ByteCount{layer_bytes_.value() * geometry.layers};
  for (const KvFormat format : kKvFormats) {
    const std::int64_t used = 2 * value_offset(format).value();
    KVL_CHECK_LE(used, region_bytes_.value());
  }
}

std::int32_t KvLayout::slots_per_block(KvFormat format) const noexcept {
  return block_tokens_ * traits(format).slots_numerator / traits(format).slots_denominator;
}

std::int32_t KvLayout::tile_slots(KvFormat format) const noexcept {
  return std::min(kTileSlotsMax, slots_per_block(format));
}

ByteCount KvLayout::value_offset(KvFormat format) const noexcept {
  return ByteCount{std::int64_t{slots_per_block(format)} * geometry_.head_dim *
                   traits(format).element_bytes};
}

ByteCount KvLayout::token_bytes(KvFormat format) const noexcept {
  return ByteCount{std::int64_t{2} * geometry_.layers * geometry_.kv_heads * geometry_.head_dim *
                   traits(format).element_bytes};
}

BlockCount KvLayout::blocks_for(std::int64_t tokens, KvFormat format) const noexcept {
  const std::int64_t slots = slots_per_block(format);
  return BlockCount{(tokens + slots - 1) / slots};
}

}  // namespace kvledger
