// Which waiting sequences begin, and with what: the part of the scheduler that admits.

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/scheduler.h"

namespace kvledger {
namespace {

// Waiting sequences passed by without a look, because their tenant has all that it may have.
constexpr std::int64_t kSkipMax = 1024;

constexpr BlockCount kNone{0};
constexpr BlockCount kOne{1};

}  // namespace

// Prompts that could be computed now: those already running, and the first waiting ones whose
// blocks could be reserved.
void Scheduler::collect_prefill(StepPlan& plan) {
  candidates_.clear();
  passed_over_.clear();
  waited_.fill(false);
  for (Sequence* sequence : running_) {
    if (sequence->activity == Sequence::Activity::kPrefill && !sequence->paused) {
      const std::int64_t of_scopes = sequence->reused_shared;
      blocks_.catch_up(*sequence, plan);
      queue_.give(*sequence->line, sequence->reused_shared - of_scopes);
      candidates_.emplace_back();
      candidates_.back().sequence = sequence;
    }
  }
  at_limit_.clear();
  pool_forecast_.is_made = false;
  share_forecast_.is_made = false;
  std::int64_t rows = settings_.sequences_max - running();
  BlockCount promised;  // to those chosen so far, with one to grow into
  auto passes = static_cast<std::int64_t>(kLookahead);  // that those looked at still put up with
  std::int64_t skipped = 0;
  FairQueue::Cursor cursor = queue_.look();
  while (Sequence* sequence = cursor.next()) {
    if (rows == 0 && may_run(sequence->tenant)) {
      backlogged_.push_back(sequence->line);  // whoever has the next row
      waited_[StepBooks::kForPlace] = true;
    }
    if (rows <= 0 || passes <= 0 || passed_over_.size() == kLookahead || skipped == kSkipMax ||
        at_limit_.size() == kAtLimitMax) {
      break;
    }
    if (sequence->has_outgrown()) {
      ++skipped;
      continue;
    }
    if (is_at_limit(sequence->tenant)) {
      waited_[StepBooks::kForShare] = true;
      cursor.skip_tenant();
      continue;
    }
    const Candidate next = candidate(*sequence);
    const bool has_room =
        !cache_.shares().limits(sequence->tenant) ||
        next.needed <= cache_.shares().left_to(sequence->tenant) - promised_to(sequence->tenant);
    // What the pool has not got now is no matter of the tenant's share.
    const bool is_there = next.needed <= room_for(sequence->tenant) - promised;
    if (!has_room || (is_there && !lasts_in_share(next))) {
      // It waits for its own tenant's sequences: nobody else shall wait for that.
      waited_[StepBooks::kForShare] = true;
      at_limit_.push_back(sequence);
      ++skipped;
      continue;
    }
    passed_over_.push_back(sequence);
    if (is_there && lasts_in_pool(next)) {
      promised += next.needed + kOne;
      --rows;
      --passes;
      choose(next);
    } else {
      waited_[StepBooks::kForMemory] = true;
    }
    passes = std::min(passes, settings_.overtakes_max - sequence->overtaken);
  }
  collect_guaranteed(rows);
}

// Sequences that fit into what is left of their tenant's guarantee wait for nobody else's.
void Scheduler::collect_guaranteed(std::int64_t rows) {
  const PoolShares& shares = cache_.shares();
  if (shares.guaranteed() == kNone) {
    return;
  }
  std::int64_t skipped = 0;
  FairQueue::Cursor cursor = queue_.look();
  while (Sequence* sequence = cursor.next()) {
    if (rows == 0 || skipped == kSkipMax || at_limit_.size() == 2 * kAtLimitMax) {
      return;
    }
    ++skipped;
    const TenantId tenant = sequence->tenant;
    const BlockCount guaranteed = shares.of(tenant).guaranteed;
    if (guaranteed == kNone || is_at_limit(tenant)) {
      cursor.skip_tenant();
      continue;
    }
    if (sequence->has_outgrown() || is_candidate(*sequence)) {
      continue;
    }
    const Candidate next = candidate(*sequence);
    const BlockCount left = guaranteed - cache_.live(tenant) - promised_to(tenant);
    if (next.needed > std::min(left, cache_.available(tenant) - promised_to_all()) ||
        !lasts_in_share(next)) {
      if (std::find(at_limit_.begin(), at_limit_.end(), sequence) == at_limit_.end()) {
        at_limit_.push_back(sequence);
      }
      continue;
    }
    --rows;
    choose(next);
  }
}

// Whether a tenant has room of its own for another block.
bool Scheduler::may_run(TenantId tenant) const noexcept {
  return !cache_.shares().limits(tenant) || cache_.shares().left_to(tenant) > kNone;
}

// Whether no more of a tenant's sequences are looked at: several had no room in its share, or one
// of them was overtaken by others of its tenant as often as it may be.
bool Scheduler::is_at_limit(TenantId tenant) const noexcept {
  std::size_t tried = 0;
  for (const Sequence* sequence : at_limit_) {
    if (sequence->tenant == tenant) {
      ++tried;
      if (tried == kLookahead || sequence->overtaken >= settings_.overtakes_max) {
        return true;
      }
    }
  }
  return false;
}

bool Scheduler::is_candidate(const Sequence& sequence) const noexcept {
  return std::any_of(candidates_.begin(), candidates_.end(),
                     [&](const Candidate& candidate) { return candidate.sequence == &sequence; });
}

// Blocks that waiting sequences of a tenant, or of all, will reserve if they are admitted.
BlockCount Scheduler::promised_to(TenantId tenant) const noexcept {
  BlockCount sum;
  for (const Candidate& candidate : candidates_) {
    sum += candidate.sequence->tenant == tenant ? candidate.needed : kNone;
  }
  return sum;
}

BlockCount Scheduler::promised_to_all() const noexcept {
  BlockCount sum;
  for (const Candidate& candidate : candidates_) {
    sum += candidate.needed;
  }
  return sum;
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
  const std::int64_t whole = next.match.blocks * slots_per_block_;
  next.needed = blocks_to_admit(waiting, next.shared + whole) + BlockCount{next.match.cached};
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
    if (!candidates_[i].sequence->scopes.reuses) {
      continue;
    }
    const auto place = cache_.next_place(*candidates_[i].sequence);
    for (std::size_t j = 0; j < i && place && candidates_[i].source == nullptr; ++j) {
      const Candidate& first = candidates_[j];
      // Whoever would wait for one whose turn comes later might wait for long.
      if (first.waits_for != nullptr || first.source != nullptr ||
          first.sequence->line->service() > candidates_[i].sequence->line->service()) {
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

// Whoever got a share of the budget runs; the waiting ones among them are admitted.
void Scheduler::admit_chosen(Nanoseconds now, StepPlan& plan, StepReport& report) {
  for (const Candidate& candidate : candidates_) {
    if (candidate.tokens == 0) {
      const bool waits = candidate.sequence->state == Sequence::State::kWaiting;
      waited_[StepBooks::kForTurn] = waited_[StepBooks::kForTurn] || waits;
      continue;
    }
    const bool ran = candidate.sequence->state == Sequence::State::kRunning;
    if (!ran && !begin(candidate, now, plan, report)) {
      continue;
    }
    chunks_.push_back(Chunk{candidate.sequence, candidate.tokens});
    for (Sequence* waiting : at_limit_) {
      const bool overtaken = !ran && waiting->tenant == candidate.sequence->tenant &&
                             ByRank{}(waiting, candidate.sequence);
      waiting->overtaken += overtaken ? 1 : 0;
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

// Admits a waiting sequence: with what it shares, and with a reservation for the rest. False if
// those before it have left too little.
bool Scheduler::begin(const Candidate& candidate, Nanoseconds now, StepPlan& plan,
                      StepReport& report) {
  Sequence& sequence = *candidate.sequence;
  // Others may have evicted some of it since: then it needs more blocks, of which there are more.
  PrefixMatch match = candidate.source == nullptr ? cache_.match(sequence) : PrefixMatch{};
  const std::int64_t whole = match.blocks * slots_per_block_;
  const BlockCount needed = blocks_to_admit(sequence, candidate.shared + whole);
  const BlockCount left = cache_.available(sequence.tenant) - needed - BlockCount{match.cached};
  if (left < kNone) {
    return false;
  }
  if (left == kNone) {
    match.tail = 0;  // its source may be the very block that has to go
  }
  if (candidate.source == nullptr) {
    cache_.count_lookup(sequence);
  }
  const bool is_first = !sequence.admitted_before;
  const std::int64_t of_scopes = sequence.reused_shared;
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
  if (is_first) {  // as if nobody had computed it
    const std::int64_t little = candidate.shared == 0 ? kPromptLeast - sequence.token_count() : 0;
    queue_.give(*sequence.line,
                sequence.reused_shared - of_scopes + std::max<std::int64_t>(0, little));
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
  return true;
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

// Lets the samples that wait for `leader` begin with it, at the logits of its prompt's last token.
void Scheduler::fork_samples(const Leader& leader, Nanoseconds now, StepPlan& plan,
                             StepReport& report) {
  for (Sequence* sample : leader.sequence->request->samples) {
    if (!may_fork(*sample)) {
      continue;
    }
    run(*sample, now, sample->prompt_count, 0, report);
    queue_.give(*sample->line, kDecodePrice);
    blocks_.share(*leader.sequence, *sample, sample->prompt_count, plan);
    chunks_.push_back(Chunk{sample, 0, leader.tokens});
    plan.append_logits(leader.token, sample->row);
  }
}

// A protected sequence may not need a block later, so it cannot begin with one to copy.
bool Scheduler::may_fork(const Sequence& sample) const {
  return sample.state == Sequence::State::kWaiting && !sample.paused &&
         sample.output_count() == 0 && !is_protected(sample) &&
         running() < settings_.sequences_max && room_for(sample.tenant) > kNone &&
         !queue_.is_before(sample, [this](TenantId tenant) { return may_run(tenant); });
}

// Blocks that a waiting sequence has to reserve if it begins with `shared_tokens` of another.
BlockCount Scheduler::blocks_to_admit(const Sequence& sequence, std::int64_t shared_tokens) const {
  std::int64_t tokens = sequence.token_count();
  if (is_protected(sequence)) {
    tokens = sequence.last_token() - 1;  // the last ends the sequence before it needs a slot
  }
  return blocks_for(tokens) - blocks_.full_blocks(shared_tokens);
}

}  // namespace kvledger
