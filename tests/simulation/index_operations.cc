#include "tests/simulation/index_operations.h"

#include <algorithm>
#include <utility>

#include "core/lru_policy.h"
#include "core/reuse_policy.h"

namespace kvledger::simulation {
namespace {

constexpr int kTexts = 4;
constexpr std::int64_t kHour = 3'600'000'000'000;

}  // namespace

void IndexOutcome::add(const IndexOutcome& other) {
  operations += other.operations;
  requests += other.requests;
  found_own += other.found_own;
  found_shared += other.found_shared;
  tails += other.tails;
  caught_up += other.caught_up;
  evicted += other.evicted;
  refused += other.refused;
  preempted += other.preempted;
  forked += other.forked;
  split += other.split;
  stayed += other.stayed;
  purged += other.purged;
  shares += other.shares;
}

// Lets a policy decide, and hears what becomes of its blocks.
class IndexOperations::HeardPolicy : public EvictionPolicy {
 public:
  HeardPolicy(std::unique_ptr<EvictionPolicy> policy, Heard& heard)
      : policy_(std::move(policy)), heard_(heard) {}

  bool takes_leaves_only() const noexcept override { return policy_->takes_leaves_only(); }
  void entered(CacheSlot slot, std::uint64_t now) override {
    policy_->entered(slot, now);
    heard_.entered.push_back(slot);
  }
  void used(CacheSlot slot, std::uint64_t now) override { policy_->used(slot, now); }
  void adopted(CacheSlot slot, std::uint64_t now) override { policy_->adopted(slot, now); }
  void offered(CacheSlot slot) override { policy_->offered(slot); }
  void withdrawn(CacheSlot slot) override { policy_->withdrawn(slot); }
  void leaving(CacheSlot slot, Departure how) override {
    policy_->leaving(slot, how);
    if (how == Departure::kEvicted) {
      heard_.evicted.push_back(slot);
    }
  }
  CacheSlot victim() override { return policy_->victim(); }

 private:
  std::unique_ptr<EvictionPolicy> policy_;
  Heard& heard_;
};

PrefixCacheSettings IndexOperations::settings(std::uint64_t seed, EvictionOrder order) {
  PrefixCacheSettings settings;
  settings.on = true;
  settings.seed = seed;
  settings.make_policy = [this, order](CachedBlocks& blocks, std::int64_t capacity) {
    std::unique_ptr<EvictionPolicy> policy;
    if (order == EvictionOrder::kByAge) {
      policy = std::make_unique<LruPolicy>(blocks, true);
    } else {
      policy = std::make_unique<ReusePolicy>(blocks, capacity, kDefaultCostGrowth);
    }
    return std::make_unique<HeardPolicy>(std::move(policy), heard_);
  };
  return settings;
}

IndexOperations::IndexOperations(std::uint64_t seed, EvictionOrder order)
    : random_(seed),
      world_{random_.between(random_.chance(150) ? 2 : 8, random_.chance(600) ? 14 : 32),
             static_cast<std::int32_t>(random_.between(1, 4))},
      ledger_(BlockCount{world_.blocks}, 0),
      pool_(ledger_),
      tables_(kRows, BlockCount{world_.blocks}),
      cache_(settings(random_.next(), order), world_.slots, ledger_, pool_),
      blocks_(world_.slots, pool_, tables_, cache_),
      plan_(1, kRows, world_.blocks),
      model_(world_.blocks, world_.slots, order == EvictionOrder::kByAge) {
  for (int i = 0; i < kTexts; ++i) {
    Tokens text(static_cast<std::size_t>(random_.between(1, 5 * world_.slots)));
    std::ranges::generate(text, [&] { return static_cast<Token>(random_.between(2, 4)); });
    texts_.push_back(std::move(text));
  }
  for (const std::uint32_t scope : {kGroup, kPublic}) {
    ledger_.account(TenantId{scope});
  }
}

IndexOutcome IndexOperations::run(std::int64_t operations) {
  if (random_.chance(400)) {
    draw_shares();
  }
  try {
    for (; outcome_.operations < operations; ++outcome_.operations) {
      tick();
      one();
      check();
      if (outcome_.operations % 64 == 0) {
        audit();
      }
    }
    end_all();
  } catch (const std::exception& failure) {
    throw Violation("operation " + std::to_string(outcome_.operations) + " (" + doing_ +
                    "): " + failure.what());
  }
  outcome_.evicted = model_.index.evicted;
  return outcome_;
}

// Now and then the clock stands still, jumps hours, or runs back, which counts as standing still.
void IndexOperations::tick() {
  std::int64_t elapsed = random_.chance(250) ? 0 : random_.between(0, 1000);
  if (random_.chance(20)) {
    elapsed = random_.between(0, random_.chance(500) ? kHour : 1'000'000'000);
  }
  clock_ += elapsed;
  ledger_.advance(clock_);
  model_.books.tick(elapsed);
  if (random_.chance(20)) {
    ledger_.advance(clock_ - random_.between(0, kHour));
  }
}

void IndexOperations::one() {
  plan_.begin(StepId{1});
  if (step_is_open_) {
    one_in_step();
  } else {
    one_between_steps();
  }
}

void IndexOperations::one_in_step() {
  const std::int64_t drawn = random_.between(0, 99);
  Live* const live = any(random_.chance(900));
  if (drawn < 8 && live != nullptr) {
    end(live->sequence->id.value(), false);
  } else if (drawn < 11) {
    purge();
  } else if (drawn < 12) {
    draw_shares();
  } else {
    commit();
  }
}

void IndexOperations::one_between_steps() {
  const std::int64_t drawn = random_.between(0, 999);
  if (drawn < 4) {
    purge();
  } else if (drawn < 12) {
    draw_shares();
  } else if (drawn < 180) {
    open_step();
  } else if (drawn < 300) {
    arrive();
  } else if (Live* const live = any(drawn >= 520)) {
    of_one(*live, drawn);
  } else {
    arrive();
  }
}

void IndexOperations::of_one(Live& live, std::int64_t drawn) {
  if (drawn < 330) {
    look(live);
  } else if (drawn < 510) {
    admit(live);
  } else if (drawn < 530) {
    end(live.sequence->id.value(), random_.chance(500));
  } else if (drawn < 550) {
    preempt(live);
  } else if (drawn < 650) {
    catch_up(live);
  } else {
    compute(live);
  }
}

// Whoever runs and is not in the step that is being planned, or waits; nullptr if nobody does.
IndexOperations::Live* IndexOperations::any(bool running) {
  std::vector<Live*> some;
  for (auto& [id, live] : live_) {
    const bool runs = live.sequence->state == Sequence::State::kRunning;
    if (runs == running && (step_is_open_ || !live.planned)) {
      some.push_back(&live);
    }
  }
  if (some.empty()) {
    return nullptr;
  }
  const auto drawn = random_.between(0, static_cast<std::int64_t>(some.size()) - 1);
  return some[static_cast<std::size_t>(drawn)];
}

ReaderModel::Reader& IndexOperations::reader(const Sequence& sequence) {
  return model_.readers.at(sequence.id.value());
}

void IndexOperations::hear() {
  for (const CacheSlot slot : heard_.evicted) {
    const auto found = block_at_.find(slot);
    expect(found != block_at_.end(), "a block was evicted that never entered");
    model_.index.told.push_back(found->second);
    block_at_.erase(found);
  }
  heard_.evicted.clear();
}

void IndexOperations::arrive() {
  doing_ = "arrive";
  if (live_.size() >= kRows - 2) {
    return;
  }
  const Sequence* other = nullptr;
  if (!live_.empty() && random_.chance(500)) {
    const auto drawn = random_.between(0, static_cast<std::int64_t>(live_.size()) - 1);
    other = std::next(live_.begin(), drawn)->second.sequence.get();
  }
  Arrival arrival = draw_arrival(random_.chance(600) ? other : nullptr);
  const Tokens prompt = draw_prompt(other, arrival);
  const std::int64_t whole = static_cast<std::int64_t>(prompt.size()) / world_.slots;
  std::int64_t guaranteed = 0;
  for (const PoolShare& share : shares_) {
    guaranteed += share.guaranteed.value();
  }
  if (arrival.scopes.stays &&
      whole > world_.blocks - cache_.staying() - world_.blocks / 2 - guaranteed) {
    return;
  }
  accept(arrival, prompt);
}

void IndexOperations::accept(const Arrival& arrival, const Tokens& prompt) {
  if (arrival.scopes.stays) {
    cache_.make_room_to_stay(world_.blocks);
  }
  ++outcome_.requests;
  const RequestAccount account = ledger_.open(arrival.tenant);
  const auto request = std::make_shared<Request>(arrival.id, account);
  model_.books.open(arrival.id.value(), arrival.tenant.value());
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(arrival.samples); ++i) {
    auto sequence = std::make_unique<Sequence>(arrival, prompt, request, i);
    cache_.begin(*sequence);
    request->samples.push_back(sequence.get());
    ReaderModel::Reader arrived;
    arrived.id = ++last_id_;
    arrived.request = arrival.id.value();
    arrived.tenant = arrival.tenant.value();
    arrived.scopes = arrival.scopes;
    arrived.tokens = prompt;
    arrived.prompt = static_cast<std::int64_t>(prompt.size());
    model_.arrive(arrived);
    live_[arrived.id].sequence = std::move(sequence);
  }
}

// As the other, if there is one.
Arrival IndexOperations::draw_arrival(const Sequence* other) {
  Arrival arrival;
  arrival.id = SequenceId{last_id_ + 1};
  arrival.output_tokens_max = 1000;
  arrival.samples = random_.chance(200) ? random_.between(2, 3) : 1;
  PrefixScopes& scopes = arrival.scopes;
  if (other != nullptr) {
    arrival.tenant = other->tenant;
    scopes = other->scopes;
    arrival.samples = scopes.stays ? 1 : arrival.samples;
    return arrival;
  }
  arrival.tenant = TenantId{static_cast<std::uint32_t>(random_.between(1, kTenants))};
  scopes.keeps = random_.chance(950);
  scopes.reuses = scopes.keeps && random_.chance(950);
  scopes.own = own_scope(arrival.tenant.value(), random_.chance(900) ? 0 : 1);
  if (random_.chance(550)) {
    const bool may_write = arrival.tenant.value() < kTenants;
    scopes.has_shared = true;
    scopes.writes_shared = may_write && random_.chance(700);
    const bool in_group = scopes.writes_shared || (may_write && random_.chance(500));
    scopes.shared = ScopeId{in_group ? kGroup : kPublic};
  } else if (random_.chance(60)) {
    scopes = PrefixScopes{};
    scopes.keeps = scopes.reuses = scopes.stays = true;
    scopes.own = ScopeId{kPublic};
    arrival.samples = 1;
  }
  return arrival;
}

// What the other has said so far, or one of a few beginnings; and mostly something of its own.
IndexOperations::Tokens IndexOperations::draw_prompt(const Sequence* other, Arrival& arrival) {
  Tokens prompt = other != nullptr
                      ? other->tokens
                      : texts_[static_cast<std::size_t>(random_.between(0, kTexts - 1))];
  const std::int64_t most = std::max<std::int64_t>(1, world_.blocks * world_.slots * 2 / 5);
  prompt.resize(std::min(prompt.size(), static_cast<std::size_t>(most)));
  for (std::int64_t more = random_.between(0, world_.slots); more > 0; --more) {
    prompt.push_back(static_cast<Token>(random_.between(2, 3)));
  }
  if (arrival.scopes.has_shared && random_.chance(700)) {
    arrival.scopes.shared_tokens = random_.between(0, static_cast<std::int64_t>(prompt.size()));
  }
  arrival.scopes.shared_tokens =
      std::min(arrival.scopes.shared_tokens, static_cast<std::int64_t>(prompt.size()));
  return prompt;
}

PrefixMatch IndexOperations::match(Sequence& waiting) {
  const PrefixMatch found = cache_.match(waiting);
  const ReaderModel::Match expected = model_.match(reader(waiting), waiting.path.capacity());
  expect_equal("blocks found", found.blocks, expected.blocks);
  expect_equal("blocks found that nobody holds", found.cached, expected.cached);
  expect_equal("tokens found of the next block", found.tail, expected.tail);
  if (expected.tail > 0) {
    const auto known = nodes_.emplace(expected.source, found.source).first;
    expect(known->second == found.source, "the source of a tail is another one");
  }
  return found;
}

void IndexOperations::look(Live& live) {
  doing_ = "look";
  match(*live.sequence);
}

void IndexOperations::admit(Live& live) {
  doing_ = "admit";
  const Request& request = *live.sequence->request;
  const Sequence* const source = request.is_shared() ? request.source() : nullptr;
  const auto runs = [](const Sequence* sample) {
    return sample->state == Sequence::State::kRunning;
  };
  const auto carrier = std::ranges::find_if(request.samples, runs);
  if (source != nullptr) {
    const Live& computed = live_.at(source->id.value());
    if (!computed.planned || computed.chunk > 0) {  // not one that follows in this very step
      fork(*source, live);
    }
  } else if (carrier == request.samples.end()) {
    begin(live);
  } else {
    follow(**carrier, live);
  }
}

// Where the step completes the prompt, others begin with it at once, and with the same logits.
void IndexOperations::follow(const Sequence& leader, Live& live) {
  doing_ = "follow";
  Sequence& sequence = *live.sequence;
  const Live& leading = live_.at(leader.id.value());
  if (!leading.planned || leading.chunk != leader.pending() || leader.output_count() > 0 ||
      sequence.output_count() > 0 || cache_.available(sequence.tenant) <= BlockCount{0}) {
    return;
  }
  sequence.row = tables_.take_row();
  sequence.state = Sequence::State::kRunning;
  blocks_.share(leader, sequence, sequence.prompt_count, plan_);
  model_.share(reader(leader), reader(sequence), sequence.prompt_count, 0);
  plan(live, 0);
  ++outcome_.forked;
}

void IndexOperations::begin(Live& live) {
  doing_ = "begin";
  Sequence& sequence = *live.sequence;
  PrefixMatch found = match(sequence);
  ReaderModel::Match expected{found.blocks, found.cached, found.tail, 0};
  const BlockCount needed = blocks_.blocks_for(sequence.token_count()) - BlockCount{found.blocks};
  const BlockCount left = cache_.available(sequence.tenant) - needed - BlockCount{found.cached};
  if (left < BlockCount{0}) {
    ++outcome_.refused;
    if (needed > cache_.available(sequence.tenant)) {
      expect(!cache_.reserve(sequence.account, sequence.tenant, needed), "there is no room");
    }
    return;
  }
  if (left == BlockCount{0}) {
    found.tail = expected.tail = 0;  // its source may have to go
  }
  cache_.count_lookup(sequence);
  sequence.admitted_before = true;
  sequence.row = tables_.take_row();
  sequence.state = Sequence::State::kRunning;
  blocks_.begin_with(sequence, found, plan_);
  if (found.tail > 0) {
    cache_.pin_source(found);
  }
  auto reservation = cache_.reserve(sequence.account, sequence.tenant, needed);
  expect(reservation.has_value(), "an admitted sequence finds no room");
  sequence.reservation = std::move(*reservation);
  if (found.tail > 0) {
    blocks_.copy_tail(sequence, found, plan_);
    cache_.unpin_source(found);
    ++outcome_.tails;
  }
  hear();
  model_.begin(reader(sequence), expected, needed.value());
}

void IndexOperations::fork(const Sequence& source, Live& live) {
  doing_ = "fork";
  Sequence& sequence = *live.sequence;
  const std::int64_t shared = std::min(sequence.prompt_count, sequence.token_count() - 1);
  const BlockCount needed =
      blocks_.blocks_for(sequence.token_count()) - blocks_.full_blocks(shared);
  auto reservation = cache_.reserve(sequence.account, sequence.tenant, needed);
  const bool has_room = reservation.has_value();
  if (has_room) {
    sequence.reservation = std::move(*reservation);
  }
  hear();
  if (!has_room) {
    ++outcome_.refused;
    expect(needed.value() > model_.index.available(sequence.tenant.value()), "there was room");
    return;
  }
  ReaderModel::Reader& forked = reader(sequence);
  sequence.row = tables_.take_row();
  sequence.state = Sequence::State::kRunning;
  blocks_.share(source, sequence, shared, plan_);
  model_.share(reader(source), forked, shared, needed.value());
  for (BlockCount missing = blocks_.missing(sequence, 1); missing > BlockCount{0};
       missing -= BlockCount{1}) {
    expect(model_.missing(forked, 1) > 0, "a block is taken that is not missing");
    blocks_.take(sequence, plan_);
    model_.take(forked);
  }
  ++outcome_.forked;
}

// The next tokens of a sequence go into the step; if there is no room for them it is preempted.
void IndexOperations::compute(Live& live) {
  doing_ = "compute";
  Sequence& sequence = *live.sequence;
  const std::int64_t tokens =
      random_.between(1, std::min<std::int64_t>(sequence.pending(), 2 * world_.slots));
  ReaderModel::Reader& running = reader(sequence);
  expect_equal("blocks missing", blocks_.missing(sequence, tokens).value(),
               model_.missing(running, tokens));
  for (std::int64_t missing = model_.missing(running, tokens); missing > 0; --missing) {
    if (sequence.reservation.remaining() == BlockCount{0}) {
      auto one = cache_.reserve(sequence.account, sequence.tenant, BlockCount{1});
      const bool has_room = one.has_value();
      if (has_room) {
        sequence.reservation = std::move(*one);
      }
      hear();
      expect_equal("room for one block more", has_room, model_.reserve(running, 1));
      if (!has_room) {
        ++outcome_.refused;
        preempt(live);
        return;
      }
    }
    blocks_.take(sequence, plan_);
    model_.take(running);
  }
  plan(live, tokens);
}

void IndexOperations::plan(Live& live, std::int64_t tokens) {
  live.planned = true;
  live.chunk = tokens;
  step_.push_back(live.sequence->id.value());
}

void IndexOperations::catch_up(Live& live) {
  doing_ = "catch up";
  blocks_.catch_up(*live.sequence, plan_);
  outcome_.caught_up +=
      model_.catch_up(reader(*live.sequence), live.sequence->path.capacity()) ? 1 : 0;
}

void IndexOperations::preempt(Live& live) {
  doing_ = "preempt";
  ++outcome_.preempted;
  blocks_.give_back(*live.sequence);
  live.sequence->state = Sequence::State::kWaiting;
  live.sequence->computed = 0;
  model_.give_back(reader(*live.sequence));
}

void IndexOperations::purge() {
  doing_ = "purge";
  const auto drawn = static_cast<std::uint32_t>(random_.between(0, 7));
  const ScopeId scope = drawn == 0   ? ScopeId{kGroup}
                        : drawn == 1 ? ScopeId{kPublic}
                                     : own_scope(drawn / 2, drawn % 2);
  for (const auto& [id, live] : live_) {
    cache_.end_scope(*live.sequence, scope);
  }
  const std::int64_t purged = cache_.purge(scope);
  expect_equal("blocks purged", purged, model_.purge(scope.value()));
  outcome_.purged += purged;
}

void IndexOperations::draw_shares() {
  doing_ = "set shares";
  shares_.clear();
  std::int64_t left = std::max<std::int64_t>(0, world_.blocks - cache_.staying() - 1);
  for (std::uint32_t tenant = 1; tenant <= kTenants; ++tenant) {
    if (random_.chance(300)) {
      continue;
    }
    PoolShare share;
    share.tenant = TenantId{tenant};
    share.guaranteed = BlockCount{random_.chance(500) ? random_.between(0, left / 2) : 0};
    left -= share.guaranteed.value();
    share.sealed = share.guaranteed > BlockCount{0} && random_.chance(200);
    const std::int64_t least = std::max<std::int64_t>(1, share.guaranteed.value());
    share.max =
        BlockCount{random_.chance(300) ? world_.blocks : random_.between(least, world_.blocks)};
    share.max = share.sealed ? share.guaranteed : share.max;
    share.live_max = BlockCount{random_.between((share.max.value() + 1) / 2, share.max.value())};
    shares_.push_back(share);
  }
  if (random_.chance(200)) {
    const BlockCount max{random_.between(1, world_.blocks)};
    shares_.push_back(PoolShare{TenantId{kGroup}, BlockCount{0}, max, max, false});
  }
  if (random_.chance(200)) {
    shares_.clear();
  }
  ++outcome_.shares;
  cache_.set_shares(shares_);
  model_.index.set_shares(shares_);
}

}  // namespace kvledger::simulation
