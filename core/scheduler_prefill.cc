// How many prompt tokens a step takes, and whose: the part of the scheduler that divides it.

#include <algorithm>

#include "core/check.h"
#include "core/scheduler.h"

namespace kvledger {

void Scheduler::note_tenants(Nanoseconds now) noexcept {
  const auto note = [&](const TenantLine* line) {
    if (line->tenant() >= kServerTenants) {
      return;  // it is done before anybody else comes
    }
    if (line != last_line_ && last_line_ != nullptr) {
      others_until_ = now + kOthersStay;
    }
    last_line_ = line;
  };
  for (const Chunk& chunk : chunks_) {
    note(chunk.sequence->line);
  }
  for (const Candidate& candidate : candidates_) {
    note(candidate.sequence->line);
  }
}

// Prompt tokens for which the step has time, at most `budget`.
std::int64_t Scheduler::prefill_room(std::int64_t budget, Nanoseconds now) const {
  if (candidates_.empty()) {
    return budget;
  }
  const Nanoseconds longest = decode_limit();
  const bool limited = longest > 0 || settings_.step_stretch > 0;
  if (limited && decode_chunks_ > 0 && (longest > 0 || decodes_are_protected())) {
    return decode_room(budget, longest);
  }
  if (settings_.prefill_time_max == 0 || now >= others_until_) {
    return budget;
  }
  const std::int64_t fits =
      step_time_.prefill_within(settings_.prefill_time_max, computed_by_first(), budget);
  return std::min(budget, std::max(fits, kChunkLeast));
}

// The shortest of the limits in time of those who decode; 0 is none.
Nanoseconds Scheduler::decode_limit() const noexcept {
  Nanoseconds shortest = 0;
  for (const Chunk& chunk : chunks_) {
    const Nanoseconds own = chunk.sequence->step_time_max;
    const Nanoseconds limit = own > 0 ? own : settings_.step_time_max;
    shortest = limit > 0 && (shortest == 0 || limit < shortest) ? limit : shortest;
  }
  return shortest;
}

// Whether somebody decodes whom the tenant that comes next may not hold up: all do but the
// sequences of tenants that were given more and still have more to compute themselves.
bool Scheduler::decodes_are_protected() const {
  std::int64_t least = candidates_.front().sequence->line->service();
  for (const Candidate& candidate : candidates_) {
    least = std::min(least, candidate.sequence->line->service());
  }
  return std::any_of(chunks_.begin(), chunks_.end(), [&](const Chunk& chunk) {
    const TenantLine& line = *chunk.sequence->line;
    const bool has_more = line.oldest != nullptr || (line.waits() && may_run(line.tenant()));
    return line.service() <= least || !has_more;
  });
}

// Prompt tokens beside which those who decode wait no longer than the limit says. Now and then
// none: what is left for them is told by how long decoding alone takes, and that has to be known.
std::int64_t Scheduler::decode_room(std::int64_t budget, Nanoseconds longest) const {
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
  if (settings_.step_stretch > 0) {
    const Nanoseconds stretched = decode / 1000 * settings_.step_stretch;
    longest = longest > 0 ? std::min(longest, stretched) : stretched;
  }
  const std::int64_t fits =
      step_time_.prefill_within(longest - decode, computed_by_first(), budget);
  return std::min(budget, std::max(fits, settings_.prefill_least));
}

// The most tokens that a prompt of the tenant whose turn it is has behind it: what others have
// there must not make its chunks smaller.
std::int64_t Scheduler::computed_by_first() const {
  const TenantLine* first = nullptr;
  std::int64_t computed = 0;
  for (const Candidate& candidate : candidates_) {
    const TenantLine* line = candidate.sequence->line;
    if (first == nullptr || line->service() < first->service()) {
      first = line;
      computed = 0;
    }
    if (line->service() == first->service()) {
      computed = std::max(computed, candidate.computed());
    }
  }
  return computed;
}

// The tenant that was given least comes first, and others fill up a step that would be too small.
void Scheduler::share_prefill_budget(std::int64_t budget) {
  if (candidates_.empty() || budget <= 0) {
    return;
  }
  // Who waits for a block comes after the others of its tenant: by then it is known whether the
  // block is computed to its end, for whom it waits for comes before.
  std::sort(candidates_.begin(), candidates_.end(), [](const auto& a, const auto& b) {
    const TenantLine& left = *a.sequence->line;
    const TenantLine& right = *b.sequence->line;
    if (&left != &right) {
      return left.service() != right.service() ? left.service() < right.service()
                                               : ByRank{}(left.oldest, right.oldest);
    }
    if ((a.waits_for != nullptr) != (b.waits_for != nullptr)) {
      return b.waits_for != nullptr;
    }
    return ByRank{}(a.sequence, b.sequence);
  });
  std::int64_t used = 0;
  for (auto begin = candidates_.begin(); begin != candidates_.end();) {
    const auto end = std::find_if(begin, candidates_.end(), [&](const Candidate& other) {
      return other.sequence->line != begin->sequence->line;
    });
    const auto waiters = std::find_if(
        begin, end, [](const Candidate& candidate) { return candidate.waits_for != nullptr; });
    const std::int64_t left = used == 0 ? budget : fill_of({begin, end}, budget) - used;
    if (left <= 0) {
      break;
    }
    std::int64_t given = 0;
    if (begin != waiters) {
      given = share_among({begin, waiters}, left);
    }
    if (left > given && waiters != end) {
      given += give_waiters({waiters, end}, left - given);
    }
    used += given;
    if (given == left) {
      break;  // whoever comes later has no turn before it
    }
    begin = end;
  }
}

// Up to how many prompt tokens a step is filled with those of tenants whose turn it is not: as far
// as it has to be to be worth its fixed cost, and where they have much behind them only for as long
// as that takes.
std::int64_t Scheduler::fill_of(Candidates one_tenants, std::int64_t budget) const {
  const std::int64_t worth = std::min(budget, std::max(kChunkLeast, step_time_.worthwhile(budget)));
  std::int64_t computed = 0;
  for (const Candidate& candidate : one_tenants) {
    computed = std::max(computed, candidate.computed());
  }
  return std::max<std::int64_t>(1, step_time_.prefill_like(worth, computed));
}

// Half of the budget for the oldest, then the shortest first, what is left to the oldest again; how
// much was given.
std::int64_t Scheduler::share_among(Candidates one_tenants, std::int64_t budget) {
  const std::int64_t all = budget;
  Candidate& first = one_tenants.front();
  first.tokens = std::min(first.pending(), std::max<std::int64_t>(1, budget / 2));
  budget -= first.tokens;
  const Candidates others = one_tenants.subspan(1);
  std::sort(others.begin(), others.end(), &Scheduler::is_shorter);
  for (Candidate& other : others) {
    other.tokens = std::min(other.pending(), budget);
    budget -= other.tokens;
  }
  const std::int64_t more = std::min(first.pending() - first.tokens, budget);
  first.tokens += more;
  return all - budget + more;
}

// By what there would be to compute if nothing had been cached.
bool Scheduler::is_shorter(const Candidate& a, const Candidate& b) noexcept {
  const std::int64_t left = a.listed();
  const std::int64_t right = b.listed();
  return left != right ? left < right : ByRank{}(a.sequence, b.sequence);
}

// Those go on, the shortest first, whose block nobody completes in this step.
std::int64_t Scheduler::give_waiters(Candidates one_tenants, std::int64_t budget) {
  std::sort(one_tenants.begin(), one_tenants.end(), &Scheduler::is_shorter);
  std::int64_t given = 0;
  for (Candidate& waiter : one_tenants) {
    if (!completes_next_block(*waiter.waits_for)) {
      waiter.tokens = std::min(waiter.pending(), budget - given);
      given += waiter.tokens;
    }
  }
  return given;
}

// Whether a candidate's share of the budget reaches the end of the block that it is in.
bool Scheduler::completes_next_block(const Sequence& sequence) const noexcept {
  const auto found =
      std::find_if(candidates_.begin(), candidates_.end(),
                   [&](const Candidate& candidate) { return candidate.sequence == &sequence; });
  return found->computed() % slots_per_block_ + found->tokens >= slots_per_block_;
}

}  // namespace kvledger
