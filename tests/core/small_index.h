// A prefix index with few nodes, driven by hand.

#pragma once

#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/lru_policy.h"
#include "core/prefix_index.h"
#include "core/reuse_policy.h"
#include "core/s3_fifo_policy.h"
#include "tests/check_throws.h"

namespace kvledger::testing {

inline constexpr ScopeId kAnna{1};
inline constexpr ScopeId kBen{2};
inline constexpr ScopeId kTeam{0x80000000U};
inline constexpr ScopeId kPublic{0x80000001U};

using Tokens = std::vector<Token>;

template <class Policy>
std::unique_ptr<EvictionPolicy> make(CachedBlocks& blocks, std::int64_t capacity) {
  if constexpr (std::is_same_v<Policy, LruPolicy>) {
    return std::make_unique<Policy>(blocks);
  } else {
    return std::make_unique<Policy>(blocks, capacity);
  }
}

inline PrefixIndexSettings small_index() {
  return PrefixIndexSettings{.nodes = 64, .block_tokens = 4, .seed = 99};
}

template <class Policy = LruPolicy>
struct IndexOf {
  explicit IndexOf(const PrefixIndexSettings& settings = small_index())
      : index(settings, make<Policy>) {}

  PrefixNode place(PrefixNode parent, ScopeId scope, const Tokens& tokens,
                   CacheOwner owner = CacheOwner{0}) {
    const std::optional<PrefixNode> node = index.place(parent, scope, tokens, owner);
    REQUIRE(node.has_value());
    return *node;
  }
  // A filled node, not pinned.
  PrefixNode cached(PrefixNode parent, ScopeId scope, const Tokens& tokens, std::uint32_t block,
                    CacheOwner owner = CacheOwner{0}) {
    const PrefixNode node = place(parent, scope, tokens, owner);
    index.fill(node, BlockId{block});
    index.unpin(node);
    return node;
  }
  void audit() const { CHECK(index.audit().value_or("") == ""); }

  PrefixIndex index;
};

using Index = IndexOf<>;

inline constexpr PrefixNode kRoot = PrefixIndex::root();

}  // namespace kvledger::testing
