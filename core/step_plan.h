// What the model has to compute in one step, as one flat buffer of 32-bit words.
//
// The buffer holds no pointers: it can be copied to another process and read there. It names rows
// of the block tables and lists what changed in them since the last plan, so a reader that keeps
// its own copy of the tables can follow.
//
//   header                    the words of StepPlanHeader
//   token_ids      [tokens]      the tokens to compute, sequence after sequence
//   positions      [tokens]      each token's position in its sequence, from 0
//   rows           [sequences]   row of the block tables
//   query_start    [sequences+1] first token of each sequence; the last entry is `tokens`
//   context_length [sequences]   tokens the sequence has after this step, these included
//   adapters       [sequences]   0 today
//   logit_tokens   [logits]      tokens whose logits are wanted, as indices into token_ids
//   logit_rows     [logits]      the row of the sequence each belongs to
//   delta_rows     [deltas]      row, index and block of every entry set in the tables, in order
//   delta_indices  [deltas]
//   delta_blocks   [deltas]
//   copy_from      [copies]      whole blocks to copy before anything is computed, one after the
//   copy_to        [copies]      other: one may be copied to and then from
//
// A sequence of no tokens (query_start equal to its successor) is legal padding. Decode tokens
// come first, prefill chunks after them. A token's logits may be wanted for several rows: samples
// of one request that begin here.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/types.h"

namespace kvledger {

struct StepPlanHeader {
  std::int32_t magic = 0;
  std::int32_t version = 0;
  std::int32_t step_low = 0;
  std::int32_t step_high = 0;
  std::int32_t tokens = 0;
  std::int32_t sequences = 0;
  std::int32_t logits = 0;
  std::int32_t deltas = 0;
  std::int32_t copies = 0;
  // Tokens of sequences that are past their prompt; they stand first.
  std::int32_t decode_tokens = 0;
  // Most prompt tokens that this step would have taken, had there been as many.
  std::int32_t prefill_room = 0;
  // Group of layers that share a block shape; 0 today.
  std::int32_t layer_group = 0;

  static constexpr std::int32_t kMagic = 0x4c504c4b;  // "KLPL"
  static constexpr std::int32_t kVersion = 3;
};

inline constexpr std::int64_t kStepPlanHeaderWords = sizeof(StepPlanHeader) / sizeof(std::int32_t);

// The arrays of a plan, as they lie in its buffer.
struct StepPlanView {
  StepPlanHeader header;
  StepId step;
  std::span<const std::int32_t> token_ids;
  std::span<const std::int32_t> positions;
  std::span<const std::int32_t> rows;
  std::span<const std::int32_t> query_start;
  std::span<const std::int32_t> context_length;
  std::span<const std::int32_t> adapters;
  std::span<const std::int32_t> logit_tokens;
  std::span<const std::int32_t> logit_rows;
  std::span<const std::int32_t> delta_rows;
  std::span<const std::int32_t> delta_indices;
  std::span<const std::int32_t> delta_blocks;
  std::span<const std::int32_t> copy_from;
  std::span<const std::int32_t> copy_to;

  // Finds the arrays in `buffer`, wherever it lies; nothing if it is not a whole plan of this
  // version.
  static std::optional<StepPlanView> read(std::span<const std::int32_t> buffer);
};

// Builds a plan: begin(), the decode sequences, begin_prefill(), the prefill chunks, more logits,
// finish(); deltas and copies at any time between.
class StepPlan {
 public:
  // Room for the largest plan, so that building one allocates nothing.
  StepPlan(std::int64_t tokens_max, std::int64_t sequences_max, std::int64_t deltas_max);

  // The view points into the buffer, which moves along; copy the buffer, not the plan.
  StepPlan(StepPlan&&) = default;
  StepPlan& operator=(StepPlan&&) = default;
  StepPlan(const StepPlan&) = delete;
  StepPlan& operator=(const StepPlan&) = delete;

  void begin(StepId step);
  void append_delta(TableRow row, std::int64_t index, BlockId block);
  void append_copy(BlockId from, BlockId to);
  // Appends `tokens`, consecutive ones of the sequence in `row`; the first has `position`.
  void append_sequence(TableRow row, std::span<const Token> tokens, std::int64_t position,
                       bool wants_logits);
  // Wants the logits of a token, an index into the plan, for another row too.
  void append_logits(std::int32_t token, TableRow row);
  void begin_prefill();
  void set_prefill_room(std::int64_t tokens) noexcept;
  void finish();

  // Valid from finish() to the next begin().
  const StepPlanView& view() const noexcept { return view_; }
  std::span<const std::int32_t> buffer() const noexcept { return buffer_; }

 private:
  StepPlanHeader header_;
  std::vector<std::int32_t> token_ids_;
  std::vector<std::int32_t> positions_;
  std::vector<std::int32_t> rows_;
  std::vector<std::int32_t> query_start_;
  std::vector<std::int32_t> context_length_;
  std::vector<std::int32_t> adapters_;
  std::vector<std::int32_t> logit_tokens_;
  std::vector<std::int32_t> logit_rows_;
  std::vector<std::int32_t> delta_rows_;
  std::vector<std::int32_t> delta_indices_;
  std::vector<std::int32_t> delta_blocks_;
  std::vector<std::int32_t> copy_from_;
  std::vector<std::int32_t> copy_to_;
  std::vector<std::int32_t> buffer_;
  StepPlanView view_;
};

}  // namespace kvledger
