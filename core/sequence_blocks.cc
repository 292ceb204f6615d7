#include "core/sequence_blocks.h"

#include "core/check.h"

namespace kvledger {

SequenceBlocks::SequenceBlocks(std::int32_t slots_per_block, BlockPool& pool, BlockTables& tables)
    : slots_per_block_(slots_per_block), pool_(pool), tables_(tables) {
  KVL_CHECK_GT(slots_per_block, 0);
}

BlockCount SequenceBlocks::blocks_for(std::int64_t tokens) const noexcept {
  return BlockCount{(tokens + slots_per_block_ - 1) / slots_per_block_};
}

BlockCount SequenceBlocks::full_blocks(std::int64_t tokens) const noexcept {
  return BlockCount{tokens / slots_per_block_};
}

BlockCount SequenceBlocks::missing(const Sequence& sequence, std::int64_t tokens) const {
  const BlockCount lacking = blocks_for(sequence.computed + tokens) - tables_.length(sequence.row);
  return BlockCount{lacking.value() + (tokens > 0 && must_copy(sequence) ? 1 : 0)};
}

bool SequenceBlocks::must_copy(const Sequence& sequence) const {
  if (!sequence.request->is_shared()) {
    return false;
  }
  const std::int64_t index = sequence.computed / slots_per_block_;
  return index < tables_.length(sequence.row).value() &&
         pool_.references(tables_.at(sequence.row, index)) > 1;
}

void SequenceBlocks::take(Sequence& sequence, StepPlan& plan) {
  const BlockId block = sequence.reservation.acquire();
  std::int64_t index = tables_.length(sequence.row).value();
  if (must_copy(sequence)) {
    index = sequence.computed / slots_per_block_;
    const BlockId shared = tables_.at(sequence.row, index);
    plan.append_copy(shared, block);
    tables_.replace(sequence.row, index, block);
    pool_.release(sequence.account, shared);
  } else {
    tables_.append(sequence.row, block);
  }
  plan.append_delta(sequence.row, index, block);
}

void SequenceBlocks::share(const Sequence& from, Sequence& to, std::int64_t tokens,
                           StepPlan& plan) {
  KVL_CHECK(from.request == to.request);
  KVL_CHECK_EQ(tables_.length(to.row).value(), 0);
  for (std::int64_t i = 0; i < blocks_for(tokens).value(); ++i) {
    const BlockId block = tables_.at(from.row, i);
    pool_.retain(block);
    tables_.append(to.row, block);
    plan.append_delta(to.row, i, block);
  }
  to.computed = tokens;
  to.shared_tokens += tokens;
}

void SequenceBlocks::give_back(Sequence& sequence) {
  sequence.reservation.forfeit();
  const std::int64_t length = tables_.length(sequence.row).value();
  for (std::int64_t i = 0; i < length; ++i) {
    const BlockId block = tables_.at(sequence.row, i);
    if (sequence.request->in_step) {
      pool_.retire(sequence.account, block);
    } else {
      pool_.release(sequence.account, block);
    }
  }
  tables_.clear(sequence.row);
  tables_.give_back(sequence.row);
}

}  // namespace kvledger
