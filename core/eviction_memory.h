// Remembers blocks that were evicted, the last ones, by their path: a policy that forgets a block
// with its memory would take each return for a first visit.
//
// Fixed size: the oldest is forgotten for the newest. Everything is O(1) on average and allocates
// nothing after construction. One thread at a time.

#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace kvledger {

struct EvictedBlock {
  std::uint64_t path = 0;
  std::uint64_t used_at = 0;
  std::int64_t uses = 0;
  // Up to which age its policy has learnt that it was not used.
  std::uint64_t passed = 0;
};

class EvictionMemory {
 public:
  // Room for `size` blocks, at least 1.
  explicit EvictionMemory(std::int64_t size);

  // Remembers a block; says which one had to be forgotten for it, if one had.
  std::optional<EvictedBlock> remember(const EvictedBlock& block);
  // Takes a block out, if it is remembered.
  std::optional<EvictedBlock> recall(std::uint64_t path);

  // Goes round over all places, one a call: the block there, or nullptr if the place is free.
  EvictedBlock* next_in_round() noexcept;

  std::int64_t size() const noexcept { return size_; }

 private:
  using Index = std::uint32_t;
  static constexpr Index kNone = ~Index{0};

  struct Entry {
    EvictedBlock block;
    Index same_bucket = kNone;
    Index older = kNone;
    Index newer = kNone;  // of a free entry: the next free one
    bool is_taken = false;
  };

  Index& bucket(std::uint64_t path) noexcept;
  void take_out(Index index) noexcept;

  std::vector<Entry> entries_;
  std::vector<Index> buckets_;  // a power of two of them
  Index oldest_ = kNone;
  Index newest_ = kNone;
  Index first_free_ = kNone;
  std::size_t in_round_ = 0;
  std::int64_t size_ = 0;
};

}  // namespace kvledger
