// The weights of one linear layer, rearranged once at load into the tiles that the kernels read
// (weight_format.h). Immutable afterwards; any thread may read.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "core/cpu/weight_format.h"
#include "core/types.h"

namespace kvledger::cpu {

// "f32", "bf16", "f16", "q8_0", "q4_0", "q4_1".
std::string_view name(WeightFormat format) noexcept;
std::optional<WeightFormat> weight_format_named(std::string_view text) noexcept;

// Bytes of one row of `inputs` weights as GGUF stores it, before packing.
ByteCount stored_row_bytes(WeightFormat format, std::int64_t inputs) noexcept;

class PackedWeight {
 public:
  // Room for `outputs` x `inputs` weights, all zero. `inputs` is a multiple of 32.
  PackedWeight(WeightFormat format, std::int64_t outputs, std::int64_t inputs);

  // Packs rows of weights as GGUF stores them (row-major, one row an output, quantized groups
  // along the row) as outputs `first`, `first` + 1, and so on. Where `order` is given, output
  // first + i is stored row order[i].
  void set_rows(std::int64_t first, std::span<const std::byte> stored,
                std::span<const std::int64_t> order = {});

  WeightFormat format() const noexcept { return format_; }
  std::int64_t outputs() const noexcept { return outputs_; }
  std::int64_t inputs() const noexcept { return inputs_; }
  ByteCount bytes() const noexcept { return ByteCount{tile_bytes_ * tiles()}; }

  std::int64_t tiles() const noexcept { return (outputs_ + kTileOutputs - 1) / kTileOutputs; }
  const std::byte* tile(std::int64_t index) const noexcept {
    return data_.get() + index * tile_bytes_;
  }

 private:
  struct Free {
    void operator()(std::byte* data) const noexcept;
  };

  void set_row(std::int64_t output, const std::byte* stored);

  WeightFormat format_;
  std::int64_t outputs_;
  std::int64_t inputs_;
  std::int64_t tile_bytes_;
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace kvledger::cpu
