#include "core/cpu/block_copy.h"

#include <cstring>

#include "core/check.h"

namespace kvledger {

void copy_blocks(std::byte* arena, ByteCount block_bytes, std::span<const std::int32_t> from,
                 std::span<const std::int32_t> to) {
  KVL_CHECK_EQ(from.size(), to.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    KVL_CHECK_NE(from[i], to[i]);
    std::memcpy(arena + to[i] * block_bytes.value(), arena + from[i] * block_bytes.value(),
                static_cast<std::size_t>(block_bytes.value()));
  }
}

}  // namespace kvledger
