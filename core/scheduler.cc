#include "core/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/make_room.h"

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
      blocks_(slots_per_block, pool, tables, cache) {
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
  at_limit_.reserve(2 * kAtLimitMax);
}

void Scheduler::enqueue(Request& request) {
  make_room(spare_, spare_.size() + waiting_.size() + request.samples.size());
  std::size_t joined = 0;
  try {
    for (Sequence* sequence : request.samples) {
      sequence->rank = sequence->arrived_at + sequence->priority * settings_.aging_per_priority;
      waiting_.insert(sequence);
      sequence->state = Sequence::State::kWaiting;
      ++joined;
    }
  } catch (...) {
    for (std::size_t i = 0; i < joined; ++i) {
      waiting_.erase(request.samples[i]);
    }
    throw;
  }
  arrange(request);
}

void Scheduler::join_queue(Sequence& sequence) {
  sequence.state = Sequence::State::kWaiting;
  if (sequence.paused || sequence.held_back) {
    ++parked_;
  } else {
    KVL_CHECK(!spare_.empty());
    Waiting::node_type node = std::move(spare_.back());
    spare_.pop_back();
    node.value() = &sequence;
    waiting_.insert(std::move(node));
  }
}

void Scheduler::leave_queue(Sequence& sequence) {
  if (sequence.paused || sequence.held_back) {
    --parked_;
    return;
  }
  Waiting::node_type node = waiting_.extract(&sequence);
  KVL_CHECK(!node.empty());
  spare_.push_back(std::move(node));
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
  collect_prefill(plan);
  find_waiters();
  const std::int64_t room = prefill_room(settings_.token_budget - decode_tokens);
  plan.set_prefill_room(room);
  share_prefill_budget(room);
  admit_chosen(now, plan, report);
  note_work();
  emit(now, plan, report);
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
    const bool grown = grow(i, tokens, now, plan, report);
    paused_before -= static_cast<std::int64_t>(before - i);  // only paused ones left
    if (!grown) {
      preempt(sequence, now, report);  // the next sequence is now at index i
      continue;
    }
    chunks_.push_back(Chunk{&sequence, tokens});
    chosen += tokens;
    ++i;
  }
  return chosen;
}

// Makes room for `tokens` more tokens of the sequence at `index`, by preempting others if it must;
// `index` follows it. False if even that was not enough.
bool Scheduler::grow(std::size_t& index, std::int64_t tokens, Nanoseconds now, StepPlan& plan,
                     StepReport& report) {
  Sequence& sequence = *running_[index];
  for (BlockCount missing = blocks_.missing(sequence, tokens); missing > kNone;) {
    if (sequence.reservation.remaining() == kNone) {
      std::optional<Reservation> one = cache_.reserve(sequence.account, sequence.tenant, kOne);
      if (!one) {
        const std::size_t victim = victim_for(index);
        if (victim == running_.size()) {
          return false;
        }
        preempt(*running_[victim], now, report);
        index -= victim < index ? 1 : 0;
        missing = blocks_.missing(sequence, tokens);  // a victim may have shared its last block
        continue;
      }
      sequence.reservation = std::move(*one);
    }
    blocks_.take(sequence, plan);
    missing -= kOne;
  }
  return true;
}

// Whom the sequence at `index` may preempt: the last one paused, else the last one behind it; the
// number running if there is none.
std::size_t Scheduler::victim_for(std::size_t index) const {
  std::size_t victim = running_.size();
  for (std::size_t i = running_.size(); i-- > 0;) {
    if (is_protected(*running_[i]) || !would_help(*running_[i], *running_[index])) {
      continue;
    }
    if (running_[i]->paused) {
      return i;
    }
    if (victim == running_.size() && i > index) {
      victim = i;
    }
  }
  return victim;
}

// Prompt tokens for which the step has time, at most `budget`. Where a step is limited, those who
// decode wait no longer for a prompt than the limit says. Now and then none have: what is left for
// them is told by how long decoding alone takes, and that has to be known.
std::int64_t Scheduler::prefill_room(std::int64_t budget) const {
  const bool limited = settings_.step_time_max > 0 || settings_.step_stretch > 0;
  if (!limited || decode_chunks_ == 0 || candidates_.empty()) {
    return budget;
  }
  if (step_time_.needs_decode()) {
    return 0;
  }
  std::int64_t keys = 0;
  std::int64_t tokens = 0;
  for (const Chunk& chunk : chunks_) {
    tokens += chunk.tokens;
    keys += keys_of_chunk(chunk.sequence->computed, chunk.tokens);
  }
  const Nanoseconds decode = step_time_.decode_time(tokens, keys);
  Nanoseconds longest = settings_.step_time_max;
  if (settings_.step_stretch > 0) {
    const Nanoseconds stretched = decode / 1000 * settings_.step_stretch;
    longest = longest > 0 ? std::min(longest, stretched) : stretched;
  }
  std::int64_t computed = 0;
  for (const Candidate& candidate : candidates_) {
    computed = std::max(computed, candidate.computed());
  }
  const std::int64_t fits = step_time_.prefill_within(longest - decode, computed, budget);
  return std::min(budget, std::max(fits, settings_.prefill_least));
}

void Scheduler::note_work() noexcept {
  work_ = StepWork{};
  for (std::size_t i = 0; i < chunks_.size(); ++i) {
    const auto& [sequence, tokens] = chunks_[i];
    const std::int64_t keys = keys_of_chunk(sequence->computed, tokens);
    (i < decode_chunks_ ? work_.decode_tokens : work_.prefill_tokens) += tokens;
    (i < decode_chunks_ ? work_.decode_keys : work_.prefill_keys) += keys;
  }
}

// Half of the budget for the oldest, then the shortest first, what is left to the oldest again.
void Scheduler::share_prefill_budget(std::int64_t budget) {
  if (candidates_.empty() || budget <= 0) {
    return;
  }
  const auto oldest = std::min_element(
      candidates_.begin(), candidates_.end(),
      [](const auto& a, const auto& b) { return ByRank{}(a.sequence, b.sequence); });
  std::iter_swap(candidates_.begin(), oldest);
  Candidate& first = candidates_.front();
  first.tokens = std::min(first.pending(), std::max<std::int64_t>(1, budget / 2));
  budget -= first.tokens;
  // Who waits for a block comes last: by then it is known whether it is computed to its end.
  std::sort(candidates_.begin() + 1, candidates_.end(), [](const auto& a, const auto& b) {
    if ((a.waits_for != nullptr) != (b.waits_for != nullptr)) {
      return b.waits_for != nullptr;
    }
    const std::int64_t left = a.listed();
    const std::int64_t right = b.listed();
    return left != right ? left < right : ByRank{}(a.sequence, b.sequence);
  });
  const auto waiters =
      std::find_if(candidates_.begin() + 1, candidates_.end(),
                   [](const Candidate& candidate) { return candidate.waits_for != nullptr; });
  const auto give = [&budget](Candidate& candidate) {
    candidate.tokens = std::min(candidate.pending(), budget);
    budget -= candidate.tokens;
  };
  std::for_each(candidates_.begin() + 1, waiters, give);
  const std::int64_t more = std::min(first.pending() - first.tokens, budget);
  first.tokens += more;
  budget -= more;
  for (auto waiter = waiters; waiter != candidates_.end(); ++waiter) {
    if (!completes_next_block(*waiter->waits_for)) {
      give(*waiter);
    }
  }
}

// Whether a candidate's share of the budget reaches the end of the block that it is in.
bool Scheduler::completes_next_block(const Sequence& sequence) const noexcept {
  const auto found =
      std::find_if(candidates_.begin(), candidates_.end(),
                   [&](const Candidate& candidate) { return candidate.sequence == &sequence; });
  return found->computed() % slots_per_block_ + found->tokens >= slots_per_block_;
}

void Scheduler::emit(Nanoseconds now, StepPlan& plan, StepReport& report) {
  leaders_.clear();
  const std::size_t chosen_chunks = chunks_.size();
  std::int32_t planned = 0;
  for (std::size_t i = 0; i < chosen_chunks; ++i) {
    if (i == decode_chunks_) {
      plan.begin_prefill();
    }
    const auto [chosen, tokens] = chunks_[i];
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
      leaders_.push_back(Leader{&sequence, planned - 1});
    }
  }
  if (chosen_chunks == decode_chunks_) {
    plan.begin_prefill();
  }
  for (const Leader& leader : leaders_) {
    fork_samples(*leader.sequence, leader.token, now, plan, report);
  }
}

void Scheduler::remove(Sequence& sequence) {
  if (sequence.state == Sequence::State::kWaiting) {
    leave_queue(sequence);
  } else {
    KVL_CHECK_EQ(sequence.state, Sequence::State::kRunning);
    leave_running(sequence);
  }
  KVL_CHECK(!spare_.empty());
  spare_.pop_back();
  sequence.state = Sequence::State::kEnded;
  Request& request = *sequence.request;
  std::erase(request.samples, &sequence);
  arrange(request);
}

// Whether a victim's blocks could be another's: not where that one is at its own tenant's limit,
// and not where the victim's tenant has only what it was guaranteed.
bool Scheduler::would_help(const Sequence& victim, const Sequence& other) const {
  const PoolShares& shares = cache_.shares();
  return victim.tenant == other.tenant ||
         (shares.left_to(other.tenant) > kNone && shares.is_beyond_guarantee(victim.tenant));
}

void Scheduler::preempt(Sequence& sequence, Nanoseconds now, StepReport& report) {
  KVL_CHECK(!sequence.in_step);
  KVL_CHECK(!is_protected(sequence));
  report.preemptions.push_back(Preemption{sequence.id.value(), sequence.computed});
  leave_running(sequence);
  sequence.computed = 0;
  ++sequence.preemptions;
  sequence.spend(now, Sequence::Activity::kQueued);
  join_queue(sequence);
  arrange(*sequence.request);
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
