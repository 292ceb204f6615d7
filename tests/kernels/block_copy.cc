#include "core/cpu/block_copy.h"

#include <vector>

#include "tests/check_throws.h"

using namespace kvledger;

TEST_CASE("blocks are copied whole, one after the other, and nothing else changes") {
  // If this fails, a sample goes on in a block that is not what it began with.
  std::vector<std::byte> arena(4 * 64);
  for (std::size_t i = 0; i < arena.size(); ++i) {
    arena[i] = static_cast<std::byte>(i / 64 * 16 + i % 16);
  }
  const std::vector<std::byte> before = arena;
  const std::vector<std::int32_t> from = {0, 2};
  const std::vector<std::int32_t> to = {2, 3};
  copy_blocks(arena.data(), ByteCount{64}, from, to);
  const auto block = [](const std::vector<std::byte>& bytes, std::ptrdiff_t index) {
    return std::vector<std::byte>(bytes.begin() + index * 64, bytes.begin() + (index + 1) * 64);
  };
  CHECK(block(arena, 0) == block(before, 0));
  CHECK(block(arena, 1) == block(before, 1));
  CHECK(block(arena, 2) == block(before, 0));
  CHECK(block(arena, 3) == block(before, 0));  // from what the first copy made of block 2
}

TEST_CASE("a block is not copied onto itself") {
  // If this fails, a plan that names a block twice goes unnoticed.
  std::vector<std::byte> arena(2 * 64);
  const std::vector<std::int32_t> same = {1};
  CHECK_BREAKS(copy_blocks(arena.data(), ByteCount{64}, same, same));
}
