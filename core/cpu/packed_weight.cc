#include "core/cpu/packed_weight.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>

#include "core/check.h"

namespace kvledger::cpu {
namespace {

struct FormatTraits {
  std::string_view name;
  // Bytes that 32 consecutive weights of a row take as GGUF stores them.
  std::int64_t stored_group_bytes;
};

constexpr std::array<FormatTraits, 6> kTraits = {{
    {"f32", 128},
    {"bf16", 64},
    {"f16", 64},
    {"q8_0", 34},
    {"q4_0", 18},
    {"q4_1", 20},
}};

constexpr std::size_t kHalf = sizeof(std::uint16_t);

const FormatTraits& traits(WeightFormat format) noexcept {
  return kTraits[static_cast<std::size_t>(format)];
}

// The i-th number of a GGUF group of 32 four-bit numbers: the first 16 are the low halves of the
// bytes, the other 16 the high halves.
std::uint8_t stored_nibble(const std::uint8_t* numbers, int i) noexcept {
  return i < 16 ? numbers[i] & 15U : static_cast<std::uint8_t>(numbers[i - 16] >> 4);
}

// Each of these packs 32 weights of one output: `stored` as GGUF has them, `group` the tile's
// group, `lane` the output within the tile.

void pack_elements(const std::byte* stored, std::byte* group, int lane, std::size_t size) noexcept {
  for (int i = 0; i < kGroupInputs; ++i) {
    std::memcpy(group + (static_cast<std::size_t>(i) * kTileOutputs + lane) * size,
                stored + static_cast<std::size_t>(i) * size, size);
  }
}

void pack_bf16(const std::byte* stored, std::byte* group, int lane) noexcept {
  for (int pair = 0; pair < kGroupInputs / 2; ++pair) {
    std::memcpy(group + (static_cast<std::size_t>(pair) * kTileOutputs + lane) * 2 * kHalf,
                stored + static_cast<std::size_t>(pair) * 2 * kHalf, 2 * kHalf);
  }
}

void pack_q8(const std::byte* stored, std::byte* group, int lane) noexcept {
  std::memcpy(group + lane * kHalf, stored, kHalf);
  std::byte* numbers = group + kTileOutputs * kHalf;
  for (int quad = 0; quad < kGroupInputs / 4; ++quad) {
    std::memcpy(numbers + (static_cast<std::size_t>(quad) * kTileOutputs + lane) * 4,
                stored + kHalf + static_cast<std::size_t>(quad) * 4, 4);
  }
}

// `halves` is 1 for q4_0 (a scale) and 2 for q4_1 (a scale and a minimum).
void pack_q4(const std::byte* stored, std::byte* group, int lane, int halves) noexcept {
  for (int i = 0; i < halves; ++i) {
    std::memcpy(group + (static_cast<std::size_t>(i) * kTileOutputs + lane) * kHalf,
                stored + static_cast<std::size_t>(i) * kHalf, kHalf);
  }
  const auto* from = reinterpret_cast<const std::uint8_t*>(stored) + halves * kHalf;
  std::byte* numbers = group + static_cast<std::size_t>(halves) * kTileOutputs * kHalf;
  for (int octet = 0; octet < kGroupInputs / 8; ++octet) {
    std::uint32_t word = 0;
    for (int i = 0; i < 8; ++i) {
      word |= std::uint32_t{stored_nibble(from, 8 * octet + i)} << (4 * i);
    }
    std::memcpy(numbers + (static_cast<std::size_t>(octet) * kTileOutputs + lane) * sizeof(word),
                &word, sizeof(word));
  }
}

}  // namespace

std::string_view name(WeightFormat format) noexcept {
  return traits(format).name;
}

std::optional<WeightFormat> weight_format_named(std::string_view text) noexcept {
  for (std::size_t i = 0; i < kTraits.size(); ++i) {
    if (kTraits[i].name == text) {
      return static_cast<WeightFormat>(i);
    }
  }
  return std::nullopt;
}

ByteCount stored_row_bytes(WeightFormat format, std::int64_t inputs) noexcept {
  return ByteCount{inputs / kGroupInputs * traits(format).stored_group_bytes};
}

void PackedWeight::Free::operator()(std::byte* data) const noexcept {
  std::free(data);
}

PackedWeight::PackedWeight(WeightFormat format, std::int64_t outputs, std::int64_t inputs)
    : format_(format), outputs_(outputs), inputs_(inputs) {
  KVL_CHECK_GT(outputs, 0);
  KVL_CHECK_GT(inputs, 0);
  KVL_CHECK_EQ(inputs % kInputsMultiple, 0);
  tile_bytes_ = inputs / kGroupInputs * kTileGroupBytes[static_cast<std::size_t>(format)];
  const auto size = static_cast<std::size_t>(bytes().value());
  data_.reset(static_cast<std::byte*>(std::aligned_alloc(64, (size + 63) / 64 * 64)));
  KVL_CHECK(data_ != nullptr);
  std::memset(data_.get(), 0, size);
}

void PackedWeight::set_rows(std::int64_t first, std::span<const std::byte> stored,
                            std::span<const std::int64_t> order) {
  const std::int64_t row_bytes = stored_row_bytes(format_, inputs_).value();
  const std::int64_t rows = static_cast<std::int64_t>(stored.size()) / row_bytes;
  KVL_CHECK_EQ(rows * row_bytes, static_cast<std::int64_t>(stored.size()));
  KVL_CHECK_LE(first + rows, outputs_);
  KVL_CHECK(order.empty() || static_cast<std::int64_t>(order.size()) == rows);
  for (std::int64_t i = 0; i < rows; ++i) {
    const std::int64_t row = order.empty() ? i : order[static_cast<std::size_t>(i)];
    KVL_CHECK_GE(row, 0);
    KVL_CHECK_LT(row, rows);
    set_row(first + i, stored.data() + row * row_bytes);
  }
}

void PackedWeight::set_row(std::int64_t output, const std::byte* stored) {
  std::byte* group = data_.get() + output / kTileOutputs * tile_bytes_;
  const auto lane = static_cast<int>(output % kTileOutputs);
  for (std::int64_t input = 0; input < inputs_; input += kGroupInputs) {
    switch (format_) {
      case WeightFormat::kF32:
        pack_elements(stored, group, lane, sizeof(float));
        break;
      case WeightFormat::kBf16:
        pack_bf16(stored, group, lane);
        break;
      case WeightFormat::kF16:
        pack_elements(stored, group, lane, kHalf);
        break;
      case WeightFormat::kQ8_0:
        pack_q8(stored, group, lane);
        break;
      case WeightFormat::kQ4_0:
        pack_q4(stored, group, lane, 1);
        break;
      case WeightFormat::kQ4_1:
        pack_q4(stored, group, lane, 2);
        break;
    }
    stored += traits(format_).stored_group_bytes;
    group += kTileGroupBytes[static_cast<std::size_t>(format_)];
  }
}

}  // namespace kvledger::cpu
