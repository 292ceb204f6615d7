// Writes GGUF files, right or wrong ones: nothing is checked and the counts in the header are
// those that the test asks for.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string_view>
#include <vector>

#include "core/gguf.h"

namespace kvledger::testing {

class GgufWriter {
 public:
  // Where a number of the file lies.
  struct Field {
    std::size_t offset;
    std::size_t bytes;
  };

  GgufWriter(std::uint64_t tensors, std::uint64_t entries,
             std::uint32_t version = gguf::kVersionMax) {
    raw("GGUF").put(version).put(tensors).put(entries);
  }

  GgufWriter& raw(std::string_view text) {
    for (const char c : text) {
      bytes_.push_back(static_cast<std::byte>(c));
    }
    return *this;
  }

  template <class T>
  GgufWriter& put(T number) {
    fields_.push_back({bytes_.size(), sizeof(T)});
    bytes_.resize(bytes_.size() + sizeof(T));
    std::memcpy(bytes_.data() + fields_.back().offset, &number, sizeof(T));
    return *this;
  }
  GgufWriter& put(gguf::ValueType type) { return put(static_cast<std::uint32_t>(type)); }

  GgufWriter& text(std::string_view text) { return put(std::uint64_t{text.size()}).raw(text); }

  // An entry up to its value, which the caller puts.
  GgufWriter& key(std::string_view key, gguf::ValueType type) { return text(key).put(type); }

  template <class T>
  GgufWriter& entry(std::string_view name, gguf::ValueType type, T value) {
    return key(name, type).put(value);
  }
  GgufWriter& entry(std::string_view name, std::string_view value) {
    return key(name, gguf::ValueType::kString).text(value);
  }

  // An entry up to its elements, which the caller puts.
  GgufWriter& array(std::string_view name, gguf::ValueType type, std::uint64_t count) {
    return key(name, gguf::ValueType::kArray).put(type).put(count);
  }

  GgufWriter& tensor(std::string_view name, std::initializer_list<std::uint64_t> dimensions,
                     std::uint32_t type, std::uint64_t offset) {
    text(name).put(static_cast<std::uint32_t>(dimensions.size()));
    for (const std::uint64_t dimension : dimensions) {
      put(dimension);
    }
    return put(type).put(offset);
  }
  GgufWriter& tensor(std::string_view name, std::initializer_list<std::uint64_t> dimensions,
                     gguf::TensorType type, std::uint64_t offset) {
    return tensor(name, dimensions, static_cast<std::uint32_t>(type), offset);
  }

  // Fills up to a multiple of `alignment`, then with `count` bytes of data.
  GgufWriter& data(std::size_t count, std::size_t alignment = gguf::kAlignmentDefault) {
    bytes_.resize((bytes_.size() + alignment - 1) / alignment * alignment);
    bytes_.resize(bytes_.size() + count, std::byte{0x5a});
    return *this;
  }

  const std::vector<std::byte>& bytes() const noexcept { return bytes_; }
  const std::vector<Field>& fields() const noexcept { return fields_; }

 private:
  std::vector<std::byte> bytes_;
  std::vector<Field> fields_;
};

}  // namespace kvledger::testing
