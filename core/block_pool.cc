#include "core/block_pool.h"

#include "core/check.h"

namespace kvledger {

BlockPool::BlockPool(Ledger& ledger)
    : ledger_(ledger), references_(static_cast<std::size_t>(ledger.total().value()), 0) {
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

void BlockPool::retain(BlockId block) {
  std::uint32_t& references = checked_at(references_, block.value());
  KVL_CHECK_GT(references, 0U);
  ++references;
}

bool BlockPool::drop(BlockId block) {
  std::uint32_t& references = checked_at(references_, block.value());
  KVL_CHECK_GT(references, 0U);
  return --references == 0;
}

void BlockPool::release(RequestAccount account, BlockId block) {
  if (drop(block)) {
    ledger_.release(account, block);
    free_.push_back(block);
  }
}

void BlockPool::retire(RequestAccount account, BlockId block) {
  if (drop(block)) {
    ledger_.retire(account, block);
    releasing_.push_back(block);
  }
}

void BlockPool::settle() {
  for (const BlockId block : releasing_) {
    ledger_.settle(block);
    free_.push_back(block);
  }
  releasing_.clear();
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
    if (listed[i]) {
      continue;
    }
    if (references_[i] == 0) {
      return "block " + std::to_string(i) + " is lost: neither listed nor referenced";
    }
    if (ledger_.state_of(BlockId{i}) != BlockState::kHeld) {
      return "block " + std::to_string(i) + " is referenced but held by nobody";
    }
  }
  return std::nullopt;
}

}  // namespace kvledger
