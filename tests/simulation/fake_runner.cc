#include "tests/simulation/fake_runner.h"

#include <algorithm>

#include "tests/simulation/random.h"

namespace kvledger::simulation {

std::uint64_t Text::begin(std::uint64_t sequence) const noexcept {
  return mix(seed ^ mix(sequence));
}

std::uint64_t Text::after(std::uint64_t digest, Token token) const noexcept {
  return mix(digest + static_cast<std::uint64_t>(token));
}

Token Text::next(std::uint64_t digest) const noexcept {
  return static_cast<Token>((digest >> 17) % static_cast<std::uint64_t>(vocabulary));
}

FakeRunner::FakeRunner(const Text& text, std::int64_t blocks, std::int64_t slots_per_block,
                       std::int64_t rows, std::int64_t width)
    : text_(text),
      slots_per_block_(slots_per_block),
      width_(width),
      slots_(static_cast<std::size_t>(blocks * slots_per_block)),
      tables_(static_cast<std::size_t>(rows * width), -1),
      sequence_(static_cast<std::size_t>(rows), 0) {}

void FakeRunner::follow(const StepReport& report, const StepPlanView& plan) {
  for (const Admission& admission : report.admissions) {
    sequence_.at(static_cast<std::size_t>(admission.row)) = admission.sequence;
  }
  for (std::size_t i = 0; i < plan.delta_rows.size(); ++i) {
    expect(plan.delta_indices[i] < width_, "a delta past the width of the tables");
    tables_.at(static_cast<std::size_t>(plan.delta_rows[i] * width_ + plan.delta_indices[i])) =
        plan.delta_blocks[i];
    const auto first = static_cast<std::size_t>(plan.delta_blocks[i] * slots_per_block_);
    for (std::size_t slot = first; slot < first + static_cast<std::size_t>(slots_per_block_);
         ++slot) {
      slots_.at(slot) = Slot{};
    }
  }
}

const std::vector<std::uint64_t>& FakeRunner::run(const StepPlanView& plan,
                                                  const BlockTables& tables) {
  digests_.assign(plan.token_ids.size(), 0);
  for (std::size_t i = 0; i < plan.rows.size(); ++i) {
    const std::int64_t blocks = (plan.context_length[i] + slots_per_block_ - 1) / slots_per_block_;
    const std::int64_t first = plan.rows[i] * width_;
    expect(
        std::equal(tables.data() + first, tables.data() + first + blocks, tables_.begin() + first),
        "the engine's tables are not what the deltas made of them");
    run_sequence(plan, i);
  }
  wanted_.clear();
  for (const std::int32_t token : plan.logit_tokens) {
    wanted_.push_back(digests_.at(static_cast<std::size_t>(token)));
  }
  return wanted_;
}

void FakeRunner::run_sequence(const StepPlanView& plan, std::size_t index) {
  const std::int64_t row = plan.rows[index];
  const std::uint64_t sequence = sequence_.at(static_cast<std::size_t>(row));
  const std::int64_t begin = plan.query_start[index];
  const std::int64_t end = plan.query_start[index + 1];
  const std::int64_t past = plan.context_length[index] - (end - begin);
  for (std::int64_t position = 0; position < past; ++position) {
    const Slot& read = slot(row, position);
    expect(read.sequence == sequence && read.position == position,
           "a context slot was not written for this sequence and position");
  }
  std::uint64_t digest = past == 0 ? text_.begin(sequence) : slot(row, past - 1).digest;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto token = static_cast<std::size_t>(i);
    expect_equal("position of a planned token", std::int64_t{plan.positions[token]},
                 past + i - begin);
    digest = text_.after(digest, plan.token_ids[token]);
    slot(row, past + i - begin) = Slot{sequence, past + i - begin, digest};
    digests_[token] = digest;
  }
}

FakeRunner::Slot& FakeRunner::slot(std::int64_t row, std::int64_t position) {
  const std::int64_t block =
      tables_.at(static_cast<std::size_t>(row * width_ + position / slots_per_block_));
  return slots_.at(
      static_cast<std::size_t>(block * slots_per_block_ + position % slots_per_block_));
}

}  // namespace kvledger::simulation
