// Who loses its blocks when another needs one, and why: the part of the scheduler that preempts.

#include <algorithm>
#include <array>
#include <limits>

#include "core/check.h"
#include "core/scheduler.h"

namespace kvledger {
namespace {

constexpr BlockCount kNone{0};
// A chance below which it is more likely than not that somebody ends.
constexpr double kEven = 0.5;
// How much more a tenant holds that is not to take blocks from another.
constexpr std::int64_t kFarMore = 2;

bool holds_far_less(const TenantLine& line, const TenantLine& needy) noexcept {
  return kFarMore * line.listed.value() < needy.listed.value();
}

double as_double(BlockCount blocks) noexcept {
  return static_cast<double>(blocks.value());
}

}  // namespace

// One of those collected. A tenant is chosen by prices as if nothing had been cached or shared,
// then one of its sequences by what is so.
std::size_t Scheduler::choose_victim() {
  if (!settings_.priced_victims) {
    return victims_.front();
  }
  const double wanted = wanted_blocks();
  double least = std::numeric_limits<double>::infinity();
  TenantId tenant = running_[victims_.front()]->tenant;
  for (const std::size_t at : victims_) {
    const double listed = price(*running_[at], kNone, wanted);
    if (listed < least) {
      least = listed;
      tenant = running_[at]->tenant;
    }
  }
  std::erase_if(victims_, [&](std::size_t at) { return running_[at]->tenant != tenant; });
  least = std::numeric_limits<double>::infinity();
  std::size_t victim = victims_.front();
  for (const std::size_t at : victims_) {
    const double real = price(*running_[at], staying_blocks(*running_[at]), wanted);
    if (real < least) {
      least = real;
      victim = at;
    }
  }
  return victim;
}

// Of those that the sequence at `index` may preempt, the ones that are to go first, whatever their
// price: who is paused, then who is behind it; of these rather who does not end soon, and then
// whose tenant holds at least half as much as its own.
void Scheduler::collect_victims(std::size_t index) {
  const Sequence& needy = *running_[index];
  if (settings_.priced_victims) {
    list_blocks();
  }
  victims_.clear();
  constexpr std::array<int, 3> kLast = {2, 2, 2};
  std::array<int, 3> best = kLast;
  for (std::size_t i = running_.size(); i-- > 0;) {
    const Sequence& other = *running_[i];
    if ((!other.paused && i <= index) || is_protected(other) || !would_help(other, needy)) {
      continue;
    }
    std::array<int, 3> kind = {0, 0, 0};
    if (!other.paused) {
      const bool is_priced = settings_.priced_victims;
      kind = {1, is_priced && ends_soon(other) ? 1 : 0,
              is_priced && holds_far_less(*other.line, *needy.line) ? 1 : 0};
    }
    if (kind < best) {
      best = kind;
      victims_.clear();
    }
    if (kind == best) {
      victims_.push_back(i);
    }
  }
}

// Whether a sequence that needs a block, and could take one of those collected, had better wait for
// those who were chosen before it in this step: as if nothing had been cached or shared.
bool Scheduler::should_wait(const Sequence& needy) const {
  const std::int64_t steps = settings_.wait_steps_max;
  if (needy.waited_steps >= steps || (!victims_.empty() && running_[victims_.front()]->paused)) {
    return false;
  }
  double nobody_ends = 1.0;
  for (const Chunk& chunk : chunks_) {
    if (would_help(*chunk.sequence, needy)) {
      nobody_ends *= chance_to_go_on(*chunk.sequence, steps);
    }
  }
  if (nobody_ends >= kEven) {
    return false;
  }
  std::int64_t again = victims_.empty() ? needy.computed : running_[victims_.front()]->computed;
  for (const std::size_t at : victims_) {
    again = std::min(again, running_[at]->computed);
  }
  return static_cast<double>(steps) * step_time_.cost_of(1, needy.computed) <
         step_time_.cost_of(again, 0);
}

// Whether a victim's blocks could be another's: not where that one is at its own tenant's limit,
// and not where the victim's tenant has only what it was guaranteed.
bool Scheduler::would_help(const Sequence& victim, const Sequence& other) const {
  const PoolShares& shares = cache_.shares();
  return victim.tenant == other.tenant ||
         (shares.left_to(other.tenant) > kNone && shares.is_beyond_guarantee(victim.tenant));
}

// Adds up what the tenants of those that run hold, as if nothing were shared.
void Scheduler::list_blocks() noexcept {
  for (const Sequence* running : running_) {
    running->line->listed = kNone;
  }
  for (const Sequence* running : running_) {
    running->line->listed += listed_blocks(*running);
  }
}

BlockCount Scheduler::listed_blocks(const Sequence& sequence) const {
  return tables_.length(sequence.row) + sequence.reservation.remaining();
}

// Blocks that others of its tenant hold too, so that they stay when it goes. They lie in front:
// sequences begin alike, or not at all. What shared scopes have in front of them is not looked at.
BlockCount Scheduler::staying_blocks(const Sequence& sequence) const {
  const std::int64_t first =
      std::min(sequence.own_from, static_cast<std::int64_t>(sequence.path.size()));
  std::int64_t staying = first;
  std::int64_t alone = tables_.length(sequence.row).value();
  while (staying < alone) {
    const std::int64_t middle = staying + (alone - staying) / 2;
    if (pool_.references(tables_.at(sequence.row, middle)) > 1) {
      staying = middle + 1;
    } else {
      alone = middle;
    }
  }
  return BlockCount{std::max<std::int64_t>(0, staying - first)};
}

// The chance that a sequence makes so many tokens more without coming to its end.
double Scheduler::chance_to_go_on(const Sequence& sequence, std::int64_t tokens) const {
  if (sequence.last_token() - sequence.token_count() <= tokens) {
    return 0.0;
  }
  const OutputLengths& lengths = sequence.line->lengths;
  const std::int64_t next = sequence.output_count() + 1;
  const double here = lengths.reaching(next);
  return here > 0.0 ? lengths.reaching(next + tokens) / here : 0.0;
}

bool Scheduler::ends_soon(const Sequence& sequence) const {
  return sequence.activity == Sequence::Activity::kDecode &&
         chance_to_go_on(sequence, slots_per_block_) < kEven;
}

// Blocks that those who decode are expected to take while each makes a block's worth of tokens,
// less those that come back meanwhile, and at least the one that is needed now.
double Scheduler::wanted_blocks() const {
  double wanted = 0.0;
  for (const Sequence* running : running_) {
    if (running->paused || running->activity != Sequence::Activity::kDecode) {
      continue;
    }
    const double goes_on = chance_to_go_on(*running, slots_per_block_);
    wanted += is_protected(*running) ? 0.0 : goes_on;
    wanted -= (1.0 - goes_on) * as_double(listed_blocks(*running));
  }
  return std::max(1.0, wanted);
}

// What a block that a victim gives back costs, if so many of its blocks stay with others.
double Scheduler::price(const Sequence& victim, BlockCount staying, double wanted) const {
  const double back = as_double(listed_blocks(victim) - staying);
  if (back <= 0.0) {
    return std::numeric_limits<double>::infinity();
  }
  const std::int64_t kept = std::min(victim.computed, staying.value() * slots_per_block_);
  return step_time_.cost_of(victim.computed - kept, kept) / std::min(back, wanted);
}

void Scheduler::preempt(Sequence& victim, const Sequence& needy, Nanoseconds now,
                        StepReport& report) {
  KVL_CHECK(!victim.in_step);
  KVL_CHECK(!is_protected(victim));
  report.preemptions.push_back(Preemption{victim.id.value(), victim.computed});
  books_.preempted(note_reason(victim, needy));
  leave_running(victim);
  victim.computed = 0;
  ++victim.preemptions;
  victim.spend(now, Sequence::Activity::kQueued);
  join_queue(victim);
  arrange(*victim.request);
}

// Before the victim's blocks are back: who is at its own tenant's limit steps back for that one's.
StepBooks::Preempted Scheduler::note_reason(Sequence& victim, const Sequence& needy) {
  PreemptionReasons& reasons = victim.preempted_for;
  if (&victim == &needy) {
    const PoolShares& shares = cache_.shares();
    const bool at_limit = shares.limits(victim.tenant) && shares.left_to(victim.tenant) <= kNone;
    ++(at_limit ? reasons.own : reasons.itself);
    return StepBooks::kForItself;
  }
  if (victim.paused) {
    ++reasons.paused;
    return StepBooks::kPaused;
  }
  ++(victim.tenant == needy.tenant ? reasons.own : reasons.others);
  return StepBooks::kForAnother;
}

}  // namespace kvledger
