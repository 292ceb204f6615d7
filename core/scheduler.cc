#include "core/scheduler.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/make_room.h"

namespace kvledger {
namespace {

// Waiting sequences looked at in one step. More would only help when this many in a row do not
// fit, and would make a step's cost depend on the length of the queue.
constexpr std::size_t kLookahead = 8;

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
  candidates_.reserve(rows + kLookahead);
  passed_over_.reserve(kLookahead);
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

// Prompts that could be computed now: those already running, and the first waiting ones whose
// blocks could be reserved.
void Scheduler::collect_prefill(StepPlan& plan) {
  candidates_.clear();
  passed_over_.clear();
  for (Sequence* sequence : running_) {
    if (sequence->activity == Sequence::Activity::kPrefill && !sequence->paused) {
      blocks_.catch_up(*sequence, plan);
      candidates_.emplace_back();
      candidates_.back().sequence = sequence;
    }
  }
  std::int64_t rows = settings_.sequences_max - running();
  BlockCount promised;                                  // to those chosen so far
  auto passes = static_cast<std::int64_t>(kLookahead);  // that those looked at still put up with
  for (Sequence* sequence : waiting_) {
    if (rows == 0 || passes == 0 || passed_over_.size() == kLookahead) {
      break;
    }
    passed_over_.push_back(sequence);
    const Candidate next = candidate(*sequence);
    const BlockCount needed =
        blocks_to_admit(*sequence, next.shared + next.match.blocks * slots_per_block_) +
        BlockCount{next.match.cached};
    if (needed <= room_for(sequence->tenant) - promised) {
      promised += needed + kOne;  // its blocks, and one to grow into
      --rows;
      --passes;
      candidates_.push_back(next);
    }
    passes = std::min(passes, settings_.overtakes_max - sequence->overtaken);
  }
}

// Blocks that a tenant's sequences may be admitted with: one stays for each that runs to grow into.
// Where a tenant has a guarantee nobody else's sequences grow into that.
BlockCount Scheduler::room_for(TenantId tenant) const {
  std::int64_t growing = running();
  if (cache_.shares().of(tenant).guaranteed > kNone) {
    growing = std::count_if(running_.begin(), running_.end(),
                            [&](const Sequence* other) { return other->tenant == tenant; });
  }
  return cache_.available(tenant) - BlockCount{growing};
}

// A waiting sequence, with what it could share now. Of its last token it needs the logits, so it
// computes that itself.
Scheduler::Candidate Scheduler::candidate(Sequence& waiting) {
  Candidate next;
  next.sequence = &waiting;
  if (waiting.request->is_shared()) {
    next.source = waiting.request->source();
  }
  if (next.source != nullptr) {
    next.shared = std::min(waiting.prompt_count, waiting.token_count() - 1);
  } else {
    next.match = cache_.match(waiting);
    next.reused = next.match.blocks * slots_per_block_ + next.match.tail;
  }
  return next;
}

// Who would compute the very block that an earlier one is about to compute waits for it.
void Scheduler::find_waiters() {
  if (!cache_.is_on() || candidates_.size() < 2) {
    return;
  }
  const auto timed = cache_.timed();
  std::sort(candidates_.begin(), candidates_.end(),
            [](const auto& a, const auto& b) { return ByRank{}(a.sequence, b.sequence); });
  for (std::size_t i = 1; i < candidates_.size(); ++i) {
    const auto place = cache_.next_place(*candidates_[i].sequence);
    for (std::size_t j = 0; j < i && place && candidates_[i].source == nullptr; ++j) {
      const Candidate& first = candidates_[j];
      if (first.waits_for != nullptr || first.source != nullptr) {
        continue;
      }
      const auto other = cache_.next_place(*first.sequence);
      if (other && other->parent == place->parent && other->scope == place->scope &&
          std::ranges::equal(other->tokens, place->tokens)) {
        candidates_[i].waits_for = first.sequence;
        break;
      }
    }
  }
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

// Whoever got a share of the budget runs; the waiting ones among them are admitted.
void Scheduler::admit_chosen(Nanoseconds now, StepPlan& plan, StepReport& report) {
  for (const Candidate& candidate : candidates_) {
    if (candidate.tokens == 0) {
      continue;
    }
    chunks_.push_back(Chunk{candidate.sequence, candidate.tokens});
    if (candidate.sequence->state != Sequence::State::kRunning) {
      begin(candidate, now, plan, report);
    }
  }
  std::int64_t admitted_behind = 0;
  for (auto examined = passed_over_.rbegin(); examined != passed_over_.rend(); ++examined) {
    if ((*examined)->state == Sequence::State::kRunning) {
      ++admitted_behind;
    } else {
      (*examined)->overtaken += admitted_behind;
    }
  }
}

// Admits a waiting sequence: with what it shares, and with a reservation for the rest.
void Scheduler::begin(const Candidate& candidate, Nanoseconds now, StepPlan& plan,
                      StepReport& report) {
  Sequence& sequence = *candidate.sequence;
  // Others may have evicted some of it since: then it needs more blocks, of which there are more.
  PrefixMatch match = candidate.source == nullptr ? cache_.match(sequence) : PrefixMatch{};
  const std::int64_t whole = match.blocks * slots_per_block_;
  const BlockCount needed = blocks_to_admit(sequence, candidate.shared + whole);
  if (cache_.available(sequence.tenant) <= needed + BlockCount{match.cached}) {
    match.tail = 0;  // its source may be the very block that has to go
  }
  if (candidate.source == nullptr) {
    cache_.count_lookup(sequence);
  }
  run(sequence, now, candidate.shared, whole + match.tail, report);
  blocks_.begin_with(sequence, match, plan);
  if (match.tail > 0) {
    cache_.pin_source(match);
  }
  std::optional<Reservation> reservation = cache_.reserve(
      sequence.account, sequence.tenant, blocks_to_admit(sequence, candidate.shared + whole));
  KVL_CHECK(reservation.has_value());
  sequence.reservation = std::move(*reservation);
  if (match.tail > 0) {
    blocks_.copy_tail(sequence, match, plan);
    cache_.unpin_source(match);
  }
  if (candidate.shared > 0) {
    blocks_.share(*candidate.source, sequence, candidate.shared, plan);
    // The source may write into the last of them in this very step: copy it before.
    for (BlockCount missing = blocks_.missing(sequence, candidate.tokens); missing > kNone;
         missing -= kOne) {
      blocks_.take(sequence, plan);
    }
  }
  if (sequence.request->is_shared() && sequence.computed >= sequence.prompt_count) {
    arrange(*sequence.request);
  }
}

// Gives a waiting sequence a row and its place among the running ones.
void Scheduler::run(Sequence& sequence, Nanoseconds now, std::int64_t shared_tokens,
                    std::int64_t reused_tokens, StepReport& report) {
  leave_queue(sequence);
  sequence.row = tables_.take_row();
  sequence.state = Sequence::State::kRunning;
  sequence.held_back = false;
  sequence.spend(now, Sequence::Activity::kPrefill);
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, ByRank{}),
                  &sequence);
  report.admissions.push_back(Admission{
      sequence.id.value(), sequence.times.queued, static_cast<std::int32_t>(sequence.row.value()),
      sequence.admitted_before ? 1 : 0, shared_tokens, reused_tokens});
  sequence.admitted_before = true;
  sequence.overtaken = 0;
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

// Lets the samples that wait for `leader` begin with it, at the logits of its prompt's last token.
void Scheduler::fork_samples(const Sequence& leader, std::int32_t token, Nanoseconds now,
                             StepPlan& plan, StepReport& report) {
  for (Sequence* sample : leader.request->samples) {
    if (!may_fork(*sample)) {
      continue;
    }
    run(*sample, now, sample->prompt_count, 0, report);
    blocks_.share(leader, *sample, sample->prompt_count, plan);
    chunks_.push_back(Chunk{sample, 0});
    plan.append_logits(token, sample->row);
  }
}

// A protected sequence may not need a block later, so it cannot begin with one to copy.
bool Scheduler::may_fork(const Sequence& sample) const {
  return sample.state == Sequence::State::kWaiting && !sample.paused &&
         sample.output_count() == 0 && !is_protected(sample) &&
         running() < settings_.sequences_max && room_for(sample.tenant) > kNone &&
         (waiting_.empty() || !ByRank{}(*waiting_.begin(), &sample));
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

// Blocks that a waiting sequence has to reserve if it begins with `shared_tokens` of another.
BlockCount Scheduler::blocks_to_admit(const Sequence& sequence, std::int64_t shared_tokens) const {
  std::int64_t tokens = sequence.token_count();
  if (is_protected(sequence)) {
    // The limit may be any number, so it is compared before it is added.
    const std::int64_t last =
        sequence.prompt_count +
        std::min(sequence.output_tokens_max, sequence.tokens_max - sequence.prompt_count);
    tokens = last - 1;  // the last token ends the sequence before it needs a slot
  }
  return blocks_for(tokens) - blocks_.full_blocks(shared_tokens);
}

// Whether the sequence was preempted as often as it may be: it reserves everything at once and is
// no victim.
bool Scheduler::is_protected(const Sequence& sequence) const noexcept {
  return sequence.preemptions >= settings_.preemptions_max;
}

}  // namespace kvledger
