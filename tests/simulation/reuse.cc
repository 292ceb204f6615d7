#include "tests/simulation/reuse.h"

#include <algorithm>
#include <utility>

namespace kvledger::simulation {
namespace {

constexpr std::int64_t kTenants = 3;
constexpr std::uint32_t kGroup = 0x80000001;   // tenants 1 and 2
constexpr std::uint32_t kPublic = 0x80000002;  // everybody reads it
constexpr Token kEnd = 1;

EngineSettings draw_settings(Random& random) {
  EngineSettings settings;
  settings.blocks = BlockCount{random.between(8, 48)};
  settings.slots_per_block = 1 << random.between(1, 4);
  settings.context_tokens = settings.blocks.value() * settings.slots_per_block;
  settings.end_of_text = {kEnd};
  settings.scheduler.sequences_max = random.between(1, 8);
  settings.scheduler.token_budget =
      settings.scheduler.sequences_max + random.between(0, 6 * settings.slots_per_block);
  settings.prefixes.on = true;
  settings.prefixes.seed = random.next();
  return settings;
}

// Almost no room, and whatever makes sequences lose it.
EngineSettings draw_harsh_settings(Random& random) {
  EngineSettings settings = draw_settings(random);
  settings.blocks =
      BlockCount{random.between(random.chance(300) ? 2 : 5, random.chance(500) ? 12 : 30)};
  settings.slots_per_block =
      static_cast<std::int32_t>(random.chance(350) ? 1 : random.between(1, 6));
  settings.context_tokens = std::max<std::int64_t>(
      2, settings.blocks.value() * settings.slots_per_block + random.between(-3, 3));
  SchedulerSettings& scheduler = settings.scheduler;
  scheduler.overtakes_max = random.between(0, 16);
  scheduler.preemptions_max = random.between(0, 3);
  scheduler.aging_per_priority = random.between(0, 100'000);
  scheduler.step_stretch = random.chance(300) ? random.between(1000, 3000) : 0;
  scheduler.prefill_time_max = random.chance(300) ? random.between(1, 1000) : 0;
  return settings;
}

ScopeId own_scope(TenantId tenant, std::int64_t space) {
  return ScopeId{
      static_cast<std::uint32_t>(10 * tenant.value() + static_cast<std::uint32_t>(space))};
}

}  // namespace

void ReuseOutcome::add(const ReuseOutcome& other) {
  steps += other.steps;
  requests += other.requests;
  computed += other.computed;
  reused_own += other.reused_own;
  reused_shared += other.reused_shared;
  tails += other.tails;
  caught_up += other.caught_up;
  preemptions += other.preemptions;
  purges += other.purges;
  purged_in_use += other.purged_in_use;
  at_limit += other.at_limit;
  evicted += other.evicted;
}

ReuseSimulator::ReuseSimulator(std::uint64_t seed, bool harsh)
    : harsh_(harsh),
      random_(seed),
      settings_(harsh ? draw_harsh_settings(random_) : draw_settings(random_)),
      engine_(settings_, 0),
      slots_(static_cast<std::size_t>(settings_.blocks.value() * settings_.slots_per_block), 0) {
  for (std::int64_t tenant = 0; tenant <= kTenants; ++tenant) {  // 0: what everybody says
    texts_.emplace_back();
    for (int i = 0; i < 4; ++i) {
      Tokens text(static_cast<std::size_t>(random_.between(1, 6 * settings_.slots_per_block)));
      std::generate(text.begin(), text.end(),
                    [&] { return static_cast<Token>(random_.between(2, 4)); });
      texts_.back().push_back(std::move(text));
    }
  }
}

ReuseOutcome ReuseSimulator::run(std::int64_t steps) {
  if (random_.chance(500)) {
    draw_shares();
  }
  for (; outcome_.steps < steps; ++outcome_.steps) {
    arrive();
    disturb();
    one_step();
  }
  quiet_ = true;
  std::vector<std::uint64_t> all;
  for (const auto& [id, live] : live_) {
    all.push_back(id);
  }
  engine_.resume(all, tick());
  for (std::int64_t left = 100'000; !live_.empty(); --left) {
    expect(left > 0, "sequences are left that do not end");
    one_step();
  }
  check_end();
  outcome_.evicted = engine_.prefix_counts().evicted;
  return outcome_;
}

Nanoseconds ReuseSimulator::tick() {
  return clock_ += random_.between(0, 1000);
}

void ReuseSimulator::arrive() {
  for (std::int64_t count = random_.chance(400) ? random_.between(1, 3) : 0; count > 0; --count) {
    if (live_.size() > 12) {
      return;
    }
    const Arrival arrival = draw_arrival();
    Tokens prompt = draw_prompt(arrival);
    last_id_ += static_cast<std::uint64_t>(arrival.samples);
    ++outcome_.requests;
    prompt.resize(std::min<std::size_t>(prompt.size(),
                                        static_cast<std::size_t>(std::max<std::int64_t>(
                                            0, engine_.sequence_tokens_max(arrival.tenant) - 1))));
    const bool accepted = engine_.accept(arrival, prompt);
    take_report();
    for (std::int64_t i = 0; accepted && i < arrival.samples; ++i) {
      Live live;
      live.arrival = arrival;
      live.named = arrival.scopes;
      live.prompt = static_cast<std::int64_t>(prompt.size());
      live.tokens = prompt;
      live_[arrival.id.value() + static_cast<std::uint64_t>(i)] = live;
    }
  }
}

Arrival ReuseSimulator::draw_arrival() {
  Arrival arrival;
  arrival.id = SequenceId{last_id_ + 1};
  arrival.tenant = TenantId{static_cast<std::uint32_t>(random_.between(1, kTenants))};
  arrival.arrived_at = tick();
  arrival.output_tokens_max = random_.between(1, 3 * settings_.slots_per_block);
  arrival.samples = random_.chance(200) ? random_.between(2, 4) : 1;
  arrival.ignore_end_of_text = random_.chance(500);
  if (harsh_) {
    const std::int64_t pool = settings_.blocks.value() * settings_.slots_per_block;
    arrival.output_tokens_max = random_.between(1, pool + 2);
    arrival.priority = static_cast<std::int32_t>(random_.between(-3, 3));
    arrival.samples = random_.chance(400) ? random_.between(2, 6) : 1;
  }
  PrefixScopes& scopes = arrival.scopes;
  scopes.keeps = random_.chance(900);
  scopes.reuses = scopes.keeps && random_.chance(950);
  scopes.own = own_scope(arrival.tenant, random_.chance(800) ? 0 : random_.between(1, 2));
  if (random_.chance(400)) {
    scopes.has_shared = true;
    scopes.writes_shared = arrival.tenant.value() < 3 && random_.chance(700);
    scopes.shared = ScopeId{scopes.writes_shared ? kGroup : kPublic};
  } else if (live_.empty() && random_.chance(200)) {
    scopes = PrefixScopes{};
    scopes.keeps = scopes.reuses = scopes.stays = true;
    scopes.own = ScopeId{kPublic};
    arrival.samples = 1;
  }
  return arrival;
}

// Often the beginning of something that was said before.
ReuseSimulator::Tokens ReuseSimulator::draw_prompt(const Arrival& arrival) {
  const bool general = arrival.scopes.has_shared || is_shared(arrival.scopes.own);
  const auto& texts = texts_[general ? 0 : arrival.tenant.value()];
  Tokens prompt = texts[static_cast<std::size_t>(random_.between(0, 3))];
  if (!general && !live_.empty() && random_.chance(400)) {
    const Live& other =
        std::next(live_.begin(), random_.between(0, static_cast<std::int64_t>(live_.size()) - 1))
            ->second;
    if (other.arrival.tenant == arrival.tenant) {
      prompt = other.tokens;  // a conversation that goes on
    }
  }
  const auto most = static_cast<std::size_t>(settings_.context_tokens / 2);
  prompt.resize(std::min(prompt.size(), most));
  for (std::int64_t tail = random_.between(0, 2 * settings_.slots_per_block); tail > 0; --tail) {
    prompt.push_back(static_cast<Token>(random_.between(2, 3)));
  }
  const auto border = random_.between(0, static_cast<std::int64_t>(prompt.size()));
  if (arrival.scopes.has_shared) {
    const_cast<Arrival&>(arrival).scopes.shared_tokens = border;
  }
  return prompt;
}

void ReuseSimulator::disturb() {
  if (live_.empty() || !random_.chance(120)) {
    return;
  }
  const auto at = random_.between(0, static_cast<std::int64_t>(live_.size()) - 1);
  const std::vector<std::uint64_t> ids = {std::next(live_.begin(), at)->first};
  switch (random_.between(0, harsh_ ? 5 : 3)) {
    case 0:
      engine_.end(ids, EndReason::kCancelled, tick());
      break;
    case 1:
      engine_.pause(ids, tick());
      break;
    case 2:
      engine_.resume(ids, tick());
      break;
    case 4:
      draw_shares();
      break;
    default:
      purge();
  }
  take_report();
}

void ReuseSimulator::purge() {
  const auto drawn = random_.between(0, 4);
  const ScopeId scope = drawn == 0 ? ScopeId{kGroup}
                        : drawn == 1
                            ? ScopeId{kPublic}
                            : own_scope(TenantId{static_cast<std::uint32_t>(drawn - 1)}, 0);
  ++outcome_.purges;
  outcome_.purged_in_use += std::ranges::any_of(live_, [&](const auto& entry) {
    return entry.second.row >= 0 && entry.second.arrival.scopes.own == scope;
  });
  engine_.purge(scope, tick());
  for (auto& [id, live] : live_) {
    const PrefixScopes scopes = live.arrival.scopes;
    const bool hit = scopes.own == scope || (scopes.has_shared && scopes.shared == scope);
    live.purged |= hit;
    PrefixScopes& left = live.arrival.scopes;
    if (left.own == scope) {
      left.keeps = left.reuses = false;
    }
    left.has_shared &= left.shared != scope;
  }
  // Below a shared scope hang others' blocks, which go with it; what they say may be said again.
  computed_[scope.value()].clear();
}

void ReuseSimulator::draw_shares() {
  const std::int64_t pool = settings_.blocks.value();
  std::int64_t left =
      std::max<std::int64_t>(0, engine_.shareable_blocks().value() - (harsh_ ? 1 : 4));
  const std::int64_t least = harsh_ ? 1 : 3;
  shares_.clear();
  for (std::uint32_t tenant = 1; tenant <= 3; ++tenant) {
    PoolShare share;
    share.tenant = TenantId{tenant};
    share.guaranteed = BlockCount{random_.between(0, left / 2)};
    left -= share.guaranteed.value();
    share.sealed = share.guaranteed.value() > 2 && random_.chance(200);
    share.max = share.sealed ? share.guaranteed
                             : BlockCount{random_.between(
                                   std::max<std::int64_t>(least, share.guaranteed.value()), pool)};
    share.live_max = BlockCount{
        random_.between(std::min<std::int64_t>(2, share.max.value()), share.max.value())};
    shares_.push_back(share);
  }
  engine_.set_shares(shares_, tick());
}

void ReuseSimulator::check_shares() const {
  std::int64_t spoken_for = 0;
  std::int64_t sealed = 0;
  for (const PoolShare& share : shares_) {
    const TenantStatement statement = engine_.ledger().statement(share.tenant);
    const std::int64_t live = engine_.ledger().live(share.tenant).value();
    expect(live <= share.live_max.value(), "a tenant holds more than its share");
    expect(live + statement.cached.value() <= share.max.value() || live == share.max.value(),
           "a tenant has more than its share with what it has cached");
    spoken_for += std::max(live, share.guaranteed.value());
    if (share.sealed) {
      sealed +=
          std::max<std::int64_t>(0, share.guaranteed.value() - live - statement.cached.value());
    }
  }
  for (const std::uint32_t scope : {kGroup, kPublic}) {
    spoken_for += engine_.ledger().statement(TenantId{scope}).held.value();
  }
  expect(spoken_for <= settings_.blocks.value(), "somebody holds what another has guaranteed");
  expect(engine_.ledger().free().value() >= sealed, "others' blocks lie in a sealed share");
}

void ReuseSimulator::one_step() {
  const StepPlan& plan = engine_.plan(tick());
  const StepPlanView& view = plan.view();
  follow(view);
  if (!shares_.empty() && !harsh_) {
    check_shares();
    outcome_.at_limit += std::ranges::any_of(shares_, [&](const PoolShare& share) {
      return engine_.ledger().live(share.tenant) == share.live_max;
    });
  }
  if (!engine_.has_uncommitted_step()) {
    return;
  }
  compute(view);
  if (!quiet_ && random_.chance(100)) {
    disturb();
  }
  if (!quiet_ && random_.chance(10)) {
    engine_.abandon(view.step, tick());
    take_report();
    return;
  }
  commit(view);
}

void ReuseSimulator::follow(const StepPlanView& plan) {
  audit();
  const StepReport& report = engine_.take_report();
  for (const Preemption& preemption : report.preemptions) {
    Live& live = live_.at(preemption.sequence);
    live.row = -1;
    live.computed = 0;
    ++outcome_.preemptions;
  }
  for (const Admission& admission : report.admissions) {
    admit(admission);
  }
  bill(report);  // what had outgrown a lowered share ended with its preemption
  for (std::size_t i = 0; i < plan.copy_from.size(); ++i) {
    const std::int64_t slots = settings_.slots_per_block;
    std::copy_n(slots_.begin() + plan.copy_from[i] * slots, slots,
                slots_.begin() + plan.copy_to[i] * slots);
  }
}

void ReuseSimulator::admit(const Admission& admission) {
  Live& live = live_.at(admission.sequence);
  live.row = admission.row;
  // Who begins with another sample's blocks knows no more of them than that one.
  live.purged = admission.shared_tokens > 0 && std::ranges::any_of(live_, [&](const auto& entry) {
                  return entry.second.arrival.id == live.arrival.id && entry.second.purged;
                });
  live.computed = admission.shared_tokens + admission.reused_tokens;
  rows_[admission.row] = admission.sequence;
  if (admission.shared_tokens == 0) {
    check_reuse(live, admission.reused_tokens);
  }
  outcome_.tails += admission.reused_tokens % settings_.slots_per_block != 0 ? 1 : 0;
}

// What was found was computed in that scope, and what somebody has now was found.
void ReuseSimulator::check_reuse(const Live& live, std::int64_t found) const {
  const std::int64_t slots = settings_.slots_per_block;
  const Arrival& arrival = live.arrival;
  expect(found == 0 || arrival.scopes.reuses, "reused by who wanted nothing");
  expect(found < static_cast<std::int64_t>(live.tokens.size()), "nothing is left to compute");
  for (std::int64_t block = 0; (block + 1) * slots <= found; ++block) {
    const std::uint64_t what = digest(live.tokens, (block + 1) * slots);
    const auto in = [&](ScopeId scope) {
      const auto known = computed_.find(scope.value());
      return known != computed_.end() && known->second.contains(what);
    };
    expect(in(arrival.scopes.own) ||
               (arrival.scopes.has_shared && (block + 1) * slots <= arrival.scopes.shared_tokens &&
                in(arrival.scopes.shared)),
           "a block was found that nobody computed in this scope since its purge");
  }
  for (const auto& [id, other] : live_) {
    const PrefixScopes& theirs = other.arrival.scopes;
    if (&other == &live || other.row < 0 || other.purged || !theirs.keeps || theirs.has_shared ||
        arrival.scopes.has_shared || !arrival.scopes.reuses || theirs.own != arrival.scopes.own) {
      continue;
    }
    const std::int64_t same = std::min(alike(live.tokens, other.tokens), other.computed);
    const std::int64_t usable = std::min(same, static_cast<std::int64_t>(live.tokens.size()) - 1);
    expect(found >= usable / slots * slots, "what a running sequence has was not found");
  }
}

std::int64_t ReuseSimulator::alike(const Tokens& a, const Tokens& b) const {
  return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
}

ScopeId ReuseSimulator::scope_at(const Arrival& arrival, std::int64_t block) const {
  const PrefixScopes& scopes = arrival.scopes;
  const bool shared = scopes.has_shared && scopes.writes_shared &&
                      (block + 1) * settings_.slots_per_block <= scopes.shared_tokens;
  return shared ? scopes.shared : scopes.own;
}

std::uint64_t ReuseSimulator::digest(const Tokens& tokens, std::int64_t count) const {
  std::uint64_t digest = 7;
  for (std::int64_t i = 0; i < count; ++i) {
    digest = mix(digest + static_cast<std::uint64_t>(tokens[static_cast<std::size_t>(i)]));
  }
  return digest;
}

void ReuseSimulator::compute(const StepPlanView& plan) {
  const std::int64_t slots = settings_.slots_per_block;
  for (std::size_t i = 0; i < plan.rows.size(); ++i) {
    Live& live = live_.at(rows_.at(plan.rows[i]));
    const std::int64_t count = plan.query_start[i + 1] - plan.query_start[i];
    const std::int64_t past = plan.context_length[i] - count;
    expect(past >= live.computed, "computed tokens are computed again");
    outcome_.caught_up += past - live.computed;
    live.computed = past;
    live.planned = count;
    check_table(live, (plan.context_length[i] + slots - 1) / slots);
    check_context(live);
    for (std::int64_t position = past; position < past + count; ++position) {
      const BlockId block =
          engine_.tables().at(TableRow{static_cast<std::uint32_t>(live.row)}, position / slots);
      slots_[static_cast<std::size_t>(block.value() * slots + position % slots)] =
          digest(live.tokens, position + 1);
    }
  }
}

// Whose blocks a sequence reads.
void ReuseSimulator::check_table(const Live& live, std::int64_t blocks) const {
  for (std::int64_t i = 0; i < blocks; ++i) {
    const BlockId block = engine_.tables().at(TableRow{static_cast<std::uint32_t>(live.row)}, i);
    const std::optional<TenantId> owner = engine_.ledger().owner_of(block);
    expect(owner.has_value(), "a block in a table belongs to nobody");
    if (is_shared(ScopeId{owner->value()})) {
      const PrefixScopes& scopes = live.named;
      const bool named = scopes.has_shared && scopes.shared.value() == owner->value();
      expect(named || scopes.own.value() == owner->value(), "a block of a scope it did not name");
      expect(!named || (i + 1) * settings_.slots_per_block <= scopes.shared_tokens,
             "a shared block behind the border");
    } else {
      expect(*owner == live.arrival.tenant, "a block of another tenant");
    }
  }
}

void ReuseSimulator::check_context(const Live& live) const {
  const std::int64_t slots = settings_.slots_per_block;
  for (std::int64_t position = 0; position < live.computed; ++position) {
    const BlockId block =
        engine_.tables().at(TableRow{static_cast<std::uint32_t>(live.row)}, position / slots);
    expect(slots_[static_cast<std::size_t>(block.value() * slots + position % slots)] ==
               digest(live.tokens, position + 1),
           "a context slot does not hold what the sequence's tokens say");
  }
}

void ReuseSimulator::commit(const StepPlanView& plan) {
  std::vector<Token> tokens;
  std::vector<std::int32_t> offsets = {0};
  std::set<std::uint64_t> failed;
  for (const std::int32_t row : plan.logit_rows) {
    const bool fails = !quiet_ && random_.chance(4);
    tokens.push_back(fails ? -1 : static_cast<Token>(random_.between(1, 4)));
    offsets.push_back(static_cast<std::int32_t>(tokens.size()));
    if (fails) {
      failed.insert(rows_.at(row));
      for (auto& [id, live] : live_) {
        live.purged = true;  // what hangs below the blocks of who failed goes with them
      }
    }
  }
  for (const std::int32_t row : plan.rows) {
    const auto found = live_.find(rows_.at(row));
    if (found == live_.end() || found->second.planned == 0) {
      continue;
    }
    Live& live = found->second;
    outcome_.computed += live.planned;
    live.computed += std::exchange(live.planned, 0);
    if (!failed.contains(found->first)) {
      remember(live, live.computed);
    }
  }
  for (const std::int32_t row : plan.logit_rows) {
    // Samples that begin here have computed as much.
    const auto found = live_.find(rows_.at(row));
    if (found != live_.end() && !failed.contains(found->first)) {
      remember(found->second, found->second.computed);
    }
  }
  engine_.commit(plan.step, tokens, offsets, tick());
  take_report();
}

void ReuseSimulator::remember(const Live& live, std::int64_t computed) {
  if (!live.arrival.scopes.keeps) {
    return;
  }
  const std::int64_t slots = settings_.slots_per_block;
  for (std::int64_t block = 0; (block + 1) * slots <= computed; ++block) {
    const std::uint64_t what = digest(live.tokens, (block + 1) * slots);
    computed_[scope_at(live.arrival, block).value()].insert(what);
  }
}

void ReuseSimulator::take_report() {
  audit();
  const StepReport& report = engine_.take_report();
  for (const OutputToken& output : report.tokens) {
    const auto found = live_.find(output.sequence);
    expect(found != live_.end(), "a token for nobody");
    found->second.tokens.push_back(output.token);
    if (output.end_reason != 0) {
      live_.erase(found);
    }
  }
  bill(report);
}

void ReuseSimulator::bill(const StepReport& report) {
  for (const Receipt& receipt : report.receipts) {
    billed_[receipt.tenant] +=
        static_cast<BlockNanoseconds>(receipt.held_seconds) * 1'000'000'000 + receipt.held_nanos;
    outcome_.reused_own += receipt.reused_own;
    outcome_.reused_shared += receipt.reused_shared;
    std::erase_if(live_, [&](const auto& entry) {
      return entry.second.arrival.id.value() == receipt.sequence;
    });
  }
  // One that was cancelled leaves without a word while others of its request go on.
  std::erase_if(live_, [&](const auto& entry) { return !engine_.knows(SequenceId{entry.first}); });
}

void ReuseSimulator::audit() const {
  if (const auto wrong = engine_.audit()) {
    throw Violation(*wrong);
  }
}

void ReuseSimulator::check_end() {
  for (const auto& [tenant, time] : billed_) {
    const TenantStatement statement = engine_.ledger().statement(TenantId{tenant});
    expect(statement.closed_time == time, "receipts do not add up to the tenant's statement");
    expect(statement.held_time == time, "a tenant's time is not that of its receipts");
    expect_equal("blocks held at the end", statement.held.value(), 0);
  }
  for (std::int64_t tenant = 1; tenant <= kTenants; ++tenant) {
    for (std::int64_t space = 0; space <= 2; ++space) {
      engine_.purge(own_scope(TenantId{static_cast<std::uint32_t>(tenant)}, space), tick());
    }
  }
  engine_.purge(ScopeId{kGroup}, tick());
  engine_.purge(ScopeId{kPublic}, tick());
  audit();
  expect_equal("blocks free at the end", engine_.ledger().free().value(), settings_.blocks.value());
  expect_equal("foreign blocks", engine_.prefix_counts().foreign, 0U);
}

}  // namespace kvledger::simulation
