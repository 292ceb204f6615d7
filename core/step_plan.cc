#include "core/step_plan.h"

#include <algorithm>
#include <cstring>

#include "core/check.h"

namespace kvledger {
namespace {

// Cuts `count` words off the front of `rest`; false if there are not as many.
bool take(std::span<const std::int32_t>& rest, std::int64_t count,
          std::span<const std::int32_t>& part) {
  if (count < 0 || static_cast<std::int64_t>(rest.size()) < count) {
    return false;
  }
  part = rest.first(static_cast<std::size_t>(count));
  rest = rest.subspan(static_cast<std::size_t>(count));
  return true;
}

}  // namespace

std::optional<StepPlanView> StepPlanView::read(std::span<const std::int32_t> buffer) {
  StepPlanView view;
  if (static_cast<std::int64_t>(buffer.size()) < kStepPlanHeaderWords) {
    return std::nullopt;
  }
  std::memcpy(static_cast<void*>(&view.header), buffer.data(), sizeof(view.header));
  const StepPlanHeader& header = view.header;
  if (header.magic != StepPlanHeader::kMagic || header.version != StepPlanHeader::kVersion) {
    return std::nullopt;
  }
  view.step = StepId{std::uint64_t{static_cast<std::uint32_t>(header.step_high)} << 32 |
                     static_cast<std::uint32_t>(header.step_low)};
  std::span<const std::int32_t> rest = buffer.subspan(kStepPlanHeaderWords);
  const std::int64_t tokens = header.tokens;
  const std::int64_t sequences = header.sequences;
  const std::int64_t logits = header.logits;
  const std::int64_t deltas = header.deltas;
  const std::int64_t copies = header.copies;
  const bool whole =
      take(rest, tokens, view.token_ids) && take(rest, tokens, view.positions) &&
      take(rest, sequences, view.rows) && take(rest, sequences + 1, view.query_start) &&
      take(rest, sequences, view.context_length) && take(rest, sequences, view.adapters) &&
      take(rest, logits, view.logit_tokens) && take(rest, logits, view.logit_rows) &&
      take(rest, deltas, view.delta_rows) && take(rest, deltas, view.delta_indices) &&
      take(rest, deltas, view.delta_blocks) && take(rest, copies, view.copy_from) &&
      take(rest, copies, view.copy_to);
  if (!whole || !rest.empty()) {
    return std::nullopt;
  }
  return view;
}

StepPlan::StepPlan(std::int64_t tokens_max, std::int64_t sequences_max, std::int64_t deltas_max) {
  const auto reserve = [](std::int64_t count, auto&... arrays) {
    (arrays.reserve(static_cast<std::size_t>(count)), ...);
  };
  reserve(tokens_max, token_ids_, positions_);
  reserve(sequences_max + 1, rows_, query_start_, context_length_, adapters_);
  reserve(sequences_max, logit_tokens_, logit_rows_);
  reserve(deltas_max, delta_rows_, delta_indices_, delta_blocks_);
  // One for each that decodes, and for each that begins in a row that somebody had to leave.
  reserve(2 * sequences_max, copy_from_, copy_to_);
  reserve(kStepPlanHeaderWords + 2 * tokens_max + 10 * sequences_max + 1 + 3 * deltas_max, buffer_);
}

void StepPlan::begin(StepId step) {
  header_ = StepPlanHeader{};
  header_.magic = StepPlanHeader::kMagic;
  header_.version = StepPlanHeader::kVersion;
  header_.step_low = static_cast<std::int32_t>(static_cast<std::uint32_t>(step.value()));
  header_.step_high = static_cast<std::int32_t>(static_cast<std::uint32_t>(step.value() >> 32));
  for (auto* array : {&token_ids_, &positions_, &rows_, &query_start_, &context_length_, &adapters_,
                      &logit_tokens_, &logit_rows_, &delta_rows_, &delta_indices_, &delta_blocks_,
                      &copy_from_, &copy_to_, &buffer_}) {
    array->clear();
  }
  query_start_.push_back(0);
  view_ = StepPlanView{};
}

void StepPlan::append_delta(TableRow row, std::int64_t index, BlockId block) {
  delta_rows_.push_back(static_cast<std::int32_t>(row.value()));
  delta_indices_.push_back(static_cast<std::int32_t>(index));
  delta_blocks_.push_back(static_cast<std::int32_t>(block.value()));
}

void StepPlan::append_copy(BlockId from, BlockId to) {
  copy_from_.push_back(static_cast<std::int32_t>(from.value()));
  copy_to_.push_back(static_cast<std::int32_t>(to.value()));
}

void StepPlan::append_sequence(TableRow row, std::span<const Token> tokens, std::int64_t position,
                               bool wants_logits) {
  KVL_CHECK(!tokens.empty());
  const auto count = static_cast<std::int32_t>(tokens.size());
  const auto first = static_cast<std::int32_t>(position);
  const auto row_index = static_cast<std::int32_t>(row.value());
  token_ids_.insert(token_ids_.end(), tokens.begin(), tokens.end());
  for (std::int32_t i = 0; i < count; ++i) {
    positions_.push_back(first + i);
  }
  rows_.push_back(row_index);
  query_start_.push_back(static_cast<std::int32_t>(token_ids_.size()));
  context_length_.push_back(first + count);
  adapters_.push_back(0);
  if (wants_logits) {
    append_logits(query_start_.back() - 1, row);
  }
}

void StepPlan::append_logits(std::int32_t token, TableRow row) {
  KVL_CHECK_LT(token, static_cast<std::int32_t>(token_ids_.size()));
  logit_tokens_.push_back(token);
  logit_rows_.push_back(static_cast<std::int32_t>(row.value()));
}

void StepPlan::begin_prefill() {
  header_.decode_tokens = static_cast<std::int32_t>(token_ids_.size());
}

void StepPlan::set_prefill_room(std::int64_t tokens) noexcept {
  header_.prefill_room = static_cast<std::int32_t>(tokens);
}

void StepPlan::finish() {
  header_.tokens = static_cast<std::int32_t>(token_ids_.size());
  header_.sequences = static_cast<std::int32_t>(rows_.size());
  header_.logits = static_cast<std::int32_t>(logit_tokens_.size());
  header_.deltas = static_cast<std::int32_t>(delta_rows_.size());
  header_.copies = static_cast<std::int32_t>(copy_from_.size());
  buffer_.resize(kStepPlanHeaderWords);
  std::memcpy(buffer_.data(), &header_, sizeof(header_));
  for (const auto* array : {&token_ids_, &positions_, &rows_, &query_start_, &context_length_,
                            &adapters_, &logit_tokens_, &logit_rows_, &delta_rows_, &delta_indices_,
                            &delta_blocks_, &copy_from_, &copy_to_}) {
    buffer_.insert(buffer_.end(), array->begin(), array->end());
  }
  const std::optional<StepPlanView> view = StepPlanView::read(buffer_);
  KVL_CHECK(view.has_value());
  view_ = *view;
}

}  // namespace kvledger
