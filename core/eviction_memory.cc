#include "core/eviction_memory.h"

#include <bit>

#include "core/check.h"

namespace kvledger {

EvictionMemory::EvictionMemory(std::int64_t size) {
  KVL_CHECK_GT(size, 0);
  KVL_CHECK_LT(size, std::int64_t{kNone});
  entries_.resize(static_cast<std::size_t>(size));
  for (Index index = static_cast<Index>(size); index-- > 0;) {
    entries_[index].newer = first_free_;
    first_free_ = index;
  }
  buckets_.resize(std::bit_ceil(2 * entries_.size()), kNone);
}

EvictionMemory::Index& EvictionMemory::bucket(std::uint64_t path) noexcept {
  return buckets_[path & (buckets_.size() - 1)];
}

void EvictionMemory::take_out(Index index) noexcept {
  Entry& entry = entries_[index];
  Index* link = &bucket(entry.block.path);
  while (*link != index) {
    link = &entries_[*link].same_bucket;
  }
  *link = entry.same_bucket;
  (entry.older == kNone ? oldest_ : entries_[entry.older].newer) = entry.newer;
  (entry.newer == kNone ? newest_ : entries_[entry.newer].older) = entry.older;
  entry.is_taken = false;
  entry.newer = first_free_;
  first_free_ = index;
  --size_;
}

std::optional<EvictedBlock> EvictionMemory::remember(const EvictedBlock& block) {
  std::optional<EvictedBlock> forgotten;
  if (first_free_ == kNone) {
    forgotten = entries_[oldest_].block;
    take_out(oldest_);
  }
  const Index index = first_free_;
  Entry& entry = entries_[index];
  first_free_ = entry.newer;
  Index& first = bucket(block.path);
  entry = Entry{block, first, newest_, kNone, true};
  first = index;
  (newest_ == kNone ? oldest_ : entries_[newest_].newer) = index;
  newest_ = index;
  ++size_;
  return forgotten;
}

EvictedBlock* EvictionMemory::next_in_round() noexcept {
  Entry& entry = entries_[in_round_];
  in_round_ = in_round_ + 1 == entries_.size() ? 0 : in_round_ + 1;
  return entry.is_taken ? &entry.block : nullptr;
}

std::optional<EvictedBlock> EvictionMemory::recall(std::uint64_t path) {
  for (Index index = bucket(path); index != kNone; index = entries_[index].same_bucket) {
    if (entries_[index].block.path == path) {
      const EvictedBlock block = entries_[index].block;
      take_out(index);
      return block;
    }
  }
  return std::nullopt;
}

}  // namespace kvledger
