#include "core/sequence_blocks.h"

#include <algorithm>

#include "core/check.h"

namespace kvledger {

SequenceBlocks::SequenceBlocks(std::int32_t slots_per_block, BlockPool& pool, BlockTables& tables,
                               PrefixCache& cache)
    : slots_per_block_(slots_per_block), pool_(pool), tables_(tables), cache_(cache) {
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
  const auto known = static_cast<std::int64_t>(from.path.size());
  const std::int64_t full = full_blocks(tokens).value();
  to.path.clear();
  to.own_from = from.own_from;
  to.path_ends = from.path_ends;
  for (std::int64_t i = 0; i < blocks_for(tokens).value(); ++i) {
    const BlockId block = tables_.at(from.row, i);
    if (i == full && i < known) {
      // Other requests may have it too, and its end is this sequence's to write.
      const BlockId copy = to.reservation.acquire();
      plan.append_copy(block, copy);
      tables_.append(to.row, copy);
      plan.append_delta(to.row, i, copy);
      break;
    }
    const Nanoseconds stamp = pool_.join(to.account, block);
    if (i < known) {
      cache_.follow(from, to, stamp);
    }
    tables_.append(to.row, block);
    plan.append_delta(to.row, i, block);
  }
  to.computed = tokens;
  to.shared_tokens += tokens;
}

void SequenceBlocks::begin_with(Sequence& sequence, const PrefixMatch& match, StepPlan& plan) {
  KVL_CHECK_EQ(tables_.length(sequence.row).value(), 0);
  for (std::int64_t i = 0; i < match.blocks; ++i) {
    const BlockId block = cache_.adopt(sequence, i);
    tables_.append(sequence.row, block);
    plan.append_delta(sequence.row, i, block);
  }
  sequence.computed = match.blocks * slots_per_block_;
}

void SequenceBlocks::copy_tail(Sequence& sequence, const PrefixMatch& match, StepPlan& plan) {
  const BlockId copy = sequence.reservation.acquire();
  plan.append_copy(cache_.source_of(match), copy);
  tables_.append(sequence.row, copy);
  plan.append_delta(sequence.row, match.blocks, copy);
  sequence.computed += match.tail;
  cache_.count_tail(sequence, match);
}

void SequenceBlocks::catch_up(Sequence& running, StepPlan& plan) {
  while (cache_.has_next(running)) {
    const auto index = static_cast<std::int64_t>(running.path.size());
    const BlockId block = cache_.adopt_next(running);
    if (index < tables_.length(running.row).value()) {
      const BlockId own = tables_.at(running.row, index);
      tables_.replace(running.row, index, block);
      pool_.release(running.account, own);
    } else {
      tables_.append(running.row, block);
      running.reservation.forfeit(
          BlockCount{running.reservation.remaining() > BlockCount{} ? 1 : 0});
    }
    plan.append_delta(running.row, index, block);
    running.computed = (index + 1) * slots_per_block_;
  }
}

void SequenceBlocks::exchange_twice(Sequence& running, StepPlan& plan) {
  for (auto i = running.twice_from; i < static_cast<std::int64_t>(running.path.size()); ++i) {
    if (const auto block = cache_.exchange(running, i, tables_.at(running.row, i))) {
      tables_.replace(running.row, i, *block);
      plan.append_delta(running.row, i, *block);
    }
  }
  running.twice_from = -1;
}

void SequenceBlocks::give_back(Sequence& sequence) {
  sequence.reservation.forfeit();
  const std::int64_t length = tables_.length(sequence.row).value();
  const auto known = static_cast<std::int64_t>(sequence.path.size());
  for (std::int64_t i = 0; i < length; ++i) {
    const BlockId block = tables_.at(sequence.row, i);
    const Nanoseconds stamp =
        i < known ? sequence.path[static_cast<std::size_t>(i)].stamp : Nanoseconds{0};
    if (sequence.request->in_step) {
      pool_.retire(sequence.account, block, stamp);
    } else {
      pool_.release(sequence.account, block, stamp);
    }
  }
  cache_.leave(sequence);
  tables_.clear(sequence.row);
  tables_.give_back(sequence.row);
}

}  // namespace kvledger
