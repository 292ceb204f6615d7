#include "core/prefix_index.h"

#include <algorithm>

#include "tests/check_throws.h"
#include "tests/core/small_index.h"

using namespace kvledger;
using testing::Index;
using testing::kAnna;
using testing::kBen;
using testing::kPublic;
using testing::kRoot;
using testing::kTeam;
using testing::small_index;
using testing::Tokens;

TEST_CASE("a block is found by its tokens, behind its parent, in its scope") {
  // If this fails, a prompt is answered from other keys and values than its own.
  Index index;
  const PrefixNode first = index.cached(kRoot, kAnna, {1, 2, 3, 4}, 10);
  index.index.pin(first);
  const PrefixNode second = index.cached(first, kAnna, {5, 6, 7, 8}, 11);
  CHECK(index.index.find(kRoot, kAnna, Tokens{1, 2, 3, 4}) == first);
  CHECK(index.index.block_of(first) == BlockId{10});
  CHECK(index.index.find(first, kAnna, Tokens{5, 6, 7, 8}) == second);
  for (const Tokens& other :
       {Tokens{1, 2, 3, 5}, Tokens{1, 2, 3}, Tokens{1, 2, 3, 4, 0}, Tokens{}}) {
    CHECK_FALSE(index.index.find(kRoot, kAnna, other).has_value());
  }
  CHECK_FALSE(index.index.find(kRoot, kAnna, Tokens{5, 6, 7, 8}).has_value());
  CHECK_FALSE(index.index.find(second, kAnna, Tokens{5, 6, 7, 8}).has_value());
  CHECK_FALSE(index.index.find(kRoot, kBen, Tokens{1, 2, 3, 4}).has_value());
  index.audit();
}

TEST_CASE("nothing rests on hashes") {
  // If this fails, whoever finds two texts with one hash reads somebody else's context (B06, B07).
  PrefixIndexSettings settings = small_index();
  settings.hash_mask = 0;
  Index index(settings);
  std::uint32_t block = 0;
  for (const ScopeId scope : {kAnna, kBen, kTeam}) {
    for (Token token = 0; token < 10; ++token) {
      index.cached(kRoot, scope, {token, token + 1, 7, 7}, block++);
    }
  }
  block = 0;
  for (const ScopeId scope : {kAnna, kBen, kTeam}) {
    for (Token token = 0; token < 10; ++token) {
      const auto found = index.index.find(kRoot, scope, Tokens{token, token + 1, 7, 7});
      REQUIRE(found.has_value());
      CHECK(index.index.block_of(*found) == BlockId{block++});
    }
    CHECK_FALSE(index.index.find(kRoot, scope, Tokens{3, 3, 7, 7}).has_value());
  }
  CHECK(index.index.mismatches() > 0);
  index.audit();
}

TEST_CASE("a walk goes from a shared scope to its own once, and nowhere else") {
  // If this fails, what a tenant added to a shared beginning is found by another one.
  Index index;
  const PrefixNode shared = index.place(kRoot, kTeam, {1, 1, 1, 1});
  index.index.fill(shared, BlockId{0});
  const PrefixNode annas = index.place(shared, kAnna, {2, 2, 2, 2});
  const PrefixNode bens = index.place(shared, kBen, {2, 2, 2, 2});
  CHECK(annas != bens);
  CHECK_FALSE(index.index.find(annas, kBen, Tokens{3, 3, 3, 3}).has_value());
  CHECK_BREAKS(index.index.place(annas, kBen, Tokens{3, 3, 3, 3}));
  CHECK_BREAKS(index.index.place(annas, kTeam, Tokens{3, 3, 3, 3}));
  CHECK_BREAKS(index.index.place(shared, kPublic, Tokens{3, 3, 3, 3}));
  index.place(annas, kAnna, {3, 3, 3, 3});
  index.audit();
}

TEST_CASE("a node that is gone is not taken for one that came after it") {
  // If this fails, a walk goes on below a node of another tenant that lies where its own lay.
  PrefixIndexSettings settings = small_index();
  settings.nodes = 1;
  Index index(settings);
  const PrefixNode annas = index.cached(kRoot, kAnna, {1, 1, 1, 1}, 5);
  CHECK_FALSE(index.index.place(kRoot, kBen, Tokens{1, 1, 1, 1}).has_value());
  CHECK(index.index.evict() == BlockId{5});
  const PrefixNode bens = index.cached(kRoot, kBen, {1, 1, 1, 1}, 6);
  CHECK(bens.slot == annas.slot);
  CHECK_FALSE(index.index.knows(annas));
  CHECK_BREAKS(index.index.find(annas, kAnna, Tokens{2, 2, 2, 2}));
  CHECK_BREAKS(index.index.block_of(annas));
  CHECK_BREAKS(index.index.pin(annas));
  index.index.unpin(annas);  // of a sequence that outlives its node
  CHECK(index.index.block_of(bens) == BlockId{6});
  index.audit();
}

TEST_CASE("blocks that are pinned stay, whatever is needed") {
  // If this fails, a sequence computes over a block that holds somebody else's tokens by now.
  Index index;
  const PrefixNode held = index.place(kRoot, kAnna, {1, 1, 1, 1});
  index.index.fill(held, BlockId{1});
  index.cached(kRoot, kAnna, {2, 2, 2, 2}, 2);
  CHECK(index.index.evict() == BlockId{2});
  CHECK_FALSE(index.index.evict().has_value());
  index.index.unpin(held);
  CHECK(index.index.evict() == BlockId{1});
  CHECK(index.index.nodes() == 0);
  index.audit();
}

TEST_CASE("a place that is never filled is forgotten") {
  // If this fails, prompts that are never computed use the index up.
  Index index;
  const PrefixNode first = index.place(kRoot, kAnna, {1, 1, 1, 1});
  const PrefixNode second = index.place(first, kAnna, {2, 2, 2, 2});
  index.index.unpin(first);
  CHECK(index.index.nodes() == 2);
  index.index.unpin(second);
  CHECK(index.index.nodes() == 0);
  index.audit();
}

TEST_CASE("purging a scope leaves nothing of it, nor below it") {
  // If this fails, a tenant that was told its data is gone is still answered from it, or others
  // are.
  Index index;
  const PrefixNode shared = index.cached(kRoot, kTeam, {1, 1, 1, 1}, 0);
  index.index.pin(shared);
  index.cached(shared, kAnna, {2, 2, 2, 2}, 1);
  const PrefixNode held = index.place(shared, kBen, {3, 3, 3, 3});
  index.index.fill(held, BlockId{2});
  const PrefixNode other = index.cached(kRoot, kAnna, {4, 4, 4, 4}, 3);
  std::vector<BlockId> freed;
  std::vector<BlockId> pinned;
  index.index.purge(kTeam, freed, pinned);
  CHECK(freed == std::vector{BlockId{1}});
  std::sort(pinned.begin(), pinned.end());
  CHECK(pinned == std::vector{BlockId{0}, BlockId{2}});
  CHECK(index.index.nodes() == 1);
  CHECK(index.index.knows(other));
  CHECK_FALSE(index.index.find(kRoot, kTeam, Tokens{1, 1, 1, 1}).has_value());
  index.index.unpin(held);
  index.audit();
  index.index.purge(kAnna, freed, pinned);
  CHECK(index.index.nodes() == 0);
  index.index.purge(kBen, freed, pinned);  // nothing there
  index.audit();
}

TEST_CASE("the likest block is found whatever others have beside it") {
  // If this fails, what a tenant reuses tells what others have sent (S06).
  Index index;
  const PrefixNode shared = index.cached(kRoot, kPublic, {1, 2, 3, 4}, 0);
  index.index.pin(shared);
  for (const PrefixNode parent : {kRoot, shared}) {
    const PrefixNode own = index.cached(parent, kAnna, {9, 8, 7, 6}, parent == kRoot ? 1 : 2);
    for (Token token = 0; token < 20; ++token) {
      index.cached(parent, kBen, {9, 8, 7, token},
                   3 + static_cast<std::uint32_t>(token) + (parent == kRoot ? 0U : 20U));
    }
    const auto found = index.index.likest(parent, kAnna, Tokens{9, 8, 5});
    REQUIRE(found.has_value());
    CHECK(found->node == own);
    CHECK(found->tokens == 2);
    index.audit();
  }
}

TEST_CASE("of its own a scope has the youngest few compared") {
  // If this fails, a tenant with many beginnings makes each step long.
  Index index;
  index.cached(kRoot, kAnna, {9, 8, 7, 6}, 0);
  for (Token token = 0; token < 16; ++token) {
    index.cached(kRoot, kAnna, {5, token, 0, 0}, 1 + static_cast<std::uint32_t>(token));
  }
  CHECK_FALSE(index.index.likest(kRoot, kAnna, Tokens{9, 8, 5}).has_value());
  CHECK(index.index.likest(kRoot, kAnna, Tokens{5, 3})->tokens == 2);
  std::vector<BlockId> freed;
  std::vector<BlockId> pinned;
  index.index.purge(*index.index.find(kRoot, kAnna, Tokens{5, 7, 0, 0}), freed, pinned);
  index.audit();
  CHECK(index.index.likest(kRoot, kAnna, Tokens{9, 8, 5})->tokens == 2);
}
