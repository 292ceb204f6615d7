// Copies of whole blocks inside the arena: what copy-on-write needs.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/types.h"

namespace kvledger {

// Copies block from[i] to block to[i] for all i, one after the other, so that a block may be copied
// to and then from. A block is not copied to itself; all lie in the arena, `block_bytes` each.
void copy_blocks(std::byte* arena, ByteCount block_bytes, std::span<const std::int32_t> from,
                 std::span<const std::int32_t> to);

}  // namespace kvledger
