// Drives an engine by hand: a test says who arrives and how many steps pass, and looks at what was
// planned and reported. The books are audited after every call.

#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "core/engine.h"
#include "tests/check_throws.h"

namespace kvledger::testing {

// One block holds 4 tokens, 8 tokens fit in a step, 4 sequences may run; no limit by context.
inline EngineSettings small_engine(std::int64_t blocks) {
  EngineSettings settings;
  settings.blocks = BlockCount{blocks};
  settings.slots_per_block = 4;
  settings.context_tokens = 1'000'000;
  settings.scheduler.token_budget = 8;
  settings.scheduler.sequences_max = 4;
  settings.end_of_text = {2};
  settings.scheduler.forecast = false;  // who means to preempt must get into the pool
  return settings;
}

class EngineDriver {
 public:
  static constexpr Token kToken = 7;

  explicit EngineDriver(const EngineSettings& settings) : engine(settings, 0) {}

  // What the next arrivals have in common.
  struct Manner {
    TenantId tenant{1};
    std::int32_t priority = 0;
    bool ignore_end_of_text = false;
    std::int64_t samples = 1;
    Nanoseconds step_time_max = 0;
    PrefixScopes scopes;
  };

  bool accept(std::uint64_t id, std::int64_t prompt_tokens, std::int64_t output_tokens_max) {
    return accept(id, std::vector<Token>(static_cast<std::size_t>(prompt_tokens), 5),
                  output_tokens_max);
  }
  bool accept(std::uint64_t id, const std::vector<Token>& prompt, std::int64_t output_tokens_max) {
    Arrival arrival;
    arrival.id = SequenceId{id};
    arrival.tenant = manner.tenant;
    arrival.arrived_at = now;
    arrival.priority = manner.priority;
    arrival.output_tokens_max = output_tokens_max;
    arrival.ignore_end_of_text = manner.ignore_end_of_text;
    arrival.samples = manner.samples;
    arrival.step_time_max = manner.step_time_max;
    arrival.scopes = manner.scopes;
    const bool accepted = engine.accept(arrival, prompt);
    look();
    return accepted;
  }

  const StepPlanView& plan() {
    const StepPlanView& view = engine.plan(now).view();
    if (engine.has_uncommitted_step()) {
      steps_ = view.step.value();
    }
    look();
    planned_.clear();
    for (std::size_t i = 0; i < view.rows.size(); ++i) {
      planned_[owners.at(view.rows[i])] = view.query_start[i + 1] - view.query_start[i];
    }
    return view;
  }

  // Hands in `tokens` of the i-th wanted logits for all i.
  void commit(const std::vector<std::vector<Token>>& tokens) {
    std::vector<Token> flat;
    std::vector<std::int32_t> offsets = {0};
    for (const std::vector<Token>& part : tokens) {
      flat.insert(flat.end(), part.begin(), part.end());
      offsets.push_back(static_cast<std::int32_t>(flat.size()));
    }
    engine.commit(step(), flat, offsets, now);
    look();
  }
  // One token for each.
  void commit_one_each(const StepPlanView& view) {
    commit(std::vector<std::vector<Token>>(view.logit_tokens.size(), {kToken}));
  }
  void abandon() {
    engine.abandon(step(), now);
    look();
  }
  void end(const std::vector<std::uint64_t>& ids, EndReason reason = EndReason::kCancelled) {
    engine.end(ids, reason, now);
    look();
  }

  // Plans and commits `count` steps of `nanoseconds` each.
  void steps(std::int64_t count, Nanoseconds nanoseconds = 0) {
    for (std::int64_t i = 0; i < count; ++i) {
      const StepPlanView& view = plan();
      now += nanoseconds;
      if (engine.has_uncommitted_step()) {
        commit_one_each(view);
      }
    }
  }
  // Steps until nothing is left and returns how many it took.
  std::int64_t run_out(std::int64_t steps_max, Nanoseconds nanoseconds = 0) {
    std::int64_t count = 0;
    while (engine.running() + engine.waiting() > 0) {
      REQUIRE(count < steps_max);
      steps(1, nanoseconds);
      ++count;
    }
    return count;
  }

  StepId step() const { return StepId{steps_}; }
  std::int64_t blocks(BlockState state) const { return engine.ledger().balances()[state].value(); }
  // Tokens that the last plan computes for a sequence.
  std::int64_t planned(std::uint64_t id) const {
    const auto found = planned_.find(id);
    return found == planned_.end() ? 0 : found->second;
  }
  const Receipt& receipt(std::uint64_t id) const {
    REQUIRE(receipts.contains(id));
    return receipts.at(id);
  }
  EndReason reason(std::uint64_t id) const {
    return static_cast<EndReason>(receipt(id).end_reason);
  }

  Nanoseconds now = 0;
  Manner manner;
  Engine engine;
  // Everything reported since the start, in order.
  std::vector<std::uint64_t> admitted;
  std::vector<std::uint64_t> preempted;
  std::vector<Refusal> refused;
  std::map<std::uint64_t, std::vector<Token>> outputs;
  std::map<std::int32_t, std::uint64_t> owners;  // of rows
  std::map<std::uint64_t, Receipt> receipts;
  std::map<std::uint64_t, std::int64_t> first_output_step;

 private:
  // Takes the report of the last call, and audits.
  void look() {
    if (const auto wrong = engine.audit()) {
      FAIL(*wrong);
    }
    const StepReport& report = engine.take_report();
    for (const Admission& admission : report.admissions) {
      admitted.push_back(admission.sequence);
      owners[admission.row] = admission.sequence;
    }
    for (const Preemption& preemption : report.preemptions) {
      preempted.push_back(preemption.sequence);
    }
    refused.insert(refused.end(), report.refusals.begin(), report.refusals.end());
    for (const OutputToken& token : report.tokens) {
      outputs[token.sequence].push_back(token.token);
      first_output_step.try_emplace(token.sequence, static_cast<std::int64_t>(steps_));
    }
    for (const Receipt& receipt : report.receipts) {
      CHECK_MESSAGE(receipts.emplace(receipt.sequence, receipt).second, "a second receipt");
    }
  }

  std::uint64_t steps_ = 0;
  std::map<std::uint64_t, std::int64_t> planned_;
};

}  // namespace kvledger::testing
