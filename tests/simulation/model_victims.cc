// Who loses blocks in a plan: decode tokens are chosen once more, by rank and block by block, and
// wherever none is free the engine's victim is held against everybody else who could have been it.

#include <algorithm>
#include <limits>

#include "tests/simulation/model.h"
#include "tests/simulation/random.h"

namespace kvledger::simulation {

using Phase = Modelled::Phase;

namespace {

// Prices are the same arithmetic in another order.
constexpr double kRounding = 1e-9;

std::int64_t tables_of(std::int32_t block, const auto& standings) {
  return std::count_if(standings.begin(), standings.end(), [block](const auto& one) {
    return std::find(one.blocks.begin(), one.blocks.end(), block) != one.blocks.end();
  });
}

bool decodes(const Modelled& sequence) {
  return sequence.phase == Phase::kDecode && !sequence.paused;
}

}  // namespace

Model::Standings Model::standings() {
  Standings all;
  for (auto& [id, sequence] : live_) {
    if (sequence.running()) {
      all.push_back(Standing{&sequence, sequence.blocks, sequence.promised});
    }
  }
  std::sort(all.begin(), all.end(),
            [](const auto& a, const auto& b) { return before(*a.sequence, *b.sequence); });
  return all;
}

// Whether a running sequence that could decode is left out of the plan, and stays.
bool Model::sits_out(const Modelled& sequence, const StepPlanView& plan,
                     const StepReport& report) const {
  return std::find(plan.rows.begin(), plan.rows.end(), sequence.row) == plan.rows.end() &&
         std::none_of(report.preemptions.begin(), report.preemptions.end(),
                      [&](const Preemption& gone) { return gone.sequence == sequence.id; });
}

void Model::foretell_decodes(const StepPlanView& plan, const StepReport& report) {
  Standings all = standings();
  std::vector<const Modelled*> going_on;
  std::int64_t free = free_blocks();
  std::int64_t chosen = 0;
  std::size_t told = 0;
  for (std::size_t i = 0; i < all.size();) {
    Modelled& sequence = *all[i].sequence;
    if (!decodes(sequence)) {
      ++i;
      continue;
    }
    const auto behind = std::count_if(all.begin() + static_cast<std::ptrdiff_t>(i) + 1, all.end(),
                                      [](const auto& other) { return !other.sequence->paused; });
    const std::int64_t tokens =
        std::min(sequence.pending(), settings_.scheduler.token_budget - chosen - behind);
    bool stays = true;
    bool waits = false;
    bool may_wait = true;
    while (stays && missing(all, all[i], tokens) > 0) {
      if (all[i].promised == 0 && free == 0) {
        waits = may_wait && should_wait(all, i, going_on);
        if (waits) {
          expect(sits_out(sequence, plan, report), "a sequence did not wait for who ends soon");
          break;
        }
        may_wait = false;
        expect(told < report.preemptions.size(), "somebody has to give blocks and does not");
        Modelled& victim = find(report.preemptions[told++].sequence);
        check_victim(all, i, victim);
        const auto place = std::find_if(all.begin(), all.end(),
                                        [&](const auto& one) { return one.sequence == &victim; });
        const Standing gone = *place;
        const auto at = static_cast<std::size_t>(place - all.begin());
        all.erase(place);
        free += gone.promised +
                std::count_if(gone.blocks.begin(), gone.blocks.end(),
                              [&](std::int32_t block) { return tables_of(block, all) == 0; });
        stays = at != i;
        i -= at < i ? 1 : 0;
        continue;
      }
      may_wait = false;
      --(all[i].promised > 0 ? all[i].promised : free);
      take_block(all, all[i]);
    }
    sequence.sat_out = waits ? sequence.sat_out + 1 : 0;
    if (stays && !waits) {
      chosen += tokens;
      going_on.push_back(&sequence);
    }
    counts_.sat_out += waits ? 1 : 0;
    i += stays ? 1 : 0;
  }
  expect_equal("preemptions", report.preemptions.size(), told);
}

// Whether those who go on give blocks back soon, by the chances of each, and waiting is cheaper
// than to compute anybody again who could go.
bool Model::should_wait(const Standings& all, std::size_t needy,
                        std::span<const Modelled* const> chosen) {
  const Modelled& in_need = *all[needy].sequence;
  const std::int64_t steps = settings_.scheduler.wait_steps_max;
  double nobody_ends = 1.0;
  for (const Modelled* other : chosen) {
    nobody_ends *= chance_to_go_on(*other, steps);
  }
  std::array<int, 3> best = {2, 2, 2};
  std::int64_t again = in_need.computed;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Modelled& other = *all[i].sequence;
    if (is_protected(other) || (i <= needy && !other.paused)) {
      continue;
    }
    const auto kind = kind_of(all, all[i], all[needy]);
    again = kind < best ? other.computed : kind == best ? std::min(again, other.computed) : again;
    best = std::min(best, kind);
  }
  const bool is_paused_first = best[0] == 0;
  return in_need.sat_out < steps && nobody_ends < 0.5 && !is_paused_first &&
         static_cast<double>(steps) * step_time_.cost_of(1, in_need.computed) <
             step_time_.cost_of(again, 0);
}

std::int64_t Model::missing(const Standings& all, const Standing& one, std::int64_t tokens) const {
  const Modelled& sequence = *one.sequence;
  const auto held = static_cast<std::int64_t>(one.blocks.size());
  const std::int64_t index = sequence.computed / settings_.slots_per_block;
  const bool is_shared =
      index < held && tables_of(one.blocks[static_cast<std::size_t>(index)], all) > 1;
  return blocks_for(sequence.computed + tokens) - held + (is_shared ? 1 : 0);
}

// A new block, in place of a shared one that is to be written or behind the others.
void Model::take_block(const Standings& all, Standing& one) const {
  std::int32_t fresh = -1;
  for (const Standing& other : all) {
    for (const std::int32_t block : other.blocks) {
      fresh = std::min(fresh, block - 1);
    }
  }
  const auto index = static_cast<std::size_t>(one.sequence->computed / settings_.slots_per_block);
  if (index < one.blocks.size() && tables_of(one.blocks[index], all) > 1) {
    one.blocks[index] = fresh;
  } else {
    one.blocks.push_back(fresh);
  }
}

// Whether nobody else should have gone first; says in the victim's receipt for what it did.
void Model::check_victim(const Standings& all, std::size_t needy, const Modelled& victim) {
  const Modelled& in_need = *all[needy].sequence;
  Receipt& receipt = live_.at(victim.id).receipt;
  const auto may_be = [&](std::size_t i) {
    return !is_protected(*all[i].sequence) && (i > needy || all[i].sequence->paused);
  };
  std::size_t chosen = all.size();
  bool is_anybody = false;
  for (std::size_t i = 0; i < all.size(); ++i) {
    chosen = all[i].sequence == &victim ? i : chosen;
    is_anybody = is_anybody || may_be(i);
  }
  expect(chosen < all.size(), "a victim that does not run any more");
  if (chosen == needy) {
    expect(!is_anybody, "a sequence stepped back although others were behind it");
    ++receipt.preempted_itself;
    return;
  }
  expect(may_be(chosen), "a sequence was preempted that is no victim");
  ++(victim.paused                                     ? receipt.preempted_paused
     : victim.arrival.tenant == in_need.arrival.tenant ? receipt.preempted_own
                                                       : receipt.preempted_others);
  const double wanted = wanted_blocks(all);
  const auto kept = [&](const Standing& one) {
    return std::count_if(one.blocks.begin(), one.blocks.end(),
                         [&](std::int32_t block) { return tables_of(block, all) > 1; });
  };
  const auto kind = kind_of(all, all[chosen], all[needy]);
  double listed_least = std::numeric_limits<double>::infinity();
  double listed_of_tenant = listed_least;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (!may_be(i)) {
      continue;
    }
    const auto other = kind_of(all, all[i], all[needy]);
    expect(kind <= other, "one was preempted whose turn to be came later");
    if (kind != other) {
      continue;
    }
    const double listed = price_of(all[i], 0, wanted);
    listed_least = std::min(listed_least, listed);
    if (all[i].sequence->arrival.tenant == victim.arrival.tenant) {
      listed_of_tenant = std::min(listed_of_tenant, listed);
      expect(price_of(all[chosen], kept(all[chosen]), wanted) <=
                 price_of(all[i], kept(all[i]), wanted) * (1 + kRounding),
             "a cheaper sequence of the victim's tenant was spared");
    }
  }
  expect(listed_of_tenant <= listed_least * (1 + kRounding), "a cheaper tenant was spared");
}

// Lower goes first.
std::array<int, 3> Model::kind_of(const Standings& all, const Standing& one,
                                  const Standing& needy) {
  if (one.sequence->paused) {
    return {0, 0, 0};
  }
  const auto held_by_tenant_of = [&](const Standing& whose) {
    double sum = 0.0;
    for (const Standing& other : all) {
      sum += other.sequence->arrival.tenant == whose.sequence->arrival.tenant ? other.listed() : 0;
    }
    return sum;
  };
  const bool ends_soon =
      decodes(*one.sequence) && chance_to_go_on(*one.sequence, settings_.slots_per_block) < 0.5;
  const bool has_less = 2 * held_by_tenant_of(one) < held_by_tenant_of(needy);
  return {1, ends_soon ? 1 : 0, has_less ? 1 : 0};
}

double Model::price_of(const Standing& one, std::int64_t kept_blocks, double wanted) const {
  const double back = one.listed() - static_cast<double>(kept_blocks);
  if (back <= 0.0) {
    return std::numeric_limits<double>::infinity();
  }
  const std::int64_t kept =
      std::min(one.sequence->computed, kept_blocks * settings_.slots_per_block);
  return step_time_.cost_of(one.sequence->computed - kept, kept) / std::min(back, wanted);
}

// What those who decode will take while each makes a block's tokens, less what comes back.
double Model::wanted_blocks(const Standings& all) {
  double wanted = 0.0;
  for (const Standing& one : all) {
    if (decodes(*one.sequence)) {
      const double goes_on = chance_to_go_on(*one.sequence, settings_.slots_per_block);
      wanted += (is_protected(*one.sequence) ? 0.0 : goes_on) - (1.0 - goes_on) * one.listed();
    }
  }
  return std::max(1.0, wanted);
}

double Model::chance_to_go_on(const Modelled& sequence, std::int64_t more) {
  if (last_token(sequence) - sequence.token_count() <= more) {
    return 0.0;
  }
  const MemoryMember member = member_of(sequence);
  const double here = member.lengths->reaching(member.made + 1);
  return here > 0.0 ? member.lengths->reaching(member.made + 1 + more) / here : 0.0;
}

}  // namespace kvledger::simulation
