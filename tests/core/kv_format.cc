#include "core/kv_format.h"

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

constexpr KvGeometry geometry(std::int32_t head_dim) {
  return KvGeometry{.layers = 30, .kv_heads = 3, .head_dim = head_dim};
}

}  // namespace

TEST_CASE("a region is 128 x (head_dim + 2) bytes at 32 block tokens") {
  // If this fails, the arena has another size than the one the operator was told.
  const KvLayout layout(geometry(64), 32);
  CHECK(layout.region_bytes() == ByteCount{8448});
  CHECK(layout.layer_bytes() == ByteCount{3 * 8448});
  CHECK(layout.block_bytes() == ByteCount{30 * 3 * 8448});
  CHECK(layout.block_tokens() == 32);
  CHECK(layout.geometry().layers == 30);
}

TEST_CASE("a block holds 32 tokens in bf16 and 16 in f32") {
  // If this fails, sequences of different formats do not fit into the same blocks.
  const KvLayout layout(geometry(64), 32);
  CHECK(layout.slots_per_block(KvFormat::kBf16) == 32);
  CHECK(layout.slots_per_block(KvFormat::kF32) == 16);
  CHECK(layout.tile_slots(KvFormat::kBf16) == 16);
  CHECK(layout.tile_slots(KvFormat::kF32) == 16);
}

TEST_CASE("keys and values fill a region to within five percent") {
  // If this fails, memory that was paid for holds nothing.
  for (const std::int32_t head_dim : {64, 80, 96, 128, 256}) {
    const KvLayout layout(geometry(head_dim), 32);
    for (const KvFormat format : kKvFormats) {
      const std::int64_t region = layout.region_bytes().value();
      const std::int64_t used =
          layout.slots_per_block(format) * layout.token_bytes(format).value() / (30 * 3);
      CAPTURE(head_dim);
      CHECK(used <= region);
      CHECK(20 * (region - used) <= region);
      CHECK(used == 2 * layout.value_offset(format).value());
    }
  }
}

TEST_CASE("the values begin where the keys end") {
  // If this fails, values overwrite keys.
  const KvLayout layout(geometry(64), 32);
  CHECK(layout.value_offset(KvFormat::kBf16) == ByteCount{32 * 64 * 2});
  CHECK(layout.value_offset(KvFormat::kF32) == ByteCount{16 * 64 * 4});
}

TEST_CASE("a token of the default model takes 23,040 bytes in bf16") {
  // If this fails, receipts in byte-seconds are wrong by a constant factor.
  const KvLayout layout(geometry(64), 32);
  CHECK(layout.token_bytes(KvFormat::kBf16) == ByteCount{23'040});
  CHECK(layout.token_bytes(KvFormat::kF32) == ByteCount{46'080});
}

TEST_CASE("blocks are counted up to whole ones") {
  // If this fails, the last token of a sequence has no slot.
  const KvLayout layout(geometry(64), 32);
  const auto blocks = [&](std::int64_t tokens, KvFormat format) {
    return layout.blocks_for(tokens, format).value();
  };
  CHECK(blocks(0, KvFormat::kBf16) == 0);
  CHECK(blocks(1, KvFormat::kBf16) == 1);
  CHECK(blocks(32, KvFormat::kBf16) == 1);
  CHECK(blocks(33, KvFormat::kBf16) == 2);
  CHECK(blocks(32, KvFormat::kF32) == 2);
  CHECK(blocks(33, KvFormat::kF32) == 3);
}

TEST_CASE("every legal block size holds whole tiles and whole tokens") {
  // If this fails, a kernel reads a tile that goes on in the next region.
  for (std::int32_t tokens = kBlockTokensMin; tokens <= kBlockTokensMax; tokens *= 2) {
    for (std::int32_t head_dim = 16; head_dim <= 256; head_dim += 16) {
      const KvLayout layout(geometry(head_dim), tokens);
      for (const KvFormat format : kKvFormats) {
        CAPTURE(tokens);
        CAPTURE(head_dim);
        CHECK(layout.slots_per_block(format) > 0);
        CHECK(layout.slots_per_block(format) % layout.tile_slots(format) == 0);
        CHECK(layout.tile_slots(format) <= kTileSlotsMax);
        CHECK(2 * layout.value_offset(format).value() <= layout.region_bytes().value());
        CHECK(layout.region_bytes().value() % 4 == 0);
        CHECK(layout.value_offset(format).value() % 64 == 0);
      }
    }
  }
  CHECK(KvLayout(geometry(64), 8).tile_slots(KvFormat::kF32) == 4);
}

TEST_CASE("large geometries are counted in 64 bits") {
  // If this fails, a block of a large model has a negative size.
  const KvLayout layout(KvGeometry{.layers = 512, .kv_heads = 128, .head_dim = 256}, 256);
  CHECK(layout.block_bytes().value() == std::int64_t{512} * 128 * 4 * 256 * 258);
  CHECK(layout.block_bytes().value() > std::int64_t{1} << 33);
}

TEST_CASE("formats have names and are found by them alone") {
  // If this fails, a setting or a receipt names another format than the one in use.
  for (const KvFormat format : kKvFormats) {
    CHECK(kv_format_named(name(format)) == format);
  }
  CHECK(name(KvFormat::kF32) == "f32");
  CHECK(name(KvFormat::kBf16) == "bf16");
  CHECK_FALSE(kv_format_named("").has_value());
  CHECK_FALSE(kv_format_named("BF16").has_value());
  CHECK_FALSE(kv_format_named("bf16 ").has_value());
}

TEST_CASE("which block sizes and head dimensions are legal") {
  // If this fails, a setting is refused that works, or taken and breaks later.
  for (const std::int64_t tokens : {8, 16, 32, 64, 128, 256}) {
    CHECK(is_block_tokens(tokens));
  }
  for (const std::int64_t tokens : {-8, 0, 1, 4, 7, 9, 24, 257, 512}) {
    CHECK_FALSE(is_block_tokens(tokens));
  }
  for (const std::int64_t head_dim : {16, 64, 80, 96, 128, 256}) {
    CHECK(is_head_dim(head_dim));
  }
  for (const std::int64_t head_dim : {-16, 0, 8, 63, 72, 272}) {
    CHECK_FALSE(is_head_dim(head_dim));
  }
}

TEST_CASE("a layout of an impossible geometry breaks at once") {
  // If this fails, the arena is laid out with sizes of zero or less.
  CHECK_BREAKS(KvLayout(KvGeometry{0, 3, 64}, 32));
  CHECK_BREAKS(KvLayout(KvGeometry{30, 0, 64}, 32));
  CHECK_BREAKS(KvLayout(KvGeometry{30, 3, 63}, 32));
  CHECK_BREAKS(KvLayout(KvGeometry{30, 3, 64}, 33));
  CHECK_BREAKS(KvLayout(KvGeometry{-1, 3, 64}, 32));
}
