#include "core/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/check.h"

namespace kvledger {
namespace {

constexpr BlockCount kNone{0};
constexpr BlockCount kOne{1};

}  // namespace

Scheduler::Scheduler(const SchedulerSettings& settings, std::int32_t slots_per_block,
                     std::int64_t tokens_max, BlockPool& pool, BlockTables& tables,
                     PrefixCache& cache)
    : settings_(settings),
      slots_per_block_(slots_per_block),
      pool_(pool),
      tables_(tables),
      cache_(cache),
      blocks_(slots_per_block, pool, tables, cache),
      queue_(settings.token_budget),
      pool_forecast_(slots_per_block),
      share_forecast_(slots_per_block) {
  KVL_CHECK_GE(settings.sequences_max, 1);
  KVL_CHECK_GE(settings.token_budget, settings.sequences_max);
  KVL_CHECK_LE(settings.sequences_max, tables.rows());
  KVL_CHECK_LE(blocks_for(tokens_max - 1), pool.total());
  KVL_CHECK_LE(blocks_for(tokens_max - 1), tables.width());
  const auto rows = static_cast<std::size_t>(settings.sequences_max);
  running_.reserve(rows);
  chunks_.reserve(rows);
  leaders_.reserve(rows);
  candidates_.reserve(rows);
  passed_over_.reserve(kLookahead);
  victims_.reserve(rows);
  at_limit_.reserve(2 * kAtLimitMax);
  backlogged_.reserve(rows + kLookahead + 1);
}

void Scheduler::enqueue(Request& request) {
  std::size_t entered = 0;
  try {
    for (Sequence* sequence : request.samples) {
      sequence->rank = sequence->arrived_at + sequence->priority * settings_.aging_per_priority;
      sequence->line = &queue_.enter(sequence->tenant);
      ++entered;
    }
  } catch (...) {
    for (; entered > 0; --entered) {
      queue_.leave();
    }
    throw;
  }
  for (Sequence* sequence : request.samples) {
    join_queue(*sequence);
  }
  arrange(request);
}

void Scheduler::join_queue(Sequence& sequence) {
  sequence.state = Sequence::State::kWaiting;
  if (sequence.paused || sequence.held_back) {
    ++parked_;
  } else {
    queue_.insert(sequence);
  }
}

void Scheduler::leave_queue(Sequence& sequence) {
  if (sequence.paused || sequence.held_back) {
    --parked_;
  } else {
    queue_.extract(sequence);
  }
}

void Scheduler::arrange(Request& request) {
  const Sequence* carrier = request.source() == nullptr ? request.carrier() : nullptr;
  for (Sequence* sample : request.samples) {
    const bool held_back = carrier != nullptr && sample != carrier;
    if (sample->state == Sequence::State::kWaiting && sample->held_back != held_back) {
      leave_queue(*sample);
      sample->held_back = held_back;
      join_queue(*sample);
    }
  }
}

void Scheduler::pause(Sequence& sequence) {
  if (sequence.paused) {
    return;
  }
  if (sequence.state == Sequence::State::kWaiting) {
    leave_queue(sequence);
    sequence.paused = true;
    join_queue(sequence);
  } else {
    sequence.paused = true;
    ++paused_running_;
  }
  arrange(*sequence.request);
}

void Scheduler::resume(Sequence& sequence) {
  if (!sequence.paused) {
    return;
  }
  if (sequence.state == Sequence::State::kWaiting) {
    leave_queue(sequence);
    sequence.paused = false;
    join_queue(sequence);
  } else {
    sequence.paused = false;
    --paused_running_;
  }
  arrange(*sequence.request);
}

void Scheduler::schedule(Nanoseconds now, StepPlan& plan, StepReport& report) {
  chunks_.clear();
  for (Sequence* sequence : running_) {
    if (sequence->twice_from >= 0) {
      blocks_.exchange_twice(*sequence, plan);
    }
  }
  const std::int64_t decode_tokens = choose_decode(now, plan, report);
  decode_chunks_ = chunks_.size();
  backlogged_.clear();
  collect_prefill(plan);
  for (const Candidate& candidate : candidates_) {
    queue_.lift(*candidate.sequence->line);
  }
  find_waiters();
  note_oldest();
  note_tenants(now);
  const std::int64_t room = prefill_room(settings_.token_budget - decode_tokens, now);
  plan.set_prefill_room(room);
  share_prefill_budget(room);
  admit_chosen(now, plan, report);
  note_work();
  emit(now, plan, report);
  count_service();
}

// Every running sequence that is past its prompt computes its pending tokens, in order of rank.
std::int64_t Scheduler::choose_decode(Nanoseconds now, StepPlan& plan, StepReport& report) {
  std::int64_t chosen = 0;
  std::int64_t paused_before = 0;  // of those before index i
  for (std::size_t i = 0; i < running_.size();) {
    Sequence& sequence = *running_[i];
    if (sequence.activity != Sequence::Activity::kDecode || sequence.paused) {
      paused_before += sequence.paused ? 1 : 0;
      ++i;
      continue;
    }
    // Several tokens may be pending; whoever runs behind can still count on one.
    const std::int64_t behind =
        running() - static_cast<std::int64_t>(i) - 1 - (paused_running_ - paused_before);
    const std::int64_t tokens =
        std::min(sequence.pending(), settings_.token_budget - chosen - behind);
    const std::size_t before = i;
    const Growth growth = grow(i, tokens, now, plan, report);
    paused_before -= static_cast<std::int64_t>(before - i);  // only paused ones left
    sequence.waited_steps = growth == Growth::kWaits ? sequence.waited_steps + 1 : 0;
    if (growth == Growth::kWaits) {
      ++i;
      continue;
    }
    if (growth == Growth::kNobodyBehind) {
      preempt(sequence, sequence, now, report);  // the next sequence is now at index i
      continue;
    }
    chunks_.push_back(Chunk{&sequence, tokens});
    chosen += tokens;
    ++i;
  }
  return chosen;
}

// Makes room for `tokens` more tokens of the sequence at `index`, by preempting others if it must;
// `index` follows it. Who waits has taken nothing.
Scheduler::Growth Scheduler::grow(std::size_t& index, std::int64_t tokens, Nanoseconds now,
                                  StepPlan& plan, StepReport& report) {
  Sequence& sequence = *running_[index];
  bool may_wait = true;
  for (BlockCount missing = blocks_.missing(sequence, tokens); missing > kNone;) {
    if (sequence.reservation.remaining() == kNone) {
      std::optional<Reservation> one = cache_.reserve(sequence.account, sequence.tenant, kOne);
      if (!one) {
        collect_victims(index);
        if (may_wait && should_wait(sequence)) {
          return Growth::kWaits;
        }
        if (victims_.empty()) {
          return Growth::kNobodyBehind;
        }
        may_wait = false;
        const std::size_t victim = choose_victim();
        preempt(*running_[victim], sequence, now, report);
        index -= victim < index ? 1 : 0;
        missing = blocks_.missing(sequence, tokens);  // a victim may have shared its last block
        continue;
      }
      sequence.reservation = std::move(*one);
    }
    blocks_.take(sequence, plan);
    missing -= kOne;
    may_wait = false;
  }
  return Growth::kHasAll;
}

void Scheduler::note_oldest() noexcept {
  for (const Chunk& chunk : chunks_) {
    chunk.sequence->line->oldest = nullptr;
  }
  for (const Candidate& candidate : candidates_) {
    candidate.sequence->line->oldest = nullptr;
  }
  for (const Candidate& candidate : candidates_) {
    const Sequence*& oldest = candidate.sequence->line->oldest;
    if (oldest == nullptr || ByRank{}(candidate.sequence, oldest)) {
      oldest = candidate.sequence;
    }
  }
}

void Scheduler::note_work() noexcept {
  work_ = StepWork{};
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    const auto& [sequence, tokens, of_source] = chunks_[i];
    const std::int64_t keys = keys_of_chunk(sequence->computed, tokens);
    (i < decode_chunks_ ? work_.decode_tokens : work_.prefill_tokens) += tokens;
    (i < decode_chunks_ ? work_.decode_keys : work_.prefill_keys) += keys;
  }
}

void Scheduler::observe(Nanoseconds elapsed, Nanoseconds now, bool is_whole) noexcept {
  std::int64_t prompts = 0;
  for (std::size_t i = decode_chunks_; i < chunks_.size(); ++i) {
    prompts += chunks_[i].tokens > 0 ? 1 : 0;  // the others are samples that begin at their end
  }
  const Nanoseconds decode = step_time_.decode_time(work_.decode_tokens, work_.decode_keys);
  const Nanoseconds expected = step_time_.expected(work_);
  {
    const auto timed = pool_.timed();
    books_.observe(work_, static_cast<std::int64_t>(decode_chunks_), prompts, elapsed, decode,
                   expected);
  }
  for (std::size_t what = 0; what < waited_.size(); ++what) {
    if (waited_[what]) {
      books_.waited(static_cast<StepBooks::Waited>(what), elapsed);
    }
  }
  if (work_.prefill_tokens > 0) {
    book_delays(elapsed - StepBooks::decode_part(work_, elapsed, decode), now);
  }
  if (is_whole) {
    step_time_.observe(work_, elapsed);
  }
}

// Everybody who runs has waited for the prompts of the step, except for what was its own of them.
void Scheduler::book_delays(Nanoseconds prefill, Nanoseconds now) noexcept {
  for (Sequence* sequence : running_) {
    if (!sequence->paused) {
      sequence->delayed() += std::min(prefill, now - sequence->activity_since);
    }
  }
  for (std::size_t i = decode_chunks_; i < chunks_.size(); ++i) {
    const auto& [sequence, tokens, of_source] = chunks_[i];
    if (sequence->state == Sequence::State::kRunning && !sequence->paused) {
      const std::int64_t mine = tokens + of_source;
      const Nanoseconds own = prefill / work_.prefill_tokens * mine +
                              prefill % work_.prefill_tokens * mine / work_.prefill_tokens;
      sequence->delayed() -= std::min(own, sequence->delayed());
    }
  }
}

// Counts what the step gives to tenants.
void Scheduler::count_service() {
  for (const Candidate& candidate : candidates_) {
    backlogged_.push_back(candidate.sequence->line);
  }
  for (const Sequence* examined : passed_over_) {
    if (examined->state == Sequence::State::kWaiting) {
      backlogged_.push_back(examined->line);
    }
  }
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    const auto& [sequence, tokens, of_source] = chunks_[i];
    // What a preemption made necessary is not its victim's to pay.
    const std::int64_t known = std::max(sequence->computed, sequence->computed_peak);
    const std::int64_t fresh = std::max<std::int64_t>(0, sequence->computed + tokens - known);
    queue_.give(*sequence->line, i < decode_chunks_ ? kDecodePrice * fresh : fresh);
  }
  queue_.count(backlogged_);
}

void Scheduler::emit(Nanoseconds now, StepPlan& plan, StepReport& report) {
  leaders_.clear();
  const std::size_t chosen_chunks = chunks_.size();
  std::int32_t planned = 0;
  for (std::size_t i = 0; i < chosen_chunks; ++i) {
    if (i == decode_chunks_) {
      plan.begin_prefill();
    }
    const auto [chosen, tokens, of_source] = chunks_[i];
    Sequence& sequence = *chosen;
    for (BlockCount missing = blocks_.missing(sequence, tokens); missing > kNone; missing -= kOne) {
      blocks_.take(sequence, plan);  // prefill only: decode took its blocks when it was chosen
    }
    const std::span<const Token> all(sequence.tokens);
    plan.append_sequence(
        sequence.row,
        all.subspan(static_cast<std::size_t>(sequence.computed), static_cast<std::size_t>(tokens)),
        sequence.computed, tokens == sequence.pending());
    planned += static_cast<std::int32_t>(tokens);
    if (sequence.request->is_shared() && sequence.output_count() == 0 &&
        tokens == sequence.pending() && !is_protected(sequence)) {
      leaders_.push_back(Leader{&sequence, planned - 1, tokens});
    }
  }
  if (chosen_chunks == decode_chunks_) {
    plan.begin_prefill();
  }
  for (const Leader& leader : leaders_) {
    fork_samples(leader, now, plan, report);
  }
}

void Scheduler::remove(Sequence& sequence) {
  if (sequence.state == Sequence::State::kWaiting) {
    leave_queue(sequence);
  } else {
    KVL_CHECK_EQ(sequence.state, Sequence::State::kRunning);
    leave_running(sequence);
  }
  queue_.leave();
  learn_length(sequence);
  sequence.state = Sequence::State::kEnded;
  Request& request = *sequence.request;
  std::erase(request.samples, &sequence);
  arrange(request);
}

void Scheduler::leave_running(Sequence& sequence) {
  blocks_.give_back(sequence);
  const auto place = std::lower_bound(running_.begin(), running_.end(), &sequence, ByRank{});
  KVL_CHECK(place != running_.end() && *place == &sequence);
  running_.erase(place);
  paused_running_ -= sequence.paused ? 1 : 0;
}

// Whether the sequence was preempted as often as it may be: it reserves everything at once and is
// no victim.
bool Scheduler::is_protected(const Sequence& sequence) const noexcept {
  return sequence.preemptions >= settings_.preemptions_max;
}

}  // namespace kvledger
