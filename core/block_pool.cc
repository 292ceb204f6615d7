#include "core/block_pool.h"

#include "core/check.h"

namespace kvledger {

BlockPool::BlockPool(Ledger& ledger)
    : ledger_(ledger),
      references_(static_cast<std::size_t>(ledger.total().value()), 0),
      kept_(static_cast<std::size_t>(ledger.total().value()), 0) {
  const auto count = static_cast<std::uint32_t>(ledger.total().value());
  free_.reserve(count);
  releasing_.reserve(count);
  for (std::uint32_t i = count; i-- > 0;) {
    free_.push_back(BlockId{i});
  }
}

std::optional<Reservation> BlockPool::reserve(RequestAccount account, BlockCount count) {
  if (count > available()) {
    return std::nullopt;
  }
  ledger_.reserve(account, count);
  return Reservation(*this, account, count);
}

BlockId BlockPool::acquire(RequestAccount account) {
  KVL_CHECK(!free_.empty());
  const BlockId block = free_.back();
  free_.pop_back();
  KVL_CHECK_EQ(references_[block.value()], 0U);
  references_[block.value()] = 1;
  ledger_.acquire(account, block);
  return block;
}

void BlockPool::forfeit(RequestAccount account, BlockCount count) {
  ledger_.forfeit(account, count);
}

Nanoseconds BlockPool::join(RequestAccount account, BlockId block) {
  std::uint32_t& references = checked_at(references_, block.value());
  KVL_CHECK(references > 0 || is_kept(block));
  const Nanoseconds stamp = ledger_.join(account, block, references);
  ++references;
  return stamp;
}

bool BlockPool::end_reference(BlockId block) {
  std::uint32_t& references = checked_at(references_, block.value());
  KVL_CHECK_GT(references, 0U);
  return --references == 0;
}

void BlockPool::release(RequestAccount account, BlockId block, Nanoseconds stamp) {
  if (step_is_open_ && (is_kept(block) || !ledger_.holder_of(block))) {
    retire(account, block, stamp);  // another request that had it may be in the step
  } else if (!end_reference(block)) {
    ledger_.leave(account, block, stamp);
  } else if (is_kept(block)) {
    ledger_.cache(account, block, stamp);
  } else {
    ledger_.release(account, block, stamp);
    free_.push_back(block);
  }
}

void BlockPool::retire(RequestAccount account, BlockId block, Nanoseconds stamp) {
  if (!end_reference(block)) {
    ledger_.leave(account, block, stamp);
    return;
  }
  ledger_.retire(account, block, stamp);
  releasing_.push_back(block);
}

void BlockPool::settle() {
  step_is_open_ = false;
  for (const BlockId block : releasing_) {
    const bool kept = is_kept(block);
    ledger_.settle(block, kept);
    if (!kept) {
      free_.push_back(block);
    }
  }
  releasing_.clear();
}

void BlockPool::keep(RequestAccount account, BlockId block, TenantId owner) {
  KVL_CHECK_GT(references(block), 0U);
  KVL_CHECK(!is_kept(block));
  kept_[block.value()] = 1;
  if (is_shared(ScopeId{owner.value()})) {
    ledger_.give(account, block, owner, references_[block.value()]);
  }
}

// Who still refers to the block goes on with it; a step that may still touch it keeps it too.
void BlockPool::drop(BlockId block) {
  KVL_CHECK(is_kept(block));
  kept_[block.value()] = 0;
  if (ledger_.state_of(block) == BlockState::kCached) {
    ledger_.evict(block);
    free_.push_back(block);
  }
}

void BlockPool::hold_for_scope(BlockId block) {
  KVL_CHECK(is_kept(block));
  if (references_[block.value()]++ == 0) {
    ledger_.hold_for_scope(block);
  }
}

void BlockPool::end_hold_for_scope(BlockId block) {
  if (!end_reference(block)) {
    return;
  }
  ledger_.end_hold_for_scope(block, step_is_open_);
  if (step_is_open_) {
    releasing_.push_back(block);
  } else if (!is_kept(block)) {
    ledger_.evict(block);
    free_.push_back(block);
  }
}

std::uint32_t BlockPool::references(BlockId block) const {
  return checked_at(references_, block.value());
}

std::optional<std::string> BlockPool::audit() const {
  std::vector<bool> listed(references_.size(), false);
  for (const auto* list : {&free_, &releasing_}) {
    const BlockState expected = list == &free_ ? BlockState::kFree : BlockState::kReleasing;
    for (const BlockId block : *list) {
      if (listed[block.value()]) {
        return "block " + std::to_string(block.value()) + " is listed twice";
      }
      listed[block.value()] = true;
      if (ledger_.state_of(block) != expected || references_[block.value()] != 0) {
        return "block " + std::to_string(block.value()) + " is listed as unused but is not";
      }
    }
  }
  for (std::uint32_t i = 0; i < references_.size(); ++i) {
    const BlockState state = ledger_.state_of(BlockId{i});
    const std::string name = "block " + std::to_string(i);
    if (kept_[i] != 0 && state == BlockState::kFree) {
      return name + " is kept by the index but free";
    }
    if (listed[i]) {
      continue;
    }
    if (references_[i] == 0 && kept_[i] == 0) {
      return name + " is lost: neither listed nor referenced";
    }
    if (references_[i] > 0 && state != BlockState::kHeld) {
      return name + " is referenced but held by nobody";
    }
    if (references_[i] == 0 && state != BlockState::kCached) {
      return name + " is kept by the index but not cached";
    }
  }
  return std::nullopt;
}

}  // namespace kvledger
