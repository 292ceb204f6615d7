#include <algorithm>

#include "tests/simulation/model.h"
#include "tests/simulation/random.h"

namespace kvledger::simulation {

using Phase = Modelled::Phase;

void Model::plan(const StepPlanView& plan, const StepReport& report, Nanoseconds now) {
  pass_time(now);
  begin_report();
  held_before_.clear();
  for (const auto& [id, request] : requests_) {
    held_before_[id] = held_by(id);
  }
  expect(step_.empty(), "a step was planned while one was uncommitted");
  expect_equal("releasing between steps", releasing_, 0);
  planned_at_ = now_;
  step_work_ = StepWork{};
  check_preemption_was_needed(report);
  foretell_decodes(plan, report);
  preempt(report);
  note_held_back();
  lift(true);
  admit(report);
  follow_deltas(plan);
  check_blocks();
  follow_sequences(plan);
  check_order(plan, report);
  check_decode_shares(plan, report);
  step_decodes_ = plan.header.decode_tokens;
  step_prefills_ = plan.header.tokens - plan.header.decode_tokens;
  check_prefill_room(plan);
  check_prefill_shares(plan.header.prefill_room);
  count_service();
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
  std::map<std::int32_t, std::int64_t> writers;  // of shared blocks
  for (const auto& [id, sequence] : live_) {
    if (sequence.phase == Phase::kDecode && !sequence.paused) {
      wanted += std::max<std::int64_t>(
          0, blocks_for(sequence.token_count()) - sequence.held() - sequence.promised);
      const std::int64_t index = sequence.computed / settings_.slots_per_block;
      if (index < sequence.held()) {
        ++writers[sequence.blocks[static_cast<std::size_t>(index)]];
      }
    }
  }
  for (const auto& [block, count] : writers) {
    wanted += std::min(count, tables_with(block) - 1);  // the last one left keeps it
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
    former_.push_back(Former{preemption.sequence, sequence.row, sequence.held(), sequence.blocks});
    sequence.phase = Phase::kQueued;
    sequence.blocks.clear();
    sequence.promised = 0;
    sequence.computed = 0;
    ++sequence.receipt.preemptions;
  }
}

// Of a request's samples that wait, all but one, while none that runs has computed the prompt.
void Model::note_held_back() {
  for (auto& [id, sequence] : live_) {
    sequence.admitted = false;
    sequence.forked = false;
    const std::vector<const Modelled*> samples = samples_of(sequence.arrival.id.value());
    const bool has_source = std::any_of(samples.begin(), samples.end(), [](const Modelled* other) {
      return other->running() && other->computed >= other->prompt_count;
    });
    const bool is_computed = std::any_of(samples.begin(), samples.end(), [](const Modelled* other) {
      return other->running() && !other->paused;
    });
    const auto first = std::find_if(samples.begin(), samples.end(),
                                    [](const Modelled* other) { return !other->paused; });
    sequence.held_back = !sequence.running() && !sequence.paused && !has_source &&
                         (is_computed || *first != &sequence);
  }
}

// Another sample whose blocks it could begin with, as it stood before anybody was admitted.
const Modelled* Model::source_of(const Modelled& sequence) const {
  for (const Modelled* other : samples_of(sequence.arrival.id.value())) {
    if (other->running() && !other->admitted && other->computed >= other->prompt_count) {
      return other;
    }
  }
  return nullptr;
}

std::int64_t Model::shareable(const Modelled& sequence) const {
  return source_of(sequence) == nullptr
             ? 0
             : std::min(sequence.prompt_count,
                        static_cast<std::int64_t>(sequence.tokens.size()) - 1);
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
    sequence.admitted = true;
    sequence.is_new = !sequence.ran;
    sequence.forked = admission.shared_tokens == sequence.token_count();
    if (!sequence.forked) {
      expect(!sequence.held_back, "a sample did not wait for another that computes the prompt");
      expect_equal("tokens shared", admission.shared_tokens, shareable(sequence));
      sequence.promised = blocks_to_admit(sequence, admission.shared_tokens);
      counts_.late_forks += admission.shared_tokens > 0 ? 1 : 0;
    }
    sequence.passed = sequence.forked ? 0 : sequence.passed;  // it stands in no queue any more
    sequence.taken_at_once = sequence.promised;
    sequence.begins_with = blocks_for(admission.shared_tokens);
    sequence.computed = admission.shared_tokens;
    sequence.receipt.shared_tokens += admission.shared_tokens;
    sequence.ran = true;
    sequence.row = admission.row;
    sequence.phase = Phase::kPrefill;
  }
}

void Model::follow_deltas(const StepPlanView& plan) {
  std::map<std::uint64_t, std::int64_t> taken;  // blocks, by request, given back or not
  std::size_t copies = 0;
  for (std::size_t i = 0; i < plan.delta_rows.size(); ++i) {
    const std::int32_t row = plan.delta_rows[i];
    const std::int32_t index = plan.delta_indices[i];
    const std::int32_t block = plan.delta_blocks[i];
    const bool is_copy = copies < plan.copy_to.size() && plan.copy_to[copies] == block;
    Modelled* owner = by_row_.at(static_cast<std::size_t>(row));
    if (owner != nullptr && (!owner->blocks.empty() || (index == 0 && !is_copy))) {
      follow_delta(*owner, index, block, plan, copies);
      ++taken[owner->arrival.id.value()];
      continue;
    }
    // Taken by a sequence that had to step back before it had all it needed.
    const auto former = std::find_if(former_.begin(), former_.end(),
                                     [&](const Former& entry) { return entry.row == row; });
    expect(former != former_.end(), "a delta for a row that nobody has");
    const bool replaced = index < former->held;
    expect(replaced ? is_copy : index == former->held, "index of a delta taken back");
    copies += replaced ? 1 : 0;
    former->held += replaced ? 0 : 1;
    ModelledRequest& request = requests_.at(live_.at(former->id).arrival.id.value());
    ++taken[request.arrival.id.value()];
    if (request.arrival.samples == 1) {
      request.peak_least = std::max(request.peak_least, former->held);
    }
  }
  expect_equal("copies", plan.copy_to.size(), copies);
  counts_.copies += static_cast<std::int64_t>(copies);
  for (auto& [id, request] : requests_) {
    request.peak_least = std::max(request.peak_least, held_by(id));
    request.peak_most = request.arrival.samples == 1
                            ? request.peak_least
                            : std::max(request.peak_most, held_before_[id] + taken[id]);
  }
}

// A block that a running sequence shares, takes for itself, or takes in place of a shared one.
void Model::follow_delta(Modelled& owner, std::int32_t index, std::int32_t block,
                         const StepPlanView& plan, std::size_t& copies) {
  if (index < owner.held()) {
    std::int32_t& entry = owner.blocks[static_cast<std::size_t>(index)];
    expect_equal("index of a copy", index, owner.computed / settings_.slots_per_block);
    const bool was_shared = std::any_of(former_.begin(), former_.end(), [&](const Former& former) {
      return std::find(former.blocks.begin(), former.blocks.end(), entry) != former.blocks.end();
    });
    expect(tables_with(entry) > 1 || was_shared, "a copy of a block that nobody else has");
    expect(copies < plan.copy_to.size(), "a block was replaced but not copied");
    expect_equal("copied from", plan.copy_from[copies], entry);
    expect_equal("copied to", plan.copy_to[copies], block);
    ++copies;
    entry = block;
  } else {
    expect_equal("index of a delta", index, owner.held());
    const bool is_shared = index < owner.begins_with;
    owner.blocks.push_back(block);
    expect_equal("tables with a block", tables_with(block) > 1, is_shared);
    if (is_shared) {
      return;
    }
  }
  owner.promised -= owner.promised > 0 ? 1 : 0;
}

void Model::check_blocks() const {
  std::map<std::int32_t, std::pair<const Modelled*, std::size_t>> taken;
  for (const auto& [id, sequence] : live_) {
    for (std::size_t i = 0; i < sequence.blocks.size(); ++i) {
      const std::int32_t block = sequence.blocks[i];
      expect(block >= 0 && block < settings_.blocks.value(), "a block that does not exist");
      const auto [entry, is_new] = taken.try_emplace(block, &sequence, i);
      if (!is_new) {
        const auto& [other, index] = entry->second;
        expect(other->arrival.id == sequence.arrival.id, "a block stands in two requests' tables");
        expect_equal("index of a shared block", i, index);
        expect(static_cast<std::int64_t>(i) * settings_.slots_per_block < sequence.prompt_count,
               "samples share what is not the prompt");
      }
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
  check_forks(plan, logits);
}

// Samples begin at the end of another's prompt if there is room and nobody waits before them.
void Model::check_forks(const StepPlanView& plan, std::size_t logits) {
  const auto forked = std::count_if(live_.begin(), live_.end(),
                                    [](const auto& entry) { return entry.second.forked; });
  std::int64_t now_running = running() - forked;
  const std::size_t sequences = step_.size();
  for (std::size_t i = 0; i < sequences; ++i) {
    const Modelled& leader = live_.at(step_[i].id);
    if (leader.arrival.samples == 1 || leader.token_count() > leader.prompt_count ||
        !step_[i].wants_logits || is_protected(leader)) {
      continue;
    }
    for (const Modelled* sample : samples_of(leader.arrival.id.value())) {
      const bool is_begun = std::any_of(step_.begin(), step_.end(), [&](const Planned& planned) {
        return planned.id == sample->id;
      });
      if (is_begun || (sample->running() && !sample->forked)) {
        continue;
      }
      expect_equal("began at the end of a prompt", sample->forked, may_fork(*sample, now_running));
      if (sample->forked) {
        ++now_running;
        ++counts_.forks;
        expect(logits < plan.logit_tokens.size(), "a sample began without logits");
        expect_equal("token of logits", plan.logit_tokens[logits], plan.query_start[i + 1] - 1);
        expect_equal("row of logits", plan.logit_rows[logits], sample->row);
        expect(sample->blocks == leader.blocks, "a sample began with other blocks");
        ++logits;
        step_.push_back(Planned{sample->id, true});
      }
    }
  }
  expect_equal("logits wanted", plan.logit_tokens.size(), logits);
  expect_equal("samples begun", static_cast<std::int64_t>(step_.size() - sequences), forked);
}

bool Model::may_fork(const Modelled& sample, std::int64_t running) const {
  const bool somebody_before = std::any_of(live_.begin(), live_.end(), [&](const auto& entry) {
    const Modelled& other = entry.second;
    const std::uint32_t tenant = other.arrival.tenant.value();
    const std::uint32_t own = sample.arrival.tenant.value();
    return !other.running() && !other.paused && !other.held_back &&
           (tenant == own ? before(other, sample) : service_.at(tenant) < service_.at(own));
  });
  return !sample.paused && sample.token_count() == sample.prompt_count && !is_protected(sample) &&
         running < settings_.scheduler.sequences_max && free_blocks() > running && !somebody_before;
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
  for (std::int64_t position = sequence.computed; position < sequence.computed + count;
       ++position) {
    const std::int32_t written =
        sequence.blocks[static_cast<std::size_t>(position / settings_.slots_per_block)];
    expect_equal("tables with a block that is written", tables_with(written, true), 1);
  }
  sequence.planned = count;
  const std::int64_t keys = keys_of_chunk(sequence.computed, count);
  (decodes ? step_work_.decode_tokens : step_work_.prefill_tokens) += count;
  (decodes ? step_work_.decode_keys : step_work_.prefill_keys) += keys;
  requests_.at(sequence.arrival.id.value()).in_step = true;
  counts_.chunks += sequence.phase == Phase::kPrefill && count < sequence.pending() ? 1 : 0;
  const bool wants_logits = count == sequence.pending();
  step_.push_back(Planned{sequence.id, wants_logits});
  if (wants_logits) {
    expect(logits < plan.logit_tokens.size(), "logits that nobody asked for");
    expect_equal("token of logits", plan.logit_tokens[logits], last - 1);
    expect_equal("row of logits", plan.logit_rows[logits], plan.rows[index]);
    ++logits;
  }
}

void Model::check_decode_shares(const StepPlanView& plan, const StepReport& report) const {
  std::int64_t wanted = 0;
  std::int64_t planned = 0;
  std::int64_t prompts = 0;
  bool is_all = true;  // nobody waits for a block
  for (const auto& [id, sequence] : live_) {
    if (sequence.phase == Phase::kDecode && !sequence.paused) {
      wanted += sequence.pending();
      planned += sequence.planned;
      expect((sequence.planned > 0) == (sequence.sat_out == 0),
             "a running sequence could not decode");
      is_all = is_all && sequence.planned > 0;
    }
    prompts += sequence.phase == Phase::kPrefill && !sequence.paused ? 1 : 0;
  }
  expect_equal("decode tokens", plan.header.decode_tokens, planned);
  expect(planned == wanted || wanted + prompts > settings_.scheduler.token_budget ||
             !report.preemptions.empty() || !is_all,
         "a decode token was left out although all fit");
}

}  // namespace kvledger::simulation
