#include "core/ledger.h"

#include <algorithm>

#include "core/check.h"
#include "core/make_room.h"

namespace kvledger {
namespace {

constexpr BlockCount kOne{1};
constexpr BlockCount kNone{0};
constexpr std::uint64_t kNanosPerSecond = 1'000'000'000;

std::string disagree(const char* what, std::int64_t booked, std::int64_t found) {
  return std::string(what) + ": booked " + std::to_string(booked) + ", found " +
         std::to_string(found);
}

}  // namespace

BlockTime to_block_time(BlockNanoseconds time) noexcept {
  return BlockTime{static_cast<std::uint64_t>(time / kNanosPerSecond),
                   static_cast<std::uint32_t>(time % kNanosPerSecond)};
}

BlockNanoseconds Ledger::Account::integral_at(Nanoseconds now) const noexcept {
  return integral + static_cast<BlockNanoseconds>(balance.value()) *
                        static_cast<BlockNanoseconds>(now - since);
}

void Ledger::Account::post(BlockCount change, Nanoseconds now) {
  KVL_CHECK_GE(now, since);
  integral = integral_at(now);
  since = now;
  balance += change;
  KVL_CHECK_GE(balance, kNone);
}

Ledger::Ledger(BlockCount total, Nanoseconds now, CallTimer::Clock clock)
    : total_(total),
      opened_at_(now),
      now_(now),
      owners_(static_cast<std::size_t>(total.value())),
      timer_(clock) {
  KVL_CHECK_GT(total, kNone);
  for (Account& account : state_) {
    account.since = now;
  }
  at(BlockState::kFree).post(total, now);
}

void Ledger::advance(Nanoseconds now) noexcept {
  now_ = std::max(now_, now);
}

RequestAccount Ledger::open(TenantId id) {
  const auto timed = timer_.call();
  Tenant& holder = tenant(id);
  if (closed_.empty()) {
    make_room(closed_, requests_.size() + 1);  // closing all of them allocates nothing
    requests_.emplace_back();
    closed_.push_back(RequestAccount{static_cast<std::uint32_t>(requests_.size() - 1)});
  }
  const RequestAccount account = closed_.back();
  closed_.pop_back();
  Request& opened = requests_[account.value()];
  opened = Request{};
  opened.tenant_id = id;
  opened.tenant = &holder;
  opened.held.since = now_;
  opened.reserved.since = now_;
  opened.of_scopes.since = now_;
  opened.split.since = now_;
  opened.open = true;
  ++holder.open_requests;
  return account;
}

Statement Ledger::close(RequestAccount account) {
  const auto timed = timer_.call();
  Request& closing = request(account);
  KVL_CHECK_EQ(closing.held.balance, kNone);
  KVL_CHECK_EQ(closing.reserved.balance, kNone);
  KVL_CHECK_EQ(closing.split.balance, kNone);
  KVL_CHECK_EQ(closing.of_scopes.balance, kNone);
  const BlockNanoseconds held = closing.held.integral + closing.split_time;
  // Who leaves last pays what could not be divided, which may be a few nanoseconds of others'.
  const BlockNanoseconds whole = std::max(closing.split.integral, closing.split_time);
  closing.tenant->closed_time += held;
  --closing.tenant->open_requests;
  closing.open = false;
  closed_.push_back(account);
  return Statement{closing.tenant_id,          held,
                   closing.reserved.integral,  closing.of_scopes.integral,
                   whole - closing.split_time, closing.held_peak};
}

void Ledger::reserve(RequestAccount account, BlockCount count) {
  const auto timed = timer_.call();
  KVL_CHECK_GE(count, kNone);
  move(BlockState::kFree, BlockState::kReserved, count);
  request(account).reserved.post(count, now_);
  request(account).tenant->reserved.post(count, now_);
}

void Ledger::forfeit(RequestAccount account, BlockCount count) {
  const auto timed = timer_.call();
  KVL_CHECK_GE(count, kNone);
  request(account).reserved.post(kNone - count, now_);
  request(account).tenant->reserved.post(kNone - count, now_);
  move(BlockState::kReserved, BlockState::kFree, count);
}

void Ledger::acquire(RequestAccount account, BlockId block) {
  const auto timed = timer_.call();
  Owner& owner = checked_at(owners_, block.value());
  KVL_CHECK_EQ(owner.state, BlockState::kFree);
  Request& holder = request(account);
  holder.reserved.post(kNone - kOne, now_);
  holder.tenant->reserved.post(kNone - kOne, now_);
  move(BlockState::kReserved, BlockState::kHeld, kOne);
  hold(holder, kOne);
  owner.state = BlockState::kHeld;
  owner.holding = Holding::kAlone;
  owner.account = account;
  owner.tenant = holder.tenant;
}

Nanoseconds Ledger::join(RequestAccount account, BlockId block, std::uint32_t references) {
  const auto timed = timer_.call();
  Owner& owner = checked_at(owners_, block.value());
  Request& joining = request(account);
  const bool of_scope = owner.tenant != nullptr && is_shared(ScopeId{owner.tenant->id.value()});
  if (owner.state == BlockState::kCached) {
    KVL_CHECK_EQ(references, 0U);
    put(owner, BlockState::kHeld);
    owner.holding = of_scope ? Holding::kScope : Holding::kAlone;
    owner.account = account;
    if (!of_scope) {
      KVL_CHECK(owner.tenant == joining.tenant);
      hold(joining, kOne);
      return 0;
    }
    owner.tenant->held.post(kOne, now_);
  }
  KVL_CHECK_EQ(owner.state, BlockState::kHeld);
  if (owner.holding == Holding::kScope) {
    joining.of_scopes.post(kOne, now_);
    return 0;
  }
  KVL_CHECK(owner.tenant == joining.tenant);
  if (owner.holding == Holding::kAlone) {
    if (owner.account == account) {
      return 0;  // another of its samples
    }
    Request& alone = request(owner.account);
    alone.held.post(kNone - kOne, now_);
    alone.split.post(BlockCount{references}, now_);
    alone.held_peak = std::max(alone.held_peak, alone.held.balance + alone.split.balance);
    owner.holding = Holding::kSplit;
    owner.split = SplitTime(references, now_);
  }
  joining.split.post(kOne, now_);
  joining.held_peak = std::max(joining.held_peak, joining.held.balance + joining.split.balance);
  return owner.split.join(now_);
}

void Ledger::leave(RequestAccount account, BlockId block, Nanoseconds stamp) {
  const auto timed = timer_.call();
  end_reference(account, held(block), stamp);
}

void Ledger::release(RequestAccount account, BlockId block, Nanoseconds stamp) {
  const auto timed = timer_.call();
  take_from_holder(account, block, stamp, BlockState::kFree);
}

void Ledger::retire(RequestAccount account, BlockId block, Nanoseconds stamp) {
  const auto timed = timer_.call();
  take_from_holder(account, block, stamp, BlockState::kReleasing);
}

void Ledger::cache(RequestAccount account, BlockId block, Nanoseconds stamp) {
  const auto timed = timer_.call();
  take_from_holder(account, block, stamp, BlockState::kCached);
}

void Ledger::settle(BlockId block, bool cached) {
  const auto timed = timer_.call();
  Owner& owner = checked_at(owners_, block.value());
  KVL_CHECK_EQ(owner.state, BlockState::kReleasing);
  put(owner, cached ? BlockState::kCached : BlockState::kFree);
}

void Ledger::evict(BlockId block) {
  const auto timed = timer_.call();
  Owner& owner = checked_at(owners_, block.value());
  KVL_CHECK_EQ(owner.state, BlockState::kCached);
  put(owner, BlockState::kFree);
}

void Ledger::give(RequestAccount account, BlockId block, TenantId scope, std::uint32_t references) {
  const auto timed = timer_.call();
  Owner& owner = held(block);
  KVL_CHECK(owner.holding == Holding::kAlone);
  KVL_CHECK_EQ(owner.account, account);
  KVL_CHECK(is_shared(ScopeId{scope.value()}));
  Request& giving = request(account);
  hold(giving, kNone - kOne);
  giving.of_scopes.post(BlockCount{references}, now_);
  owner.holding = Holding::kScope;
  owner.tenant = &tenants_.at(scope);
  owner.tenant->held.post(kOne, now_);
}

void Ledger::hold_for_scope(BlockId block) {
  const auto timed = timer_.call();
  Owner& owner = checked_at(owners_, block.value());
  KVL_CHECK_EQ(owner.state, BlockState::kCached);
  KVL_CHECK(is_shared(ScopeId{owner.tenant->id.value()}));
  put(owner, BlockState::kHeld);
  owner.holding = Holding::kScope;
  owner.tenant->held.post(kOne, now_);
}

void Ledger::end_hold_for_scope(BlockId block, bool releasing) {
  const auto timed = timer_.call();
  Owner& owner = held(block);
  KVL_CHECK(owner.holding == Holding::kScope);
  owner.tenant->held.post(kNone - kOne, now_);
  put(owner, releasing ? BlockState::kReleasing : BlockState::kCached);
}

void Ledger::account(TenantId id) {
  const auto timed = timer_.call();
  tenant(id);
}

BlockCount Ledger::live(TenantId id) const noexcept {
  const auto found = tenants_.find(id);
  return found == tenants_.end() ? kNone
                                 : found->second.held.balance + found->second.reserved.balance;
}

Balances Ledger::balances() const noexcept {
  Balances balances;
  for (std::size_t i = 0; i < kBlockStates; ++i) {
    balances.blocks[i] = state_[i].balance;
  }
  return balances;
}

BlockNanoseconds Ledger::time_in(BlockState state) const noexcept {
  return state_[static_cast<std::size_t>(state)].integral_at(now_);
}

BlockCount Ledger::held_by(RequestAccount account) const {
  return request(account).held.balance;
}

BlockCount Ledger::reserved_by(RequestAccount account) const {
  return request(account).reserved.balance;
}

TenantStatement Ledger::statement(TenantId id) const {
  const auto found = tenants_.find(id);
  if (found == tenants_.end()) {
    return TenantStatement{};
  }
  const Tenant& tenant = found->second;
  TenantStatement statement;
  statement.held = tenant.held.balance;
  statement.reserved = tenant.reserved.balance;
  statement.cached = tenant.cached.balance;
  statement.held_time = tenant.held.integral_at(now_);
  statement.reserved_time = tenant.reserved.integral_at(now_);
  statement.cached_time = tenant.cached.integral_at(now_);
  statement.closed_time = tenant.closed_time;
  statement.open_requests = tenant.open_requests;
  return statement;
}

std::vector<TenantId> Ledger::tenants() const {
  std::vector<TenantId> ids;
  for (const auto& [id, unused] : tenants_) {
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

BlockState Ledger::state_of(BlockId block) const {
  return checked_at(owners_, block.value()).state;
}

std::optional<RequestAccount> Ledger::holder_of(BlockId block) const {
  const Owner& owner = checked_at(owners_, block.value());
  const bool is_alone = owner.state == BlockState::kHeld && owner.holding == Holding::kAlone;
  return is_alone ? std::optional(owner.account) : std::nullopt;
}

std::optional<TenantId> Ledger::owner_of(BlockId block) const {
  const Owner& owner = checked_at(owners_, block.value());
  return owner.tenant == nullptr ? std::nullopt : std::optional(owner.tenant->id);
}

Ledger::Request& Ledger::request(RequestAccount account) {
  Request& found = checked_at(requests_, account.value());
  KVL_CHECK(found.open);
  return found;
}

const Ledger::Request& Ledger::request(RequestAccount account) const {
  const Request& found = checked_at(requests_, account.value());
  KVL_CHECK(found.open);
  return found;
}

Ledger::Tenant& Ledger::tenant(TenantId id) {
  const auto [entry, inserted] = tenants_.try_emplace(id);
  if (inserted) {
    entry->second.id = id;
    for (Account* account : {&entry->second.held, &entry->second.reserved, &entry->second.cached}) {
      account->since = now_;
    }
  }
  return entry->second;
}

void Ledger::move(BlockState from, BlockState to, BlockCount count) {
  at(from).post(kNone - count, now_);
  at(to).post(count, now_);
}

void Ledger::hold(Request& holder, BlockCount change) {
  holder.held.post(change, now_);
  holder.held_peak = std::max(holder.held_peak, holder.held.balance + holder.split.balance);
  holder.tenant->held.post(change, now_);
}

Ledger::Owner& Ledger::held(BlockId block) {
  Owner& owner = checked_at(owners_, block.value());
  KVL_CHECK_EQ(owner.state, BlockState::kHeld);
  return owner;
}

// What one reference less means for the request that had it; not for who holds the block.
void Ledger::end_reference(RequestAccount account, Owner& owner, Nanoseconds stamp) {
  Request& leaving = request(account);
  switch (owner.holding) {
    case Holding::kAlone:
      KVL_CHECK_EQ(owner.account, account);
      return;
    case Holding::kSplit:
      KVL_CHECK(owner.tenant == leaving.tenant);
      KVL_CHECK_GT(leaving.split.balance, kNone);
      leaving.split.post(BlockCount{-1}, now_);
      leaving.split_time += static_cast<BlockNanoseconds>(owner.split.leave(stamp, now_));
      return;
    case Holding::kScope:
      leaving.of_scopes.post(kNone - kOne, now_);
      return;
  }
}

void Ledger::take_from_holder(RequestAccount account, BlockId block, Nanoseconds stamp,
                              BlockState to) {
  Owner& owner = held(block);
  end_reference(account, owner, stamp);
  if (owner.holding == Holding::kAlone) {
    hold(request(account), kNone - kOne);
  } else {
    KVL_CHECK(owner.holding != Holding::kSplit || owner.split.holders() == 0);
    owner.tenant->held.post(kNone - kOne, now_);
  }
  put(owner, to);
}

// Moves a block that nobody holds; its owner remembers whose it is until it is free.
void Ledger::put(Owner& owner, BlockState to) {
  if (owner.state == BlockState::kCached) {
    owner.tenant->cached.post(kNone - kOne, now_);
  }
  move(owner.state, to, kOne);
  owner = Owner{to, Holding::kAlone, RequestAccount{},
                to == BlockState::kFree ? nullptr : owner.tenant, SplitTime{}};
  if (to == BlockState::kCached) {
    owner.tenant->cached.post(kOne, now_);
  }
}

std::optional<std::string> Ledger::audit() const {
  if (auto wrong = audit_conservation()) {
    return wrong;
  }
  if (auto wrong = audit_blocks()) {
    return wrong;
  }
  if (auto wrong = audit_tenants()) {
    return wrong;
  }
  return audit_tenants_time();
}

std::optional<std::string> Ledger::audit_conservation() const {
  BlockCount sum;
  BlockNanoseconds integral = 0;
  for (const Account& account : state_) {
    sum += account.balance;
    integral += account.integral_at(now_);
  }
  if (sum != total_) {
    return disagree("sum of balances", total_.value(), sum.value());
  }
  const BlockNanoseconds expected = static_cast<BlockNanoseconds>(total_.value()) *
                                    static_cast<BlockNanoseconds>(now_ - opened_at_);
  if (integral != expected) {
    return "sum of block-time is not blocks x time, off by " +
           std::to_string(static_cast<std::int64_t>(integral - expected)) + " block-nanoseconds";
  }
  return std::nullopt;
}

std::optional<std::string> Ledger::audit_blocks() const {
  std::array<std::int64_t, kBlockStates> found{};
  std::vector<std::int64_t> alone(requests_.size());
  for (const Owner& owner : owners_) {
    ++found[static_cast<std::size_t>(owner.state)];
    if (owner.state == BlockState::kHeld && owner.holding == Holding::kAlone) {
      ++alone[owner.account.value()];
    }
  }
  std::int64_t reserved = 0;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (alone[i] != (requests_[i].open ? requests_[i].held.balance.value() : 0)) {
      return disagree("held by a request", requests_[i].held.balance.value(), alone[i]);
    }
    reserved += requests_[i].open ? requests_[i].reserved.balance.value() : 0;
  }
  const Balances booked = balances();
  if (booked[BlockState::kReserved].value() != reserved) {
    return disagree("reserved", booked[BlockState::kReserved].value(), reserved);
  }
  // A reserved block has no name yet: among the blocks it is one of the free ones.
  if (booked[BlockState::kFree].value() + reserved != found[0]) {
    return disagree("free", booked[BlockState::kFree].value() + reserved, found[0]);
  }
  for (const BlockState state : {BlockState::kHeld, BlockState::kCached, BlockState::kReleasing}) {
    const std::int64_t counted = found[static_cast<std::size_t>(state)];
    if (booked[state].value() != counted) {
      return disagree("blocks in one state", booked[state].value(), counted);
    }
  }
  return std::nullopt;
}

// What the blocks and the open requests say of each tenant and scope.
std::optional<std::string> Ledger::audit_tenants() const {
  struct Sum {
    std::int64_t held = 0;
    std::int64_t cached = 0;
    std::int64_t split = 0;       // holders, by the blocks
    std::int64_t references = 0;  // the same, by the requests
    BlockCount reserved;
    std::int64_t open = 0;
    BlockNanoseconds time = 0;
  };
  std::unordered_map<TenantId, Sum> sums;
  for (const Owner& owner : owners_) {
    if (owner.tenant == nullptr) {
      continue;
    }
    Sum& sum = sums[owner.tenant->id];
    sum.held += owner.state == BlockState::kHeld ? 1 : 0;
    sum.cached += owner.state == BlockState::kCached ? 1 : 0;
    if (owner.state == BlockState::kHeld && owner.holding == Holding::kSplit) {
      sum.split += owner.split.holders();
      sum.time += static_cast<BlockNanoseconds>(owner.split.unpaid(now_));
    }
  }
  for (const Request& request : requests_) {
    if (request.open) {
      Sum& sum = sums[request.tenant_id];
      sum.reserved += request.reserved.balance;
      ++sum.open;
      sum.references += request.split.balance.value();
      sum.time += request.held.integral_at(now_) + request.split_time;
    }
  }
  for (const auto& [id, tenant] : tenants_) {
    const Sum& sum = sums[id];
    if (tenant.held.balance.value() != sum.held) {
      return disagree("held by a tenant", tenant.held.balance.value(), sum.held);
    }
    if (tenant.cached.balance.value() != sum.cached) {
      return disagree("cached of a tenant", tenant.cached.balance.value(), sum.cached);
    }
    if (tenant.reserved.balance != sum.reserved) {
      return disagree("reserved by a tenant", tenant.reserved.balance.value(),
                      sum.reserved.value());
    }
    if (tenant.open_requests != sum.open) {
      return disagree("open requests of a tenant", tenant.open_requests, sum.open);
    }
    if (sum.split != sum.references) {
      return disagree("holders of shared blocks", sum.references, sum.split);
    }
    if (!is_shared(ScopeId{id.value()}) &&
        tenant.held.integral_at(now_) != sum.time + tenant.closed_time) {
      return "block-time of tenant " + std::to_string(id.value()) +
             " is not the sum of its requests' block-time";
    }
  }
  return std::nullopt;
}

// What tenants and scopes had of each state adds up to what the pool had.
std::optional<std::string> Ledger::audit_tenants_time() const {
  std::array<BlockNanoseconds, kBlockStates> sums{};
  for (const auto& [id, tenant] : tenants_) {
    sums[static_cast<std::size_t>(BlockState::kReserved)] += tenant.reserved.integral_at(now_);
    sums[static_cast<std::size_t>(BlockState::kHeld)] += tenant.held.integral_at(now_);
    sums[static_cast<std::size_t>(BlockState::kCached)] += tenant.cached.integral_at(now_);
  }
  for (const BlockState state : {BlockState::kReserved, BlockState::kHeld, BlockState::kCached}) {
    if (sums[static_cast<std::size_t>(state)] != time_in(state)) {
      return "block-time of all tenants and scopes in state " +
             std::to_string(static_cast<int>(state)) + " is not the pool's";
    }
  }
  return std::nullopt;
}

}  // namespace kvledger
