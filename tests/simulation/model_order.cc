// Whose turn it is: the rules of the queue, of the step's room for prompts and of who shares it.

#include <algorithm>
#include <limits>
#include <set>

#include "core/fair_queue.h"
#include "tests/simulation/model.h"
#include "tests/simulation/random.h"

namespace kvledger::simulation {

using Phase = Modelled::Phase;

namespace {

bool waits(const Modelled& sequence) {
  return !sequence.running() && !sequence.paused && !sequence.held_back;
}

}  // namespace

// Who waits begins no more than the credit behind the others. It may be asked again and again: a
// tenant that waits all the time is never that far behind.
void Model::lift(bool of_plan) {
  for (const auto& [id, sequence] : live_) {
    // In a plan also who goes on with a prompt: it may have been paused meanwhile.
    const bool goes_on = of_plan && sequence.phase == Phase::kPrefill && !sequence.paused;
    if (waits(sequence) || goes_on) {
      std::int64_t& service = service_[sequence.arrival.tenant.value()];
      service = std::max(service, service_time_ - settings_.scheduler.token_budget);
    }
  }
}

// What the plan gives to whom, once for every token, however often it is computed.
void Model::count_service() {
  std::map<std::uint32_t, std::int64_t> given;
  std::vector<std::int64_t> of_waiting;
  for (const auto& [id, sequence] : live_) {
    const std::uint32_t tenant = sequence.arrival.tenant.value();
    const bool computes_prompt =
        sequence.phase == Phase::kPrefill && !sequence.paused && !sequence.forked;
    if (computes_prompt || waits(sequence)) {
      of_waiting.push_back(service_[tenant]);
    }
    if (sequence.forked) {
      given[tenant] += kDecodePrice;
    } else if (sequence.admitted && sequence.is_new && sequence.begins_with == 0) {
      given[tenant] += std::max<std::int64_t>(0, kPromptLeast - sequence.token_count());
    }
    for (std::int64_t i = 0; i < sequence.planned; ++i) {
      if (sequence.computed + i >= sequence.computed_peak) {
        given[tenant] += sequence.phase == Phase::kDecode ? kDecodePrice : 1;
      }
    }
  }
  std::int64_t reached = 0;
  for (const auto& [tenant, service] : given) {
    service_[tenant] += service;
    reached = std::max(reached, service_[tenant]);
  }
  if (!of_waiting.empty()) {
    reached = *std::min_element(of_waiting.begin(), of_waiting.end());
  }
  service_time_ = std::max(service_time_, reached);
}

// All who waited when the plan began, in order: each counts as given to its tenant.
std::vector<Modelled*> Model::queue() {
  std::vector<Modelled*> left;
  for (auto& [id, sequence] : live_) {
    if ((sequence.admitted && !sequence.forked) || waits(sequence)) {
      left.push_back(&sequence);
    }
  }
  std::vector<Modelled*> queue;
  std::map<std::uint32_t, std::int64_t> service = service_;
  while (!left.empty()) {
    const auto next = std::min_element(left.begin(), left.end(), [&](const auto* a, const auto* b) {
      const std::uint32_t first = a->arrival.tenant.value();
      const std::uint32_t second = b->arrival.tenant.value();
      return first == second || service[first] == service[second]
                 ? before(*a, *b)
                 : service[first] < service[second];
    });
    service[(*next)->arrival.tenant.value()] += (*next)->token_count();
    queue.push_back(*next);
    left.erase(next);
  }
  return queue;
}

// Whether prompts of several tenants could be computed.
bool Model::has_several_tenants(std::span<Modelled* const> queue) const {
  std::set<std::uint32_t> tenants;
  for (const Modelled* sequence : queue) {
    tenants.insert(sequence->arrival.tenant.value());
  }
  for (const auto& [id, sequence] : live_) {
    if (sequence.phase == Phase::kPrefill && !sequence.paused && !sequence.forked) {
      tenants.insert(sequence.arrival.tenant.value());
    }
  }
  return tenants.size() > 1;
}

// Who was let in, and whom they passed.
void Model::check_order(const StepPlanView& plan, const StepReport& report) {
  const auto admitted = static_cast<std::int64_t>(report.admissions.size());
  const std::int64_t ran = running() - admitted;  // samples that begin with another come last
  expect(admitted == 0 || free_blocks() >= running() - 1, "an admission took the room to grow");
  std::int64_t room = free_blocks() - ran;
  for (const auto& [id, sequence] : live_) {
    room += sequence.admitted && !sequence.forked ? sequence.taken_at_once : 0;
  }
  const std::vector<Modelled*> queue = this->queue();
  // Where several tenants have prompts, a step is one tenant's, and filled up as far as it is
  // worth.
  const std::int64_t room_for_all = plan.header.prefill_room;
  const std::int64_t most =
      has_several_tenants(queue) ? std::min<std::int64_t>(1, room_for_all) : room_for_all;
  if (plan.header.tokens - plan.header.decode_tokens < most) {
    check_all_who_fit(queue, room, settings_.scheduler.sequences_max - ran);
  }
  std::int64_t let_in_behind = 0;
  for (auto place = queue.rbegin(); place != queue.rend(); ++place) {
    Modelled& sequence = **place;
    let_in_behind += sequence.running() ? 1 : 0;
    sequence.passed = sequence.running() ? 0 : sequence.passed + let_in_behind;
    counts_.passes_max = std::max(counts_.passes_max, sequence.passed);
    expect(sequence.passed <= settings_.scheduler.overtakes_max, "passed too often");
  }
}

// With budget to spare, exactly those of the first in the queue run who fit and may pass the rest.
void Model::check_all_who_fit(std::span<Modelled* const> queue, std::int64_t room,
                              std::int64_t rows) {
  MemoryForecast forecast(settings_.slots_per_block);
  const Foreseen others = foresee(forecast);
  std::int64_t going_on = others.going_on;
  // What those that run hold is theirs to give back; `room` is without the block that each has
  // left.
  const double memory = others.held + static_cast<double>(room + others.running);
  std::int64_t looked_at = 0;
  std::int64_t passes = kLookahead;
  for (const Modelled* sequence : queue) {
    const bool is_looked_at = rows > 0 && passes > 0 && looked_at < kLookahead;
    const std::int64_t blocks = blocks_to_admit(*sequence, shareable(*sequence));
    MemoryMember member = member_of(*sequence);
    member.held = static_cast<double>(blocks);
    const bool lasts = !settings_.scheduler.forecast || going_on == 0 ||
                       forecast.peak_with(member, governor_.deviations()) <= memory;
    const bool fits = is_looked_at && blocks <= room && lasts;
    counts_.held_for_memory += is_looked_at && blocks <= room && !lasts ? 1 : 0;
    expect(fits || !sequence->running(), "a sequence was let in that had to wait");
    expect(!fits || sequence->running(), "a sequence has to wait although it fits");
    if (!is_looked_at) {
      passes = 0;  // nor is anybody behind
      continue;
    }
    ++looked_at;
    if (fits) {
      room -= blocks + 1;
      forecast.add(member);
      ++going_on;
      --rows;
      --passes;
    }
    passes = std::min(passes, settings_.scheduler.overtakes_max - sequence->passed);
  }
}

// Whether a tenant has a prompt that could be computed, or had one before this plan.
bool Model::has_backlog(TenantId tenant) const {
  return std::any_of(live_.begin(), live_.end(), [&](const auto& entry) {
    const Modelled& sequence = entry.second;
    const bool waited = (sequence.admitted || !sequence.running()) && !sequence.held_back;
    return sequence.arrival.tenant == tenant && !sequence.paused &&
           (waited || (sequence.phase == Phase::kPrefill && !sequence.forked));
  });
}

// A limit on the step's time may take from what decoding leaves of the token budget, but not all.
void Model::check_prefill_room(const StepPlanView& plan) const {
  const SchedulerSettings& limits = settings_.scheduler;
  const std::int64_t left = limits.token_budget - plan.header.decode_tokens;
  const std::int64_t room = plan.header.prefill_room;
  expect(room <= left, "more room for prompts than the token budget leaves");
  std::int64_t least = std::numeric_limits<std::int64_t>::max();  // service of who may be computed
  bool is_certain = true;
  for (const auto& [id, sequence] : live_) {
    if (!sequence.running() && !sequence.paused && !sequence.held_back) {
      is_certain = false;  // it may have been one of those who share the room, or not
    } else if (sequence.phase == Phase::kPrefill && !sequence.paused && !sequence.forked) {
      least = std::min(least, service_.at(sequence.arrival.tenant.value()));
    }
  }
  const auto decodes = [](const Modelled& sequence) {
    return sequence.phase == Phase::kDecode && sequence.planned > 0 && !sequence.forked;
  };
  const bool has_target = std::any_of(live_.begin(), live_.end(), [&](const auto& entry) {
    return decodes(entry.second) &&
           (limits.step_time_max > 0 || entry.second.arrival.step_time_max > 0);
  });
  const bool is_limited = has_target || limits.step_stretch > 0;
  const bool is_protected = std::any_of(live_.begin(), live_.end(), [&](const auto& entry) {
    const Modelled& sequence = entry.second;
    return decodes(sequence) &&
           (has_target || service_.at(sequence.arrival.tenant.value()) <= least ||
            !has_backlog(sequence.arrival.tenant));
  });
  const bool is_empty = is_certain && least == std::numeric_limits<std::int64_t>::max();
  if (is_empty) {
    expect_equal("room of a step without prompts", room, left);
    return;
  }
  const bool may_be_for_decode =
      is_limited && (is_protected || !is_certain) && plan.header.decode_tokens > 0;
  if (!may_be_for_decode) {
    expect(limits.prefill_time_max > 0 || room == left, "room was left out although it is free");
    expect(room >= std::min(left, Scheduler::kChunkLeast), "a step is too small to be worth it");
    return;
  }
  if (since_decode_ >= kDecodeNews && is_certain && is_protected) {
    expect_equal("prompt tokens before decoding alone is known", step_prefills_, 0);
    expect_equal("room for prompts before decoding alone is known", room, 0);
    return;
  }
  expect(since_decode_ >= kDecodeNews || room >= std::min(left, limits.prefill_least),
         "prompts may not starve, however short a step has to be");
}

// `budget` is what the step had for prompts: all of it is the tenant's that was given least, and
// others fill a small step up.
void Model::check_prefill_shares(std::int64_t budget) const {
  std::vector<const Modelled*> prompts;
  for (const auto& [id, sequence] : live_) {
    if (sequence.phase == Phase::kPrefill && !sequence.paused && !sequence.forked) {
      prompts.push_back(&sequence);
    }
  }
  std::sort(prompts.begin(), prompts.end(),
            [](const auto* a, const auto* b) { return before(*a, *b); });
  std::vector<std::vector<const Modelled*>> tenants;  // each in order, by who comes first
  for (const Modelled* prompt : prompts) {
    const auto found = std::find_if(tenants.begin(), tenants.end(), [&](const auto& tenant) {
      return tenant.front()->arrival.tenant == prompt->arrival.tenant;
    });
    (found == tenants.end() ? tenants.emplace_back() : *found).push_back(prompt);
  }
  std::stable_sort(tenants.begin(), tenants.end(), [&](const auto& a, const auto& b) {
    return service_.at(a.front()->arrival.tenant.value()) <
           service_.at(b.front()->arrival.tenant.value());
  });
  std::int64_t used = 0;
  std::int64_t unserved = std::numeric_limits<std::int64_t>::max();  // who has not had all
  for (const auto& tenant : tenants) {
    std::int64_t planned = 0;
    bool is_done = true;
    for (const Modelled* prompt : tenant) {
      planned += prompt->planned;
      is_done = is_done && prompt->planned == prompt->pending();
    }
    // How far others fill a step up is learnt: whoever is first has had what it wants of it.
    // Between equals one that could not be admitted may decide.
    const std::int64_t service = service_.at(tenant.front()->arrival.tenant.value());
    expect(planned == 0 || service <= unserved, "a tenant went before its turn");
    used += check_shares_of(tenant,
                            used == 0 && planned > 0 ? budget : std::min(planned, budget - used));
    unserved = is_done ? unserved : std::min(unserved, service);
  }
}

// Half for the oldest, then the shortest first; how much it was.
std::int64_t Model::check_shares_of(std::span<const Modelled* const> one_tenants,
                                    std::int64_t budget) const {
  std::int64_t planned = 0;
  for (const Modelled* prompt : one_tenants) {
    planned += prompt->planned;
  }
  expect(planned <= budget, "a tenant got more than its turn");
  if (budget == 0) {
    return 0;
  }
  const Modelled& oldest = *one_tenants.front();
  expect(oldest.planned >= std::min(oldest.pending(), std::max<std::int64_t>(1, budget / 2)),
         "the oldest prompt got less than half");
  for (const Modelled* prompt : one_tenants) {
    expect(prompt->planned == prompt->pending() || planned == budget,
           "budget is left over while a prompt waits for it");
    for (const Modelled* longer : one_tenants) {
      expect(prompt == &oldest || longer == &oldest || longer->pending() <= prompt->pending() ||
                 prompt->planned == prompt->pending() || longer->planned == 0,
             "a longer prompt went before a shorter one");
    }
  }
  return planned;
}

}  // namespace kvledger::simulation
