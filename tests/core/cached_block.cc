#include "core/cached_block.h"

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

std::vector<CacheSlot> in_order(const CachedBlocks& blocks, const CacheList& list) {
  std::vector<CacheSlot> slots;
  for (CacheSlot slot = list.first(); slot != kNoSlot; slot = blocks[slot].next) {
    slots.push_back(slot);
  }
  return slots;
}

}  // namespace

TEST_CASE("a list keeps the order in which blocks were put in") {
  // If this fails, a policy drops another block than the one it means.
  CachedBlocks blocks(5);
  CacheList list(blocks, 1);
  CHECK(list.first() == kNoSlot);
  CHECK(list.last() == kNoSlot);
  list.push_last(3);
  list.push_first(1);
  list.push_last(4);
  list.push_first(0);
  CHECK(in_order(blocks, list) == std::vector<CacheSlot>{0, 1, 3, 4});
  list.remove(3);
  list.remove(0);
  list.remove(4);
  CHECK(in_order(blocks, list) == std::vector<CacheSlot>{1});
  CHECK(list.last() == 1);
  CHECK(list.size() == 1);
  list.remove(1);
  CHECK(list.empty());
}

TEST_CASE("a block is in one list at most") {
  // If this fails, two lists share links, and blocks are lost from both.
  CachedBlocks blocks(2);
  CacheList one(blocks, 1);
  CacheList two(blocks, 2);
  one.push_last(0);
  CHECK(one.has(0));
  CHECK_FALSE(two.has(0));
  CHECK_BREAKS(one.push_last(0));
  CHECK_BREAKS(two.push_first(0));
  CHECK_BREAKS(two.remove(0));
  CHECK_BREAKS(one.remove(1));
  CHECK_BREAKS(one.push_last(2));
  CHECK_BREAKS(CacheList(blocks, 0));
}
