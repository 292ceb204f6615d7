#include "core/arena.h"

#include <sys/mman.h>

#include <cstdint>
#include <utility>

#include "core/check.h"

namespace kvledger {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kSmallPage = 4096;

}  // namespace

std::optional<Arena> Arena::take(ByteCount size) {
  KVL_CHECK_GT(size.value(), 0);
  const auto bytes = static_cast<std::size_t>(size.value());
  const std::size_t mapped = bytes + kHugePage;
  void* mapping = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapping == MAP_FAILED) {
    return std::nullopt;
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping);
  const std::uintptr_t aligned = (address + kHugePage - 1) / kHugePage * kHugePage;
  auto* data = reinterpret_cast<std::byte*>(aligned);
  // Without huge pages the arena works as well, only slower: the answer does not matter.
  (void)madvise(data, bytes, MADV_HUGEPAGE);
  // Keys and values tell what was said; a core dump is read by others than those who said it.
  KVL_CHECK_EQ(madvise(mapping, mapped, MADV_DONTDUMP), 0);
  for (std::size_t offset = 0; offset < bytes; offset += kSmallPage) {
    data[offset] = std::byte{0};
  }
  return Arena(mapping, mapped, data, size);
}

Arena::Arena(void* mapping, std::size_t mapped, std::byte* data, ByteCount size) noexcept
    : mapping_(mapping), mapped_(mapped), data_(data), size_(size) {}

Arena::Arena(Arena&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapped_(std::exchange(other.mapped_, 0)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, ByteCount{0})) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapped_, other.mapped_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Arena::~Arena() {
  if (mapping_ != nullptr) {
    munmap(mapping_, mapped_);
  }
}

}  // namespace kvledger
