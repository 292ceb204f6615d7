// Memory taken from the system in one piece and given back in one piece.
//
// The pages are asked for as huge ones, because blocks of a sequence lie anywhere in the arena and
// small pages would cost a translation miss per block; and they are touched at once, so that a
// machine that cannot hold them says so at start and not in the middle of a request. They are left
// out of core dumps.

#pragma once

#include <cstddef>
#include <optional>

#include "core/types.h"

namespace kvledger {

class Arena {
 public:
  // Zeroed memory, aligned to 2 MiB; nothing if the system has not enough.
  static std::optional<Arena> take(ByteCount size);

  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  std::byte* data() const noexcept { return data_; }
  ByteCount size() const noexcept { return size_; }

 private:
  Arena(void* mapping, std::size_t mapped, std::byte* data, ByteCount size) noexcept;

  void* mapping_ = nullptr;
  std::size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  ByteCount size_;
};

}  // namespace kvledger
