#include "tests/simulation/model.h"

#include <algorithm>
#include <set>

#include "tests/simulation/random.h"

namespace kvledger::simulation {
namespace {

using Phase = Modelled::Phase;

void check_receipt(const Receipt& engine, const Receipt& model) {
  expect_equal("receipt: sequence", engine.sequence, model.sequence);
  expect_equal("receipt: tenant", engine.tenant, model.tenant);
  expect_equal("receipt: end reason", engine.end_reason, model.end_reason);
  expect_equal("receipt: prompt tokens", engine.prompt_tokens, model.prompt_tokens);
  expect_equal("receipt: output tokens", engine.output_tokens, model.output_tokens);
  expect_equal("receipt: computed tokens", engine.computed_tokens, model.computed_tokens);
  expect_equal("receipt: recomputed tokens", engine.recomputed_tokens, model.recomputed_tokens);
  expect_equal("receipt: shared tokens", engine.shared_tokens, model.shared_tokens);
  expect_equal("receipt: preemptions", engine.preemptions, model.preemptions);
  expect_equal("receipt: for its own tenant", engine.preempted_own, model.preempted_own);
  expect_equal("receipt: for others", engine.preempted_others, model.preempted_others);
  expect_equal("receipt: for itself", engine.preempted_itself, model.preempted_itself);
  expect_equal("receipt: while paused", engine.preempted_paused, model.preempted_paused);
  expect_equal("receipt: peak blocks", engine.peak_blocks, model.peak_blocks);
  expect_equal("receipt: queued", engine.queued, model.queued);
  expect_equal("receipt: prefill", engine.prefill, model.prefill);
  expect_equal("receipt: decode", engine.decode, model.decode);
  expect_equal("receipt: paused", engine.paused, model.paused);
  expect_equal("receipt: held seconds", engine.held_seconds, model.held_seconds);
  expect_equal("receipt: held nanos", engine.held_nanos, model.held_nanos);
  expect_equal("receipt: reserved seconds", engine.reserved_seconds, model.reserved_seconds);
  expect_equal("receipt: reserved nanos", engine.reserved_nanos, model.reserved_nanos);
}

}  // namespace

Model::Model(const EngineSettings& settings, const Text& text, Nanoseconds now)
    : settings_(settings),
      text_(text),
      tokens_max_(std::min(settings.context_tokens,
                           settings.blocks.value() * settings.slots_per_block + 1)),
      now_(now),
      by_row_(static_cast<std::size_t>(settings.scheduler.sequences_max)) {}

void Model::accept(const Arrival& arrival, std::span<const Token> prompt, bool accepted,
                   const StepReport& report) {
  begin_report();
  const auto tokens = static_cast<std::int64_t>(prompt.size());
  const bool fits = tokens >= 1 && tokens + 1 <= tokens_max_;
  expect_equal("accepted", accepted, fits);
  expect_equal("refusals", report.refusals.size(), fits ? 0 : 1);
  if (!fits) {
    expect_equal("refused", report.refusals[0].sequence, arrival.id.value());
    expect_equal("refused tokens", report.refusals[0].tokens, tokens);
    expect_equal("most tokens of a prompt", report.refusals[0].tokens_max, tokens_max_ - 1);
    return;
  }
  Modelled sequence;
  sequence.arrival = arrival;
  sequence.rank = arrival.arrived_at + arrival.priority * settings_.scheduler.aging_per_priority;
  sequence.prompt_count = tokens;
  sequence.digest = text_.begin(arrival.id.value());
  for (const Token token : prompt) {
    sequence.tokens.push_back(token);
    sequence.digest = text_.after(sequence.digest, token);
  }
  sequence.receipt.queued = std::max<Nanoseconds>(0, now_ - arrival.arrived_at);
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(arrival.samples); ++i) {
    sequence.id = arrival.id.value() + i;
    live_[sequence.id] = sequence;
  }
  ModelledRequest& request = requests_[arrival.id.value()];
  request.arrival = arrival;
  request.live = arrival.samples;
  request.receipt.sequence = arrival.id.value();
  request.receipt.tenant = arrival.tenant.value();
  request.receipt.prompt_tokens = tokens;
  end_report(report);
  note_held_back();
  std::int64_t& service = service_[arrival.tenant.value()];
  service = std::max(service, service_time_ - settings_.scheduler.token_budget);
}

void Model::commit(const std::vector<std::vector<Token>>& given, const StepReport& report,
                   Nanoseconds now) {
  pass_time(now);
  begin_report();
  end_step();
  step_time_.observe(step_work_, now_ - planned_at_);
  if (step_decodes_ > 0) {
    since_decode_ = step_prefills_ > 0 ? since_decode_ + 1 : 0;
  }
  std::size_t wanted = 0;
  for (const Planned& planned : step_) {
    const std::size_t output = wanted;
    wanted += planned.wants_logits ? 1 : 0;
    const auto found = live_.find(planned.id);
    if (found == live_.end()) {
      continue;
    }
    Modelled& sequence = found->second;
    const std::int64_t again =
        std::min(sequence.computed + sequence.planned, sequence.computed_peak) - sequence.computed;
    governor_.count(sequence.planned, std::max<std::int64_t>(0, again));
    for (; sequence.planned > 0; --sequence.planned, ++sequence.computed) {
      ++sequence.receipt.computed_tokens;
      sequence.receipt.recomputed_tokens += sequence.computed < sequence.computed_peak ? 1 : 0;
    }
    sequence.computed_peak = std::max(sequence.computed_peak, sequence.computed);
    if (planned.wants_logits) {
      sequence.phase = Phase::kDecode;
      take_tokens(planned.id, given.at(output), report);
    }
  }
  step_.clear();
  end_report(report);
  note_held_back();
  lift();
}

void Model::abandon(const StepReport& report, Nanoseconds now) {
  pass_time(now);
  begin_report();
  end_step();
  for (const Planned& planned : step_) {
    if (live_.contains(planned.id)) {
      live_[planned.id].planned = 0;
      finish(planned.id, EndReason::kFailed, report);
    }
  }
  step_.clear();
  end_report(report);
  note_held_back();
  lift();
}

void Model::end(std::span<const std::uint64_t> ids, EndReason reason, const StepReport& report,
                Nanoseconds now) {
  pass_time(now);
  begin_report();
  for (const std::uint64_t id : ids) {
    if (live_.contains(id)) {
      finish(id, reason, report);
    }
  }
  end_report(report);
  note_held_back();
  lift();
}

void Model::pause(std::span<const std::uint64_t> ids, bool paused, Nanoseconds now) {
  pass_time(now);
  for (const std::uint64_t id : ids) {
    if (live_.contains(id)) {
      live_[id].paused = paused;
    }
  }
  note_held_back();
  lift();
}

void Model::check_books(const Engine& engine) const {
  if (const auto wrong = engine.audit()) {
    throw Violation("audit: " + *wrong);
  }
  std::int64_t held = 0;
  std::int64_t promised = 0;
  struct Sums {
    std::int64_t held = 0;
    BlockNanoseconds time = 0;
  };
  std::map<std::uint32_t, Sums> tenants;
  for (const auto& [id, sequence] : live_) {
    promised += sequence.promised;
  }
  for (const auto& [id, request] : requests_) {
    const std::int64_t blocks = held_by(id);
    held += blocks;
    tenants[request.arrival.tenant.value()].held += blocks;
    tenants[request.arrival.tenant.value()].time += request.held_time;
  }
  const Ledger& ledger = engine.ledger();
  const Balances balances = ledger.balances();
  expect_equal("held", balances[BlockState::kHeld].value(), held);
  expect_equal("reserved", balances[BlockState::kReserved].value(), promised);
  expect_equal("releasing", balances[BlockState::kReleasing].value(), releasing_);
  expect_equal("cached", balances[BlockState::kCached].value(), 0);
  expect_equal("free", balances[BlockState::kFree].value(), free_blocks());
  expect_equal("running", engine.running(), running());
  expect_equal("waiting", engine.waiting(), static_cast<std::int64_t>(live_.size()) - running());
  for (const TenantId id : ledger.tenants()) {
    const TenantStatement statement = ledger.statement(id);
    const Sums& sums = tenants[id.value()];
    const auto closed = closed_time_.find(id.value());
    const BlockNanoseconds closed_time = closed == closed_time_.end() ? 0 : closed->second;
    expect_equal("held by a tenant", statement.held.value(), sums.held);
    expect(statement.closed_time == closed_time, "a tenant's receipts do not add up");
    expect(statement.held_time == closed_time + sums.time, "a tenant's block-time is wrong");
  }
  check_tables(engine);
}

void Model::check_tables(const Engine& engine) const {
  for (const auto& [id, sequence] : live_) {
    if (!sequence.running()) {
      continue;
    }
    const TableRow row{static_cast<std::uint32_t>(sequence.row)};
    expect_equal("length of a row", engine.tables().length(row).value(), sequence.held());
    for (std::int64_t i = 0; i < sequence.held(); ++i) {
      expect_equal("block in a row", engine.tables().at(row, i).value(),
                   sequence.blocks[static_cast<std::size_t>(i)]);
    }
  }
}

std::int64_t Model::steps_to_end() const {
  std::int64_t steps = 0;
  for (const auto& [id, sequence] : live_) {
    const std::int64_t passes =
        settings_.scheduler.preemptions_max - sequence.receipt.preemptions + 1;
    steps += passes * (last_token(sequence) - 1);
  }
  return steps;
}

void Model::pass_time(Nanoseconds now) {
  now = std::max(now, now_);
  const auto passed = static_cast<BlockNanoseconds>(now - now_);
  for (auto& [id, sequence] : live_) {
    const Nanoseconds spent =
        std::max<Nanoseconds>(0, now - std::max(now_, sequence.arrival.arrived_at));
    Receipt& receipt = sequence.receipt;
    (sequence.paused                     ? receipt.paused
     : sequence.phase == Phase::kQueued  ? receipt.queued
     : sequence.phase == Phase::kPrefill ? receipt.prefill
                                         : receipt.decode) += spent;
    requests_[sequence.arrival.id.value()].promised_time +=
        static_cast<BlockNanoseconds>(sequence.promised) * passed;
  }
  for (auto& [id, request] : requests_) {
    request.held_time += static_cast<BlockNanoseconds>(held_by(id)) * passed;
  }
  now_ = now;
}

std::int64_t Model::blocks_for(std::int64_t tokens) const {
  std::int64_t blocks = 0;
  while (blocks * settings_.slots_per_block < tokens) {
    ++blocks;
  }
  return blocks;
}

std::int64_t Model::blocks_to_admit(const Modelled& sequence, std::int64_t shared) const {
  const std::int64_t tokens =
      is_protected(sequence) ? last_token(sequence) - 1 : sequence.token_count();
  return blocks_for(tokens) - shared / settings_.slots_per_block;
}

std::vector<const Modelled*> Model::samples_of(std::uint64_t request) const {
  std::vector<const Modelled*> samples;
  const std::int64_t most = requests_.at(request).arrival.samples;
  for (std::uint64_t id = request; id < request + static_cast<std::uint64_t>(most); ++id) {
    const auto found = live_.find(id);
    if (found != live_.end()) {
      samples.push_back(&found->second);
    }
  }
  return samples;
}

std::int64_t Model::held_by(std::uint64_t request) const {
  std::set<std::int32_t> blocks;
  for (const Modelled* sample : samples_of(request)) {
    blocks.insert(sample->blocks.begin(), sample->blocks.end());
  }
  return static_cast<std::int64_t>(blocks.size());
}

std::int64_t Model::tables_with(std::int32_t block, bool before) const {
  return std::count_if(live_.begin(), live_.end(), [block, before](const auto& entry) {
    const auto& blocks = entry.second.blocks;
    return !(before && entry.second.forked) &&
           std::find(blocks.begin(), blocks.end(), block) != blocks.end();
  });
}

// The most tokens it can come to.
std::int64_t Model::last_token(const Modelled& sequence) const {
  const std::int64_t room = tokens_max_ - sequence.prompt_count;
  return sequence.prompt_count + std::min(sequence.arrival.output_tokens_max, room);
}

bool Model::is_protected(const Modelled& sequence) const {
  return sequence.receipt.preemptions >= settings_.scheduler.preemptions_max;
}

bool Model::before(const Modelled& a, const Modelled& b) noexcept {
  return a.rank != b.rank ? a.rank < b.rank : a.id < b.id;
}

std::int64_t Model::free_blocks() const {
  std::int64_t free = settings_.blocks.value() - releasing_;
  for (const auto& [id, sequence] : live_) {
    free -= sequence.promised;
  }
  for (const auto& [id, request] : requests_) {
    free -= held_by(id);
  }
  return free;
}

std::int64_t Model::running() const {
  return std::count_if(live_.begin(), live_.end(),
                       [](const auto& entry) { return entry.second.running(); });
}

Modelled& Model::find(std::uint64_t id) {
  const auto found = live_.find(id);
  expect(found != live_.end(), "the report names a sequence that is not there");
  return found->second;
}

std::int32_t Model::end_reason(const Modelled& sequence) const {
  const auto& ends = settings_.end_of_text;
  if (!sequence.arrival.ignore_end_of_text &&
      std::find(ends.begin(), ends.end(), sequence.tokens.back()) != ends.end()) {
    return static_cast<std::int32_t>(EndReason::kStop);
  }
  if (sequence.token_count() - sequence.prompt_count == sequence.arrival.output_tokens_max) {
    return static_cast<std::int32_t>(EndReason::kLength);
  }
  return sequence.token_count() == tokens_max_ ? static_cast<std::int32_t>(EndReason::kContext) : 0;
}

void Model::take_tokens(std::uint64_t id, std::span<const Token> tokens, const StepReport& report) {
  Modelled& sequence = live_[id];
  for (const Token token : tokens) {
    if (token < 0) {
      finish(id, EndReason::kFailed, report);
      return;
    }
    expect_equal("token", token, text_.next(sequence.digest, id - sequence.arrival.id.value()));
    sequence.digest = text_.after(sequence.digest, token);
    sequence.tokens.push_back(token);
    const std::int32_t reason = end_reason(sequence);
    expect(tokens_explained_ < report.tokens.size(), "an output token was not reported");
    const OutputToken& output = report.tokens[tokens_explained_++];
    expect_equal("output token: sequence", output.sequence, id);
    expect_equal("output token: token", output.token, token);
    expect_equal("output token: end reason", output.end_reason, reason);
    if (reason != 0) {
      finish(id, static_cast<EndReason>(reason), report);
      return;
    }
  }
}

// The step is over: what ended in it is free.
void Model::end_step() {
  releasing_ = 0;
  for (auto& [id, request] : requests_) {
    request.in_step = false;
  }
}

void Model::finish(std::uint64_t id, EndReason reason, const StepReport& report) {
  const std::uint64_t request = live_.at(id).arrival.id.value();
  finish_one(id, reason, report);
  while (reason == EndReason::kFailed && requests_.contains(request)) {
    finish_one(samples_of(request).front()->id, reason, report);
  }
}

void Model::finish_one(std::uint64_t id, EndReason reason, const StepReport& report) {
  const Modelled sequence = live_.at(id);
  const std::uint64_t whose = sequence.arrival.id.value();
  ModelledRequest& request = requests_.at(whose);
  learn_length(sequence, reason);
  const std::int64_t before = held_by(whose);
  live_.erase(id);
  releasing_ += request.in_step ? before - held_by(whose) : 0;
  Receipt& receipt = request.receipt;
  receipt.end_reason = static_cast<std::uint32_t>(reason);
  receipt.output_tokens += sequence.token_count() - sequence.prompt_count;
  receipt.computed_tokens += sequence.receipt.computed_tokens;
  receipt.recomputed_tokens += sequence.receipt.recomputed_tokens;
  receipt.shared_tokens += sequence.receipt.shared_tokens;
  receipt.preemptions += sequence.receipt.preemptions;
  receipt.preempted_own += sequence.receipt.preempted_own;
  receipt.preempted_others += sequence.receipt.preempted_others;
  receipt.preempted_itself += sequence.receipt.preempted_itself;
  receipt.preempted_paused += sequence.receipt.preempted_paused;
  counts_.preemptions_max = std::max(counts_.preemptions_max, sequence.receipt.preemptions);
  counts_.wait_steps_max = std::max(counts_.wait_steps_max, sequence.waited_steps);
  if (--request.live == 0) {
    close(whose, sequence, report);
  }
}

void Model::close(std::uint64_t id, const Modelled& last, const StepReport& report) {
  ModelledRequest& request = requests_.at(id);
  Receipt& receipt = request.receipt;
  receipt.queued = last.receipt.queued;
  receipt.prefill = last.receipt.prefill;
  receipt.decode = last.receipt.decode;
  receipt.paused = last.receipt.paused;
  const BlockTime held = to_block_time(request.held_time);
  const BlockTime promised = to_block_time(request.promised_time);
  receipt.held_seconds = held.seconds;
  receipt.held_nanos = held.nanos;
  receipt.reserved_seconds = promised.seconds;
  receipt.reserved_nanos = promised.nanos;
  expect(receipts_explained_ < report.receipts.size(), "a request ended without a receipt");
  const Receipt& written = report.receipts[receipts_explained_++];
  expect(written.peak_blocks >= request.peak_least && written.peak_blocks <= request.peak_most,
         "a receipt's peak is not what its tables came to");
  receipt.peak_blocks = written.peak_blocks;
  check_receipt(written, receipt);
  expect_equal("times from arrival to end",
               receipt.queued + receipt.prefill + receipt.decode + receipt.paused,
               std::max<Nanoseconds>(0, now_ - request.arrival.arrived_at));
  closed_time_[receipt.tenant] += request.held_time;
  ++counts_.ends[receipt.end_reason];
  counts_.computed += receipt.computed_tokens;
  counts_.recomputed += receipt.recomputed_tokens;
  counts_.preemptions += receipt.preemptions;
  requests_.erase(id);
}

void Model::begin_report() noexcept {
  tokens_explained_ = 0;
  receipts_explained_ = 0;
}

void Model::end_report(const StepReport& report) const {
  expect_equal("output tokens reported", report.tokens.size(), tokens_explained_);
  expect_equal("receipts", report.receipts.size(), receipts_explained_);
}

}  // namespace kvledger::simulation
