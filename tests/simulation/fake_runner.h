// Stands where the model runner stands: reads plans, writes keys and values, makes tokens.
//
// A slot keeps who wrote it, for which position, and a digest of all tokens up to there, computed
// from the slot of the position before. So a token that comes out depends on every slot of its
// context, as with attention: one block mixed up, one slot not rewritten after a preemption, and
// the text is another. Whatever a block held before it was acquired is poison.

#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "core/block_table.h"
#include "core/step_plan.h"
#include "core/step_report.h"
#include "core/types.h"

namespace kvledger::simulation {

// The continuation of every prompt, known in advance: a function of the request, which sample of it
// this is, and the tokens so far. What keys and values depend on is the same for all samples.
struct Text {
  std::uint64_t seed = 0;
  Token vocabulary = 2;

  std::uint64_t begin(std::uint64_t request) const noexcept;
  std::uint64_t after(std::uint64_t digest, Token token) const noexcept;
  Token next(std::uint64_t digest, std::uint64_t sample = 0) const noexcept;
};

class FakeRunner {
 public:
  FakeRunner(const Text& text, std::int64_t blocks, std::int64_t slots_per_block, std::int64_t rows,
             std::int64_t width);

  // Learns which request the sequence `first` and those after it belong to.
  void accept(std::uint64_t first, std::int64_t samples);
  // Follows what `report` and `plan` say about the tables.
  void follow(const StepReport& report, const StepPlanView& plan);

  // What the logits of a token say, and to which sample.
  struct Wanted {
    std::uint64_t digest = 0;
    std::uint64_t sample = 0;
  };

  // Computes the plan and returns what its logits say. `tables` are the engine's own, as a kernel
  // would read them now.
  const std::vector<Wanted>& run(const StepPlanView& plan, const BlockTables& tables);

 private:
  struct Slot {
    std::uint64_t request = 0;  // 0: poison
    std::int64_t position = 0;
    std::uint64_t digest = 0;
  };

  Slot& slot(std::int64_t row, std::int64_t position);
  void poison(std::int64_t block);
  std::uint64_t request_of(std::int64_t row) const;
  void run_sequence(const StepPlanView& plan, std::size_t index);

  const Text text_;
  const std::int64_t slots_per_block_;
  const std::int64_t width_;
  std::vector<Slot> slots_;              // by block, slots_per_block each
  std::vector<std::int32_t> tables_;     // the runner's own copy, kept up by deltas alone
  std::vector<std::uint64_t> sequence_;  // by row
  std::unordered_map<std::uint64_t, std::uint64_t> requests_;  // by sequence
  std::vector<std::uint64_t> digests_;                         // by token of the plan
  std::vector<Wanted> wanted_;
};

}  // namespace kvledger::simulation
