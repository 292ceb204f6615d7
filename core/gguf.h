// Reads GGUF, the file format of quantized models: versions 2 and 3, little endian.
//
//   file    = ["GGUF"][version u32][tensors u64][entries u64]
//             [entry]... [tensor]... [padding][data]
//   entry   = [key: string][value type u32][value]
//   tensor  = [name: string][dimensions u32][dimension u64]...[tensor type u32][offset u64]
//   string  = [bytes u64][UTF-8 without a terminator]
//   array   = [value type u32][elements u64][element]...
//
// The bytes were written by somebody else, so no number in them is trusted. Whatever they say,
// read() looks at no byte outside the span, needs memory of at most six times the file's size and
// time of O(size log size), and ends with either a File or one sentence for the operator. In a
// File every length, type, count and offset has been checked, and all strings are UTF-8.
//
// A File holds views into the caller's bytes, which must outlive it. There is no state: any
// thread may call anything here, also at the same time.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>
#include <vector>

#include "core/check.h"

namespace kvledger::gguf {

static_assert(std::endian::native == std::endian::little,
              "numbers are taken from the file as they lie there");

inline constexpr std::uint32_t kVersionMin = 2;
inline constexpr std::uint32_t kVersionMax = 3;
inline constexpr std::uint64_t kMetadataEntriesMax = 1U << 16;
inline constexpr std::uint64_t kTensorsMax = 1U << 16;
inline constexpr std::uint32_t kDimensionsMax = 4;
inline constexpr std::uint64_t kKeyBytesMax = 65535;
inline constexpr std::uint64_t kTensorNameBytesMax = 64;
inline constexpr std::uint64_t kStringBytesMax = 64U << 20;
inline constexpr std::uint64_t kArrayElementsMax = 1U << 24;
inline constexpr std::uint32_t kAlignmentDefault = 32;
inline constexpr std::uint32_t kAlignmentMax = 1U << 16;
// Longest string of the file that a sentence repeats.
inline constexpr std::size_t kQuotedBytesMax = 64;

// The numbers of these enumerations are those of the format.
enum class ValueType : std::uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

enum class TensorType : std::uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kQ8_K = 15,
  kBF16 = 30,
};

// Elements of a row that are stored together, and the bytes that they take.
struct TensorGroup {
  std::uint32_t elements;
  std::uint32_t bytes;
};

struct TensorTypeTraits {
  TensorType type;
  // As the format calls it.
  std::string_view name;
  TensorGroup group;
};

inline constexpr std::array kTensorTypes = {
    TensorTypeTraits{TensorType::kF32, "F32", {1, 4}},
    TensorTypeTraits{TensorType::kF16, "F16", {1, 2}},
    TensorTypeTraits{TensorType::kBF16, "BF16", {1, 2}},
    TensorTypeTraits{TensorType::kQ4_0, "Q4_0", {32, 18}},
    TensorTypeTraits{TensorType::kQ4_1, "Q4_1", {32, 20}},
    TensorTypeTraits{TensorType::kQ5_0, "Q5_0", {32, 22}},
    TensorTypeTraits{TensorType::kQ5_1, "Q5_1", {32, 24}},
    TensorTypeTraits{TensorType::kQ8_0, "Q8_0", {32, 34}},
    TensorTypeTraits{TensorType::kQ2_K, "Q2_K", {256, 84}},
    TensorTypeTraits{TensorType::kQ3_K, "Q3_K", {256, 110}},
    TensorTypeTraits{TensorType::kQ4_K, "Q4_K", {256, 144}},
    TensorTypeTraits{TensorType::kQ5_K, "Q5_K", {256, 176}},
    TensorTypeTraits{TensorType::kQ6_K, "Q6_K", {256, 210}},
    TensorTypeTraits{TensorType::kQ8_K, "Q8_K", {256, 292}},
};

// The row of the type with that number in the format, or null if it cannot be read.
constexpr const TensorTypeTraits* tensor_type_numbered(std::uint32_t number) noexcept {
  for (const TensorTypeTraits& row : kTensorTypes) {
    if (static_cast<std::uint32_t>(row.type) == number) {
      return &row;
    }
  }
  return nullptr;
}

constexpr const TensorTypeTraits& traits(TensorType type) noexcept {
  return *tensor_type_numbered(static_cast<std::uint32_t>(type));
}

// An array of numbers as it lies in the file, at any address.
template <class T>
class Packed {
 public:
  Packed() = default;
  explicit Packed(std::span<const std::byte> bytes) noexcept : bytes_(bytes) {}

  std::size_t size() const noexcept { return bytes_.size() / sizeof(T); }
  T operator[](std::size_t index) const {
    KVL_CHECK_LT(index, size());
    if constexpr (std::is_same_v<T, bool>) {
      return bytes_[index] != std::byte{0};
    } else {
      T value;
      std::memcpy(&value, bytes_.data() + index * sizeof(T), sizeof(T));
      return value;
    }
  }
  std::span<const std::byte> bytes() const noexcept { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

using Strings = std::vector<std::string_view>;

// A value has the type that the file gives it; a reader that expects another one asks in vain
// instead of getting a converted number.
using Value = std::variant<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t,
                           std::int32_t, float, bool, std::string_view, std::uint64_t, std::int64_t,
                           double, Packed<std::uint8_t>, Packed<std::int8_t>, Packed<std::uint16_t>,
                           Packed<std::int16_t>, Packed<std::uint32_t>, Packed<std::int32_t>,
                           Packed<float>, Packed<bool>, Packed<std::uint64_t>, Packed<std::int64_t>,
                           Packed<double>, Strings>;

struct MetadataEntry {
  // Printable ASCII.
  std::string_view key;
  Value value;
};

struct Tensor {
  std::string_view name;
  TensorType type = TensorType::kF32;
  // The first `dimension_count` count, the one that is contiguous in memory first; the others
  // are 1.
  std::uint32_t dimension_count = 0;
  std::array<std::uint64_t, kDimensionsMax> dimensions = {1, 1, 1, 1};
  // From the beginning of the file; a multiple of File::alignment.
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;

  std::span<const std::uint64_t> shape() const noexcept {
    return std::span(dimensions).first(dimension_count);
  }
};

// Entries and tensors in the order of the file; no key and no name occurs twice, and no byte
// belongs to two tensors.
struct File {
  std::uint32_t version = 0;
  std::uint32_t alignment = kAlignmentDefault;
  std::vector<MetadataEntry> metadata;
  std::vector<Tensor> tensors;

  // The value of `key`, or null. O(entries).
  const Value* find(std::string_view key) const noexcept;
};

// Why the bytes are refused.
struct Error {
  // One sentence for an operator. It quotes strings of the file only where they are printable
  // ASCII and short.
  std::string sentence;
  // From the beginning of the file, where the refused field or item begins.
  std::uint64_t offset = 0;
};

using Result = std::variant<File, Error>;

[[nodiscard]] Result read(std::span<const std::byte> bytes);

}  // namespace kvledger::gguf
