// Fuzz target of the GGUF reader: whatever the bytes are, it ends with a File whose every string,
// number and tensor can be touched and whose promises hold, or with one sentence.
//
// Run with libFuzzer as `gguf_fuzz -timeout=2 -rss_limit_mb=512 CORPUS`, or without it through
// standalone.cc, which also writes a corpus to begin with. A promise that does not hold fails a
// check, which ends the process.

#include "core/gguf.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/check.h"

using namespace kvledger::gguf;

namespace {

// Where the sum of all bytes touched ends up, so that no compiler leaves the reads out.
volatile std::uint64_t touched = 0;

void touch(std::span<const std::byte> bytes) {
  std::uint64_t sum = 0;
  for (const std::byte byte : bytes) {
    sum += std::to_integer<std::uint64_t>(byte);
  }
  touched = touched + sum;
}

void touch(std::string_view text) {
  touch(std::as_bytes(std::span(text)));
}

template <class T>
void touch(const T& number) {
  touched = touched + (number != T{} ? 1U : 0U);
}

template <class T>
void touch(const Packed<T>& array) {
  for (std::size_t i = 0; i < array.size(); ++i) {
    touch(array[i]);
  }
}

void touch(const Strings& strings) {
  for (const std::string_view text : strings) {
    touch(text);
  }
}

// Bytes of memory that the file holds beside the input.
std::size_t memory_bytes(const File& file) {
  std::size_t bytes =
      file.metadata.capacity() * sizeof(MetadataEntry) + file.tensors.capacity() * sizeof(Tensor);
  for (const MetadataEntry& entry : file.metadata) {
    if (const auto* strings = std::get_if<Strings>(&entry.value)) {
      bytes += strings->capacity() * sizeof(Strings::value_type);
    }
  }
  return bytes;
}

void walk_tensors(const File& file, std::span<const std::byte> bytes) {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> extents;
  for (const Tensor& tensor : file.tensors) {
    KVL_CHECK_EQ(tensor.offset % file.alignment, 0U);
    KVL_CHECK_LE(tensor.offset, bytes.size());
    KVL_CHECK_LE(tensor.bytes, bytes.size() - tensor.offset);
    KVL_CHECK_GT(tensor.bytes, 0U);
    touch(tensor.name);
    touch(bytes.subspan(tensor.offset, tensor.bytes));
    extents.emplace_back(tensor.offset, tensor.bytes);

    // The same size again, by multiplying what is known to fit.
    std::uint64_t groups = tensor.dimensions[0] / traits(tensor.type).group.elements;
    for (std::size_t i = 1; i < kDimensionsMax; ++i) {
      KVL_CHECK_GT(tensor.dimensions[i], 0U);
      groups *= tensor.dimensions[i];
    }
    KVL_CHECK_EQ(groups * traits(tensor.type).group.bytes, tensor.bytes);
  }
  std::sort(extents.begin(), extents.end());
  for (std::size_t i = 1; i < extents.size(); ++i) {
    KVL_CHECK_LE(extents[i - 1].first + extents[i - 1].second, extents[i].first);
  }
}

void walk(const File& file, std::span<const std::byte> bytes) {
  for (const MetadataEntry& entry : file.metadata) {
    touch(entry.key);
    std::visit([](const auto& value) { touch(value); }, entry.value);
  }
  if (!file.metadata.empty()) {
    const MetadataEntry& last = file.metadata.back();
    KVL_CHECK(file.find(last.key) == &last.value);
  }
  walk_tensors(file, bytes);
  KVL_CHECK_LE(memory_bytes(file), 4 * bytes.size());
}

void walk(const Error& error, std::span<const std::byte> bytes) {
  KVL_CHECK_LE(error.offset, bytes.size());
  KVL_CHECK_GT(error.sentence.size(), 5U);
  KVL_CHECK_LE(error.sentence.size(), 300U);
  KVL_CHECK(std::all_of(error.sentence.begin(), error.sentence.end(),
                        [](char c) { return c >= ' ' && c <= '~'; }));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> bytes = std::as_bytes(std::span(data, size));
  const Result result = read(bytes);
  std::visit([bytes](const auto& outcome) { walk(outcome, bytes); }, result);
  return 0;
}
