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

Ledger::Ledger(BlockCount total, Nanoseconds now)
    : total_(total), opened_at_(now), now_(now), owners_(static_cast<std::size_t>(total.value())) {
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
  opened.open = true;
  return account;
}

Statement Ledger::close(RequestAccount account) {
  Request& closing = request(account);
  KVL_CHECK_EQ(closing.held.balance, kNone);
  KVL_CHECK_EQ(closing.reserved.balance, kNone);
  closing.tenant->closed_time += closing.held.integral;
  closing.open = false;
  closed_.push_back(account);
  return Statement{closing.tenant_id, closing.held.integral, closing.reserved.integral,
                   closing.held_peak};
}

void Ledger::reserve(RequestAccount account, BlockCount count) {
  KVL_CHECK_GE(count, kNone);
  move(BlockState::kFree, BlockState::kReserved, count);
  request(account).reserved.post(count, now_);
}

void Ledger::forfeit(RequestAccount account, BlockCount count) {
  KVL_CHECK_GE(count, kNone);
  request(account).reserved.post(kNone - count, now_);
  move(BlockState::kReserved, BlockState::kFree, count);
}

void Ledger::acquire(RequestAccount account, BlockId block) {
  Owner& owner = checked_at(owners_, block.value());
  KVL_CHECK_EQ(owner.state, BlockState::kFree);
  Request& holder = request(account);
  holder.reserved.post(kNone - kOne, now_);
  move(BlockState::kReserved, BlockState::kHeld, kOne);
  hold(holder, kOne);
  owner = Owner{BlockState::kHeld, account};
}

void Ledger::release(RequestAccount account, BlockId block) {
  take_from_holder(account, block, BlockState::kFree);
}

void Ledger::retire(RequestAccount account, BlockId block) {
  take_from_holder(account, block, BlockState::kReleasing);
}

void Ledger::settle(BlockId block) {
  Owner& owner = checked_at(owners_, block.value());
  KVL_CHECK_EQ(owner.state, BlockState::kReleasing);
  move(BlockState::kReleasing, BlockState::kFree, kOne);
  owner = Owner{};
}

Balances Ledger::balances() const noexcept {
  Balances balances;
  for (std::size_t i = 0; i < kBlockStates; ++i) {
    balances.blocks[i] = state_[i].balance;
  }
  return balances;
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
  return TenantStatement{tenant.held.balance, tenant.held.integral_at(now_), tenant.closed_time};
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
  return owner.state == BlockState::kHeld ? std::optional(owner.account) : std::nullopt;
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
    entry->second.held.since = now_;
  }
  return entry->second;
}

void Ledger::move(BlockState from, BlockState to, BlockCount count) {
  at(from).post(kNone - count, now_);
  at(to).post(count, now_);
}

void Ledger::hold(Request& holder, BlockCount change) {
  holder.held.post(change, now_);
  holder.held_peak = std::max(holder.held_peak, holder.held.balance);
  holder.tenant->held.post(change, now_);
}

void Ledger::take_from_holder(RequestAccount account, BlockId block, BlockState to) {
  Owner& owner = checked_at(owners_, block.value());
  KVL_CHECK_EQ(owner.state, BlockState::kHeld);
  KVL_CHECK_EQ(owner.account, account);
  hold(request(account), kNone - kOne);
  move(BlockState::kHeld, to, kOne);
  owner = Owner{to, RequestAccount{}};
}

std::optional<std::string> Ledger::audit() const {
  if (auto wrong = audit_conservation()) {
    return wrong;
  }
  if (auto wrong = audit_blocks()) {
    return wrong;
  }
  return audit_tenants();
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
  std::vector<std::int64_t> held(requests_.size());
  for (const Owner& owner : owners_) {
    ++found[static_cast<std::size_t>(owner.state)];
    if (owner.state == BlockState::kHeld) {
      ++held[owner.account.value()];
    }
  }
  std::int64_t reserved = 0;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    if (held[i] != (requests_[i].open ? requests_[i].held.balance.value() : 0)) {
      return disagree("held by a request", requests_[i].held.balance.value(), held[i]);
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

std::optional<std::string> Ledger::audit_tenants() const {
  struct Sum {
    BlockCount held;
    BlockNanoseconds time = 0;
  };
  std::unordered_map<TenantId, Sum> sums;
  for (const Request& request : requests_) {
    if (request.open) {
      sums[request.tenant_id].held += request.held.balance;
      sums[request.tenant_id].time += request.held.integral_at(now_);
    }
  }
  BlockCount held;
  for (const auto& [id, tenant] : tenants_) {
    const Sum& sum = sums[id];
    if (tenant.held.balance != sum.held) {
      return disagree("held by a tenant", tenant.held.balance.value(), sum.held.value());
    }
    if (tenant.held.integral_at(now_) != sum.time + tenant.closed_time) {
      return "block-time of tenant " + std::to_string(id.value()) +
             " is not the sum of its requests' block-time";
    }
    held += tenant.held.balance;
  }
  if (held != balances()[BlockState::kHeld]) {
    return disagree("held by all tenants", balances()[BlockState::kHeld].value(), held.value());
  }
  return std::nullopt;
}

}  // namespace kvledger
