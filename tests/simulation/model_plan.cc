#include <algorithm>

#include "tests/simulation/model.h"
#include "tests/simulation/random.h"

namespace kvledger::simulation {

using Phase = Modelled::Phase;

void Model::plan(const StepPlanView& plan, const StepReport& report, Nanoseconds now) {
  pass_time(now);
  begin_report();
  expect(step_.empty(), "a step was planned while one was uncommitted");
  expect_equal("releasing between steps", releasing_, 0);
  std::vector<std::uint64_t> ran_before;
  for (const auto& [id, sequence] : live_) {
    if (sequence.running()) {
      ran_before.push_back(id);
    }
  }
  check_preemption_was_needed(report);
  preempt(report);
  check_victims(ran_before);
  admit(report);
  follow_deltas(plan);
  check_blocks();
  follow_sequences(plan);
  check_order(plan, report);
  check_decode_shares(plan, report);
  check_prefill_room(plan);
  check_prefill_shares(plan.header.prefill_room);
  for (auto& [id, sequence] : live_) {
    sequence.waited_steps += sequence.running() ? 0 : 1;
  }
  end_report(report);
}

// Nobody loses blocks while there are enough for all.
void Model::check_preemption_was_needed(const StepReport& report) const {
  if (report.preemptions.empty()) {
    return;
  }
  std::int64_t wanted = 0;
  for (const auto& [id, sequence] : live_) {
    if (sequence.phase == Phase::kDecode && !sequence.paused) {
      wanted += std::max<std::int64_t>(
          0, blocks_for(sequence.token_count()) - sequence.held() - sequence.promised);
    }
  }
  expect(wanted > free_blocks(), "a preemption with enough free blocks for everybody");
}

void Model::preempt(const StepReport& report) {
  former_.clear();
  for (const Preemption& preemption : report.preemptions) {
    Modelled& sequence = find(preemption.sequence);
    expect(sequence.running(), "a preempted sequence was not running");
    expect(!is_protected(sequence), "a sequence was preempted once too often");
    expect_equal("computed tokens lost", preemption.computed_tokens, sequence.computed);
    former_.push_back(Former{preemption.sequence, sequence.row, sequence.held(), sequence.paused});
    sequence.phase = Phase::kQueued;
    sequence.blocks.clear();
    sequence.promised = 0;
    sequence.computed = 0;
    ++sequence.receipt.preemptions;
  }
}

// Who is paused goes first, then the newest: nobody behind a victim keeps running, except who may
// not be preempted.
void Model::check_victims(std::span<const std::uint64_t> ran_before) const {
  for (const Former& victim : former_) {
    for (const std::uint64_t id : ran_before) {
      const Modelled& other = live_.at(id);
      expect(victim.paused || !other.running() || is_protected(other) || !other.paused,
             "a paused sequence was spared");
      expect(victim.paused || !other.running() || is_protected(other) ||
                 before(other, live_.at(victim.id)),
             "a sequence behind a victim was spared");
    }
  }
}

void Model::admit(const StepReport& report) {
  std::fill(by_row_.begin(), by_row_.end(), nullptr);
  for (auto& [id, sequence] : live_) {
    if (sequence.running()) {
      by_row_[static_cast<std::size_t>(sequence.row)] = &sequence;
    }
  }
  for (const Admission& admission : report.admissions) {
    Modelled& sequence = find(admission.sequence);
    expect(!sequence.running(), "a running sequence was admitted");
    expect(static_cast<std::size_t>(admission.row) < by_row_.size(), "a row that does not exist");
    Modelled*& owner = by_row_[static_cast<std::size_t>(admission.row)];
    expect(owner == nullptr, "a row has two sequences");
    owner = &sequence;
    expect_equal("admitted again", admission.again, sequence.ran);
    expect_equal("queued at admission", admission.queued, sequence.receipt.queued);
    sequence.ran = true;
    sequence.row = admission.row;
    sequence.phase = Phase::kPrefill;
    sequence.promised = blocks_to_admit(sequence);
  }
}

void Model::follow_deltas(const StepPlanView& plan) {
  for (std::size_t i = 0; i < plan.delta_rows.size(); ++i) {
    const std::int32_t row = plan.delta_rows[i];
    const std::int32_t index = plan.delta_indices[i];
    Modelled* owner = by_row_.at(static_cast<std::size_t>(row));
    if (owner != nullptr && (index == 0 || !owner->blocks.empty())) {
      expect_equal("index of a delta", index, owner->held());
      owner->blocks.push_back(plan.delta_blocks[i]);
      owner->promised -= owner->promised > 0 ? 1 : 0;
      owner->receipt.peak_blocks = std::max(owner->receipt.peak_blocks, owner->held());
      continue;
    }
    // Taken by a sequence that had to step back before it had all it needed.
    const auto former = std::find_if(former_.begin(), former_.end(),
                                     [&](const Former& entry) { return entry.row == row; });
    expect(former != former_.end(), "a delta for a row that nobody has");
    expect_equal("index of a delta taken back", index, former->held);
    ++former->held;
    Receipt& receipt = live_.at(former->id).receipt;
    receipt.peak_blocks = std::max(receipt.peak_blocks, former->held);
  }
}

void Model::check_blocks() const {
  std::vector<bool> taken(static_cast<std::size_t>(settings_.blocks.value()), false);
  for (const auto& [id, sequence] : live_) {
    for (const std::int32_t block : sequence.blocks) {
      expect(block >= 0 && block < settings_.blocks.value(), "a block that does not exist");
      expect(!taken[static_cast<std::size_t>(block)], "a block stands in two tables");
      taken[static_cast<std::size_t>(block)] = true;
    }
  }
  expect(free_blocks() >= 0, "more blocks are held and promised than there are");
}

void Model::follow_sequences(const StepPlanView& plan) {
  const StepPlanHeader& header = plan.header;
  expect(header.tokens <= settings_.scheduler.token_budget, "a plan over its budget");
  expect(running() <= settings_.scheduler.sequences_max, "too many sequences run");
  expect_equal("tokens before the first sequence", plan.query_start[0], 0);
  expect_equal("tokens after the last sequence", plan.query_start.back(), header.tokens);
  const bool held_up = std::any_of(live_.begin(), live_.end(),
                                   [](const auto& entry) { return entry.second.paused; });
  expect(live_.empty() || held_up || header.sequences > 0,
         "nothing planned while sequences are there");
  std::size_t logits = 0;
  for (std::size_t i = 0; i < plan.rows.size(); ++i) {
    follow_sequence(plan, i, logits);
  }
  expect_equal("logits wanted", plan.logit_tokens.size(), logits);
}

void Model::follow_sequence(const StepPlanView& plan, std::size_t index, std::size_t& logits) {
  Modelled* owner = by_row_.at(static_cast<std::size_t>(plan.rows[index]));
  expect(owner != nullptr, "a row without a sequence was planned");
  Modelled& sequence = *owner;
  const auto first = static_cast<std::size_t>(plan.query_start[index]);
  const auto last = static_cast<std::size_t>(plan.query_start[index + 1]);
  const auto count = static_cast<std::int64_t>(last - first);
  expect(count >= 1, "a sequence of no tokens");
  expect(!sequence.paused, "a paused sequence was planned");
  expect(count <= sequence.pending(), "more tokens planned than there are");
  expect_equal("a row planned twice", sequence.planned, 0);
  const bool decodes = static_cast<std::int32_t>(first) < plan.header.decode_tokens;
  expect_equal("decode before prefill", decodes, sequence.phase == Phase::kDecode);
  for (std::size_t i = first; i < last; ++i) {
    const auto position = sequence.computed + static_cast<std::int64_t>(i - first);
    expect_equal("position", plan.positions[i], position);
    expect_equal("token to compute", plan.token_ids[i],
                 sequence.tokens[static_cast<std::size_t>(position)]);
  }
  expect_equal("context", plan.context_length[index], sequence.computed + count);
  expect_equal("adapter", plan.adapters[index], 0);
  expect_equal("blocks of a planned sequence", sequence.held(),
               blocks_for(sequence.computed + count));
  sequence.planned = count;
  counts_.chunks += sequence.phase == Phase::kPrefill && count < sequence.pending() ? 1 : 0;
  const bool wants_logits = count == sequence.pending();
  step_.push_back(Planned{sequence.arrival.id.value(), wants_logits});
  if (wants_logits) {
    expect(logits < plan.logit_tokens.size(), "logits that nobody asked for");
    expect_equal("token of logits", plan.logit_tokens[logits], last - 1);
    expect_equal("row of logits", plan.logit_rows[logits], plan.rows[index]);
    ++logits;
  }
}

// Who was let in, and whom they passed.
void Model::check_order(const StepPlanView& plan, const StepReport& report) {
  const auto admitted = static_cast<std::int64_t>(report.admissions.size());
  const std::int64_t ran = running() - admitted;
  expect(admitted == 0 || free_blocks() >= running() - 1, "an admission took the room to grow");
  std::int64_t room = free_blocks() - ran;
  std::vector<const Modelled*> let_in;
  std::vector<Modelled*> queue;  // as it stood before anybody was let in
  for (auto& [id, sequence] : live_) {
    const bool is_in =
        std::any_of(report.admissions.begin(), report.admissions.end(),
                    [id = id](const Admission& admission) { return admission.sequence == id; });
    if (is_in) {
      let_in.push_back(&sequence);
      room += sequence.held() + sequence.promised;
    }
    if (is_in || (!sequence.running() && !sequence.paused)) {
      queue.push_back(&sequence);
    }
  }
  std::sort(queue.begin(), queue.end(),
            [](const auto* a, const auto* b) { return before(*a, *b); });
  if (plan.header.tokens - plan.header.decode_tokens < plan.header.prefill_room) {
    check_all_who_fit(queue, room, settings_.scheduler.sequences_max - ran);
  }
  for (Modelled* sequence : queue) {
    sequence->passed = sequence->running()
                           ? 0
                           : sequence->passed + std::count_if(let_in.begin(), let_in.end(),
                                                              [&](const Modelled* other) {
                                                                return before(*sequence, *other);
                                                              });
    counts_.passes_max = std::max(counts_.passes_max, sequence->passed);
    expect(sequence->passed <= settings_.scheduler.overtakes_max, "passed too often");
  }
}

// With budget to spare, exactly those of the first in the queue run who fit and may pass the rest.
void Model::check_all_who_fit(std::span<Modelled* const> queue, std::int64_t room,
                              std::int64_t rows) const {
  std::int64_t looked_at = 0;
  std::int64_t passes = kLookahead;
  for (const Modelled* sequence : queue) {
    const bool is_looked_at = rows > 0 && passes > 0 && looked_at < kLookahead;
    const std::int64_t blocks = blocks_to_admit(*sequence);
    const bool fits = is_looked_at && blocks <= room;
    expect(fits || !sequence->running(), "a sequence was let in that had to wait");
    expect(!fits || sequence->running(), "a sequence has to wait although it fits");
    if (!is_looked_at) {
      passes = 0;  // nor is anybody behind
      continue;
    }
    ++looked_at;
    if (fits) {
      room -= blocks + 1;
      --rows;
      --passes;
    }
    passes = std::min(passes, settings_.scheduler.overtakes_max - sequence->passed);
  }
}

void Model::check_decode_shares(const StepPlanView& plan, const StepReport& report) const {
  std::int64_t wanted = 0;
  std::int64_t planned = 0;
  std::int64_t prompts = 0;
  for (const auto& [id, sequence] : live_) {
    if (sequence.phase == Phase::kDecode && !sequence.paused) {
      wanted += sequence.pending();
      planned += sequence.planned;
      expect(sequence.planned > 0, "a running sequence could not decode");
    }
    prompts += sequence.phase == Phase::kPrefill && !sequence.paused ? 1 : 0;
  }
  expect_equal("decode tokens", plan.header.decode_tokens, planned);
  expect(planned == wanted || wanted + prompts > settings_.scheduler.token_budget ||
             !report.preemptions.empty(),
         "a decode token was left out although all fit");
}

// A limit on the step's time may take from what decoding leaves of the token budget, but not all.
void Model::check_prefill_room(const StepPlanView& plan) const {
  const SchedulerSettings& limits = settings_.scheduler;
  const std::int64_t left = limits.token_budget - plan.header.decode_tokens;
  const bool limited = limits.step_time_max > 0 || limits.step_stretch > 0;
  if (!limited || plan.header.decode_tokens == 0) {
    expect_equal("prompt tokens that the step has room for", plan.header.prefill_room, left);
    return;
  }
  expect(plan.header.prefill_room <= left, "more room for prompts than the token budget leaves");
  expect(plan.header.prefill_room >= std::min(left, limits.prefill_least),
         "prompts may not starve, however short a step has to be");
}

// `budget` is what the step had for prompts.
void Model::check_prefill_shares(std::int64_t budget) const {
  std::vector<const Modelled*> prompts;
  std::int64_t planned = 0;
  for (const auto& [id, sequence] : live_) {
    if (sequence.phase == Phase::kPrefill && !sequence.paused) {
      prompts.push_back(&sequence);
      planned += sequence.planned;
    }
  }
  if (prompts.empty() || budget == 0) {
    return;
  }
  const Modelled& oldest = **std::min_element(
      prompts.begin(), prompts.end(), [](const auto* a, const auto* b) { return before(*a, *b); });
  expect(oldest.planned >= std::min(oldest.pending(), std::max<std::int64_t>(1, budget / 2)),
         "the oldest prompt got less than half");
  for (const Modelled* prompt : prompts) {
    expect(prompt->planned == prompt->pending() || planned == budget,
           "budget is left over while a prompt waits for it");
    for (const Modelled* longer : prompts) {
      expect(prompt == &oldest || longer == &oldest || longer->pending() <= prompt->pending() ||
                 prompt->planned == prompt->pending() || longer->planned == 0,
             "a longer prompt went before a shorter one");
    }
  }
}

}  // namespace kvledger::simulation
