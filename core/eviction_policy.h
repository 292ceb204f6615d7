// Chooses which cached block goes when room is needed.
//
// The prefix index tells a policy what happens to its blocks; a policy answers with a victim:
//
//   entered(slot, now)  a block came in, by its first use
//   used(slot, now)     a block that is in was used again
//   offered(slot)       from now on it may be a victim: nobody holds it, and where the policy takes
//                       leaves only, nothing hangs below it
//   withdrawn(slot)     it may not be one any more
//   leaving(slot, how)  it goes; it is not offered any more
//   adopted(slot, now)  a block came from another policy of the same kind, with what that one wrote
//                       of its uses; not used now
//   victim()            the offered block to go, kNoSlot if none is offered
//
// Time is the count of uses so far of the blocks in one partition of the index. Everything is O(1),
// amortized, and allocates nothing. One thread at a time.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "core/cached_block.h"

namespace kvledger {

// How a block leaves its policy: for another block, for good, or for another policy.
enum class Departure : std::uint8_t { kEvicted, kPurged, kMoved };

class EvictionPolicy {
 public:
  EvictionPolicy() = default;
  virtual ~EvictionPolicy() = default;
  EvictionPolicy(const EvictionPolicy&) = delete;
  EvictionPolicy& operator=(const EvictionPolicy&) = delete;

  // Whether a block goes only after all that hang below it.
  virtual bool takes_leaves_only() const noexcept = 0;

  virtual void entered(CacheSlot slot, std::uint64_t now) = 0;
  virtual void used(CacheSlot slot, std::uint64_t now) = 0;
  virtual void adopted(CacheSlot slot, std::uint64_t now) = 0;
  virtual void offered(CacheSlot slot) = 0;
  virtual void withdrawn(CacheSlot slot) = 0;
  virtual void leaving(CacheSlot slot, Departure how) = 0;
  virtual CacheSlot victim() = 0;
};

}  // namespace kvledger
