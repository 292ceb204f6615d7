#include "tests/simulation/fake_runner.h"

#include <algorithm>

#include "tests/simulation/random.h"

namespace kvledger::simulation {

std::uint64_t Text::begin(std::uint64_t request) const noexcept {
  return mix(seed ^ mix(request));
}

std::uint64_t Text::after(std::uint64_t digest, Token token) const noexcept {
  return mix(digest + static_cast<std::uint64_t>(token));
}

Token Text::next(std::uint64_t digest, std::uint64_t sample) const noexcept {
  const std::uint64_t drawn = sample == 0 ? digest : mix(digest ^ mix(sample));
  return static_cast<Token>((drawn >> 17) % static_cast<std::uint64_t>(vocabulary));
}

FakeRunner::FakeRunner(const Text& text, std::int64_t blocks, std::int64_t slots_per_block,
                       std::int64_t rows, std::int64_t width)
    : text_(text),
      slots_per_block_(slots_per_block),
      width_(width),
      slots_(static_cast<std::size_t>(blocks * slots_per_block)),
      tables_(static_cast<std::size_t>(rows * width), -1),
      sequence_(static_cast<std::size_t>(rows), 0) {}

void FakeRunner::accept(std::uint64_t first, std::int64_t samples) {
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(samples); ++i) {
    requests_[first + i] = first;
  }
}

void FakeRunner::follow(const StepReport& report, const StepPlanView& plan) {
  struct Shared {
    std::int64_t blocks = 0;  // with which a row begins
    std::int64_t seen = 0;
  };
  std::unordered_map<std::int64_t, Shared> rows;
  for (const Admission& admission : report.admissions) {
    sequence_.at(static_cast<std::size_t>(admission.row)) = admission.sequence;
    rows[admission.row].blocks =
        (admission.shared_tokens + slots_per_block_ - 1) / slots_per_block_;
  }
  for (std::size_t i = 0; i < plan.copy_from.size(); ++i) {
    const std::int64_t from = plan.copy_from[i] * slots_per_block_;
    std::copy_n(slots_.begin() + from, slots_per_block_,
                slots_.begin() + plan.copy_to[i] * slots_per_block_);
  }
  for (std::size_t i = 0; i < plan.delta_rows.size(); ++i) {
    const std::int64_t row = plan.delta_rows[i];
    expect(plan.delta_indices[i] < width_, "a delta past the width of the tables");
    tables_.at(static_cast<std::size_t>(row * width_ + plan.delta_indices[i])) =
        plan.delta_blocks[i];
    const bool copied = std::find(plan.copy_to.begin(), plan.copy_to.end(), plan.delta_blocks[i]) !=
                        plan.copy_to.end();
    Shared& shared = rows[row];
    if (plan.delta_indices[i] == shared.seen && shared.seen < shared.blocks) {
      ++shared.seen;  // somebody else has written it
    } else if (!copied) {
      poison(plan.delta_blocks[i]);
    }
  }
}

void FakeRunner::poison(std::int64_t block) {
  std::fill_n(slots_.begin() + block * slots_per_block_, slots_per_block_, Slot{});
}

// A sequence that was not announced is a request of its own.
std::uint64_t FakeRunner::request_of(std::int64_t row) const {
  const std::uint64_t sequence = sequence_.at(static_cast<std::size_t>(row));
  const auto found = requests_.find(sequence);
  return found == requests_.end() ? sequence : found->second;
}

const std::vector<FakeRunner::Wanted>& FakeRunner::run(const StepPlanView& plan,
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
  for (std::size_t i = 0; i < plan.logit_tokens.size(); ++i) {
    const std::int64_t row = plan.logit_rows[i];
    wanted_.push_back(Wanted{digests_.at(static_cast<std::size_t>(plan.logit_tokens[i])),
                             sequence_.at(static_cast<std::size_t>(row)) - request_of(row)});
  }
  return wanted_;
}

void FakeRunner::run_sequence(const StepPlanView& plan, std::size_t index) {
  const std::int64_t row = plan.rows[index];
  const std::uint64_t request = request_of(row);
  const std::int64_t begin = plan.query_start[index];
  const std::int64_t end = plan.query_start[index + 1];
  const std::int64_t past = plan.context_length[index] - (end - begin);
  for (std::int64_t position = 0; position < past; ++position) {
    const Slot& read = slot(row, position);
    expect(read.request == request && read.position == position,
           "a context slot was not written for this sequence and position");
  }
  std::uint64_t digest = past == 0 ? text_.begin(request) : slot(row, past - 1).digest;
  for (std::int64_t i = begin; i < end; ++i) {
    const auto token = static_cast<std::size_t>(i);
    expect_equal("position of a planned token", std::int64_t{plan.positions[token]},
                 past + i - begin);
    digest = text_.after(digest, plan.token_ids[token]);
    slot(row, past + i - begin) = Slot{request, past + i - begin, digest};
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
