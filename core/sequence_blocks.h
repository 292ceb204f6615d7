// The blocks of running sequences: taking them, sharing them between samples, giving them back.
//
// A sample that begins where another stands shares the blocks of their common tokens. Nobody writes
// into a block that two samples have: who is to write first takes a block of its own, and the plan
// says what to copy into it before anything of the step is computed (copy-on-write). The last one
// left keeps the block.
//
// What the prefix index has of a sequence's beginning (prefix_cache.h) is shared in the same way,
// by whole blocks that nobody writes any more; the last, partial one is copied at once.
//
// One thread at a time.

#pragma once

#include <cstdint>

#include "core/block_pool.h"
#include "core/block_table.h"
#include "core/prefix_cache.h"
#include "core/sequence.h"
#include "core/step_plan.h"
#include "core/types.h"

namespace kvledger {

class SequenceBlocks {
 public:
  SequenceBlocks(std::int32_t slots_per_block, BlockPool& pool, BlockTables& tables,
                 PrefixCache& cache);

  // Blocks that hold `tokens` tokens of a sequence.
  BlockCount blocks_for(std::int64_t tokens) const noexcept;
  // Blocks that hold nothing but the first `tokens` tokens.
  BlockCount full_blocks(std::int64_t tokens) const noexcept;
  // Blocks that a sequence has to take before it can compute `tokens` more tokens.
  BlockCount missing(const Sequence& sequence, std::int64_t tokens) const;

  // Takes one of those, out of the sequence's reservation.
  void take(Sequence& sequence, StepPlan& plan);
  // Lets `to`, which has no block yet, begin with the blocks of the first `tokens` tokens of
  // `from`, another sample of its request.
  void share(const Sequence& from, Sequence& to, std::int64_t tokens, StepPlan& plan);
  // Lets a sequence that has no block yet begin with the whole blocks that were matched.
  void begin_with(Sequence& sequence, const PrefixMatch& match, StepPlan& plan);
  // Copies what the match has of the next block into one of the sequence's reservation.
  void copy_tail(Sequence& sequence, const PrefixMatch& match, StepPlan& plan);
  // Exchanges blocks that another sequence computed at the same time for that one's.
  void exchange_twice(Sequence& running, StepPlan& plan);
  // Takes the blocks that others have computed meanwhile in place of those it would compute next.
  void catch_up(Sequence& running, StepPlan& plan);
  // Gives back all blocks, the row, and what was promised.
  void give_back(Sequence& sequence);

 private:
  // Whether the next token would be written into a block that another sample has too.
  bool must_copy(const Sequence& sequence) const;

  const std::int64_t slots_per_block_;
  BlockPool& pool_;
  BlockTables& tables_;
  PrefixCache& cache_;
};

}  // namespace kvledger
