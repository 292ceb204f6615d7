// Whether memory lasts: the part of the scheduler that looks ahead.

#include <algorithm>

#include "core/check.h"
#include "core/scheduler.h"

namespace kvledger {
namespace {

constexpr BlockCount kNone{0};

double as_double(BlockCount blocks) noexcept {
  return static_cast<double>(blocks.value());
}

}  // namespace

// What is known of a sequence that runs or is to run, without what it holds. Samples that are held
// back begin with the one that computes their prompt, so it grows for them too.
MemoryMember Scheduler::member_of(const Sequence& sequence) const {
  MemoryMember member;
  const std::int64_t last = sequence.last_token();
  member.lengths = &sequence.line->lengths;
  member.made = sequence.output_count();
  member.more_max = last - sequence.token_count();
  if (!is_protected(sequence)) {
    const BlockCount growth = blocks_for(last - 1) - blocks_for(sequence.token_count());
    member.growth_max = std::max(kNone, growth).value();
  }
  for (const Sequence* sample : sequence.request->samples) {
    member.copies += sample->held_back && !sample->paused ? 1 : 0;
  }
  // Each writes into the block in which the prompt ends, the last one into the block itself.
  member.copied = sequence.prompt_count % slots_per_block_ > 0 ? member.copies - 1 : 0;
  return member;
}

// What it alone has comes back when it ends. What it shares with others is theirs as well, and
// counts as what stays; samples of a request count as having equal parts of what is the request's.
MemoryMember Scheduler::member_of_running(const Sequence& running) const {
  MemoryMember member = member_of(running);
  BlockCount held = cache_.held_alone(running.account);
  std::int64_t sharing = 0;
  for (const Sequence* sample : running.request->samples) {
    if (sample->state == Sequence::State::kRunning) {
      held += sample->reservation.remaining();
      ++sharing;
    }
  }
  member.held = as_double(held) / static_cast<double>(sharing);
  // Where its limit was lowered it ends with its next token, and until then it is there.
  member.more_max = std::max<std::int64_t>(1, member.more_max);
  if (running.paused) {
    member.lengths = nullptr;  // nobody knows when it goes on
  }
  return member;
}

MemoryMember Scheduler::member_of_waiting(const Candidate& waiting) const {
  MemoryMember member = member_of(*waiting.sequence);
  member.held = as_double(waiting.needed);
  return member;
}

// Whether a tenant's sequences grow into what a forecast is about: those of its tenant alone, or
// all that do not live in a guarantee.
bool Scheduler::is_in(const Forecast& forecast, TenantId tenant) const noexcept {
  const PoolShares& shares = cache_.shares();
  return forecast.tenant
             ? *forecast.tenant == tenant
             : shares.of(tenant).guaranteed == kNone || shares.is_beyond_guarantee(tenant);
}

void Scheduler::foresee(Forecast& forecast) {
  forecast.memory.clear();
  forecast.is_made = true;
  forecast.held = 0.0;
  forecast.going_on = 0;
  for (const Sequence* running : running_) {
    if (is_in(forecast, running->tenant)) {
      const MemoryMember member = member_of_running(*running);
      // Who is paused gives its blocks to whoever needs them: it holds them, and is no reason to
      // let fewer in.
      if (!running->paused || is_protected(*running)) {
        forecast.memory.add(member);
      }
      forecast.held += member.held;
      forecast.going_on += running->paused ? 0 : 1;
    }
  }
  for (const Candidate& chosen : candidates_) {
    if (chosen.sequence->state == Sequence::State::kWaiting &&
        is_in(forecast, chosen.sequence->tenant)) {
      forecast.memory.add(member_of_waiting(chosen));
      ++forecast.going_on;
    }
  }
}

// A waiting sequence is going to be admitted.
void Scheduler::choose(const Candidate& waiting) {
  for (Forecast* forecast : {&pool_forecast_, &share_forecast_}) {
    if (forecast->is_made && is_in(*forecast, waiting.sequence->tenant)) {
      forecast->memory.add(member_of_waiting(waiting));
      ++forecast->going_on;
    }
  }
  candidates_.push_back(waiting);
}

// Whether `room` blocks and what the others give back are expected to be enough with another. If
// nobody goes on they are: whoever is next fits alone, and nothing else would ever change.
bool Scheduler::lasts(Forecast& forecast, const Candidate& next, BlockCount room,
                      double deviations) {
  if (!forecast.is_made) {
    foresee(forecast);
  }
  return forecast.going_on == 0 || forecast.memory.peak_with(member_of_waiting(next), deviations) <=
                                       forecast.held + as_double(room);
}

// Who lives in its guarantee looks at its own sequences alone (lasts_in_share).
bool Scheduler::lasts_in_pool(const Candidate& next) {
  const TenantId tenant = next.sequence->tenant;
  const BlockCount guaranteed = cache_.shares().of(tenant).guaranteed;
  const bool stays_in_it =
      guaranteed > kNone && cache_.live(tenant) + promised_to(tenant) + next.needed <= guaranteed;
  return !settings_.forecast || stays_in_it ||
         lasts(pool_forecast_, next, cache_.unkept(tenant), governor_.deviations());
}

// Within a tenant's limit, or its guarantee and what it can have beside it. How careful that is
// does not depend on what others had to compute again: it would tell them.
bool Scheduler::lasts_in_share(const Candidate& next) {
  const PoolShares& shares = cache_.shares();
  const TenantId tenant = next.sequence->tenant;
  if (!settings_.forecast || (!shares.limits(tenant) && shares.of(tenant).guaranteed == kNone)) {
    return true;
  }
  if (share_forecast_.tenant != tenant) {
    share_forecast_.tenant = tenant;
    share_forecast_.is_made = false;
  }
  const BlockCount room =
      shares.of(tenant).guaranteed > kNone ? cache_.available(tenant) : shares.left_to(tenant);
  return lasts(share_forecast_, next, room, RecomputeGovernor::kCalm);
}

// What ended for reasons of its own says how long outputs get, what was cut says how long they may.
void Scheduler::learn_length(const Sequence& ended) {
  const std::int64_t tokens = ended.output_count();
  if (tokens == 0 || ended.end_reason == EndReason::kFailed) {
    return;
  }
  for (OutputLengths* lengths : {&ended.line->lengths, &queue_.lengths()}) {
    if (ended.end_reason == EndReason::kStop) {
      lengths->note_end(tokens);
    } else {
      lengths->note_cut(tokens);
    }
  }
}

}  // namespace kvledger
