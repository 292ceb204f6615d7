#include "tests/simulation/simulator.h"

#include <algorithm>
#include <iterator>
#include <limits>

namespace kvledger::simulation {

const char* name(Arm arm) noexcept {
  static constexpr const char* kNames[kArms] = {"mixed",     "thrash", "chunks",      "cancels",
                                                "admission", "edges",  "speculation", "failures",
                                                "near end",  "samples"};
  return kNames[static_cast<std::size_t>(arm)];
}

Arm arm_of(std::uint64_t seed) noexcept {
  return static_cast<Arm>(seed % static_cast<std::uint64_t>(kArms));
}

void Outcome::add(const Outcome& other) {
  steps += other.steps;
  accepted += other.accepted;
  refused += other.refused;
  cancelled_waiting += other.cancelled_waiting;
  cancelled_in_prefill += other.cancelled_in_prefill;
  cancelled_in_step += other.cancelled_in_step;
  abandoned += other.abandoned;
  paused += other.paused;
  commits_of_many += other.commits_of_many;
  counts.computed += other.counts.computed;
  counts.recomputed += other.counts.recomputed;
  counts.preemptions += other.counts.preemptions;
  counts.chunks += other.counts.chunks;
  counts.forks += other.counts.forks;
  counts.late_forks += other.counts.late_forks;
  counts.copies += other.counts.copies;
  counts.preemptions_max = std::max(counts.preemptions_max, other.counts.preemptions_max);
  counts.passes_max = std::max(counts.passes_max, other.counts.passes_max);
  counts.held_for_memory += other.counts.held_for_memory;
  counts.sat_out += other.counts.sat_out;
  counts.wait_steps_max = std::max(counts.wait_steps_max, other.counts.wait_steps_max);
  for (std::size_t i = 0; i < std::size(counts.ends); ++i) {
    counts.ends[i] += other.counts.ends[i];
  }
  digest = mix(digest ^ other.digest);
}

Simulator::Simulator(std::uint64_t seed)
    : random_(seed),
      arm_(arm_of(seed)),
      case_(draw_case(random_, arm_)),
      clock_(case_.started_at),
      engine_(case_.engine, case_.started_at),
      model_(case_.engine, case_.text, case_.started_at),
      runner_(case_.text, case_.engine.blocks.value(), case_.engine.slots_per_block,
              case_.engine.scheduler.sequences_max, engine_.tables().width().value()) {}

Outcome Simulator::run(std::int64_t steps) {
  while (outcome_.steps < steps) {
    one_step(false);
  }
  // Nothing new and no cancels from here on: what is there has to end by itself.
  resume_all();
  const std::int64_t last = outcome_.steps + model_.steps_to_end();
  while (!model_.live().empty()) {
    expect(outcome_.steps < last, "sequences are left after the steps that they may take");
    one_step(true);
  }
  expect_equal("blocks free at the end", engine_.ledger().free().value(),
               case_.engine.blocks.value());
  outcome_.counts = model_.counts();
  return outcome_;
}

void Simulator::run_and_leave(std::int64_t steps) {
  while (outcome_.steps < steps) {
    one_step(false);
  }
  engine_.plan(tick());
}

void Simulator::one_step(bool quiet) {
  ++outcome_.steps;
  if (!quiet) {
    arrive();
    cancel(false);
    pause();
  }
  const Nanoseconds now = tick();
  const StepPlan& plan = engine_.plan(now);
  for (const std::int32_t word : plan.buffer()) {
    digest(static_cast<std::uint32_t>(word));
  }
  const StepReport& report = take_report();
  model_.plan(plan.view(), report, now);
  runner_.follow(report, plan.view());
  model_.check_books(engine_);
  expect_equal("a step is under way", engine_.has_uncommitted_step(),
               plan.view().header.sequences > 0);
  if (engine_.has_uncommitted_step()) {
    run_step(plan, quiet);
    model_.check_books(engine_);
  }
}

void Simulator::run_step(const StepPlan& plan, bool quiet) {
  if (!quiet && random_.chance(100)) {
    arrive();
  }
  if (!quiet && random_.chance(case_.cancel_in_step)) {
    cancel(true);
    pause();
    model_.check_books(engine_);
  }
  const StepId step = plan.view().step;
  if (!quiet && random_.chance(case_.abandon)) {
    ++outcome_.abandoned;
    const Nanoseconds now = tick();
    engine_.abandon(step, now);
    model_.abandon(take_report(), now);
    return;
  }
  std::vector<std::vector<Token>> given;
  std::vector<Token> tokens;
  std::vector<std::int32_t> offsets = {0};
  for (const FakeRunner::Wanted& wanted : runner_.run(plan.view(), engine_.tables())) {
    given.push_back(make_tokens(wanted, quiet));
    tokens.insert(tokens.end(), given.back().begin(), given.back().end());
    offsets.push_back(static_cast<std::int32_t>(tokens.size()));
    outcome_.commits_of_many += given.back().size() > 1 ? 1 : 0;
  }
  const Nanoseconds now = tick();
  engine_.commit(step, tokens, offsets, now);
  model_.commit(given, take_report(), now);
}

std::vector<Token> Simulator::make_tokens(FakeRunner::Wanted wanted, bool quiet) {
  std::vector<Token> tokens;
  const std::int64_t count = random_.between(1, case_.tokens_per_commit_max);
  for (std::int64_t i = 0; i < count; ++i) {
    if (!quiet && random_.chance(case_.unusable_logits)) {
      tokens.push_back(-1);
      break;
    }
    tokens.push_back(case_.text.next(wanted.digest, wanted.sample));
    wanted.digest = case_.text.after(wanted.digest, tokens.back());
  }
  return tokens;
}

void Simulator::arrive() {
  std::int64_t arrivals = random_.chance(case_.arrival) ? 1 : 0;
  if (arm_ == Arm::kEdges && model_.live().empty()) {
    arrivals = case_.live_max;
  }
  for (; arrivals > 0; --arrivals) {
    if (static_cast<std::int64_t>(model_.live().size()) >= case_.live_max) {
      return;
    }
    Arrival arrival;
    arrival.id = SequenceId{last_id_ + 1};
    arrival.samples = random_.chance(500) ? 1 : random_.between(1, case_.samples_max);
    last_id_ += static_cast<std::uint64_t>(arrival.samples);
    arrival.tenant = TenantId{static_cast<std::uint32_t>(random_.between(1, case_.tenants))};
    arrival.arrived_at = random_.chance(500) ? tick() : clock_ - random_.between(0, case_.tick_max);
    arrival.priority =
        static_cast<std::int32_t>(random_.between(-case_.priority_max, case_.priority_max));
    arrival.output_tokens_max = random_.between(1, case_.output_max);
    if (random_.chance(case_.output_unset)) {
      arrival.output_tokens_max = std::numeric_limits<std::int64_t>::max();
    }
    arrival.ignore_end_of_text = random_.chance(case_.ignore_end_of_text);
    arrival.step_time_max =
        random_.chance(case_.own_step_time) ? random_.between(1, 100'000'000) : 0;
    std::vector<Token> prompt(
        static_cast<std::size_t>(random_.between(case_.prompt_min, case_.prompt_max)));
    for (Token& token : prompt) {
      token = static_cast<Token>(random_.between(0, case_.text.vocabulary - 1));
    }
    runner_.accept(arrival.id.value(), arrival.samples);
    const bool accepted = engine_.accept(arrival, prompt);
    ++(accepted ? outcome_.accepted : outcome_.refused);
    model_.accept(arrival, prompt, accepted, take_report());
  }
}

void Simulator::cancel(bool in_step) {
  if (!in_step && !random_.chance(case_.cancel)) {
    return;
  }
  std::vector<std::uint64_t> ids;
  const std::int64_t count = random_.between(1, 3);
  for (std::int64_t i = 0; i < count && !model_.live().empty(); ++i) {
    ids.push_back(choose_victim());
    const Modelled& victim = model_.live().at(ids.back());
    outcome_.cancelled_waiting += victim.running() ? 0 : 1;
    outcome_.cancelled_in_prefill += victim.phase == Modelled::Phase::kPrefill ? 1 : 0;
    outcome_.cancelled_in_step += victim.planned > 0 ? 1 : 0;
  }
  if (random_.chance(100)) {
    ids.push_back(last_id_ + 1);  // nobody's
  }
  if (random_.chance(100) && !ids.empty()) {
    ids.push_back(ids.front());
  }
  const EndReason reason = random_.chance(300) ? EndReason::kStop : EndReason::kCancelled;
  const Nanoseconds now = tick();
  engine_.end(ids, reason, now);
  model_.end(ids, reason, take_report(), now);
}

void Simulator::pause() {
  if (random_.chance(case_.pause) && !model_.live().empty()) {
    const auto& live = model_.live();
    const std::int64_t skip = random_.between(0, static_cast<std::int64_t>(live.size()) - 1);
    const std::uint64_t ids[] = {std::next(live.begin(), skip)->first, last_id_ + 1};
    const Nanoseconds now = tick();
    outcome_.paused += std::next(live.begin(), skip)->second.paused ? 0 : 1;
    engine_.pause(ids, now);
    model_.pause(ids, true, now);
  }
  if (random_.chance(case_.pause)) {
    resume_all();
  }
}

void Simulator::resume_all() {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, sequence] : model_.live()) {
    ids.push_back(id);  // who is not paused, too
  }
  const Nanoseconds now = tick();
  engine_.resume(ids, now);
  model_.pause(ids, false, now);
}

// Half of the time somebody whose prompt is not computed, or who is about to end.
std::uint64_t Simulator::choose_victim() {
  const auto& live = model_.live();
  const std::int64_t skip = random_.between(0, static_cast<std::int64_t>(live.size()) - 1);
  auto chosen = std::next(live.begin(), skip);
  if (random_.chance(500)) {
    for (auto other = live.begin(); other != live.end(); ++other) {
      const Modelled& sequence = other->second;
      if (sequence.phase == Modelled::Phase::kPrefill ||
          sequence.token_count() + 1 >= engine_.sequence_tokens_max()) {
        chosen = other;
      }
    }
  }
  return chosen->first;
}

Nanoseconds Simulator::tick() {
  clock_ += random_.between(0, case_.tick_max);
  if (random_.chance(case_.clock_back)) {
    clock_ -= random_.between(0, 10 * case_.tick_max);
  }
  return clock_;
}

const StepReport& Simulator::take_report() {
  const StepReport& report = engine_.take_report();
  for (const OutputToken& token : report.tokens) {
    digest(token.sequence * 31 + static_cast<std::uint32_t>(token.token));
  }
  for (const Receipt& receipt : report.receipts) {
    digest(receipt.sequence * 31 + static_cast<std::uint64_t>(receipt.queued));
    digest(receipt.held_seconds * 31 + receipt.held_nanos);
  }
  return report;
}

}  // namespace kvledger::simulation
