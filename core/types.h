// Numbers that cannot be mixed up: an id, a count and a size of bytes are different types.
//
// Ids only compare. Quantities of one kind also add and subtract among themselves. Conversion in
// either direction is written out: `BlockCount{7}`, `count.value()`. All are trivially copyable
// and cost what their representation costs. Safe to use from any thread.

#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvledger {

template <class Tag, class Rep>
class Id {
 public:
  using Representation = Rep;

  constexpr Id() noexcept = default;
  constexpr explicit Id(Rep value) noexcept : value_(value) {}

  constexpr Rep value() const noexcept { return value_; }
  friend constexpr auto operator<=>(Id, Id) noexcept = default;

 private:
  Rep value_ = 0;
};

template <class Tag, class Rep>
class Quantity {
 public:
  using Representation = Rep;

  constexpr Quantity() noexcept = default;
  constexpr explicit Quantity(Rep value) noexcept : value_(value) {}

  constexpr Rep value() const noexcept { return value_; }
  friend constexpr auto operator<=>(Quantity, Quantity) noexcept = default;

  constexpr Quantity& operator+=(Quantity other) noexcept {
    value_ += other.value_;
    return *this;
  }
  constexpr Quantity& operator-=(Quantity other) noexcept {
    value_ -= other.value_;
    return *this;
  }
  friend constexpr Quantity operator+(Quantity a, Quantity b) noexcept { return a += b; }
  friend constexpr Quantity operator-(Quantity a, Quantity b) noexcept { return a -= b; }

 private:
  Rep value_ = 0;
};

// One block of the pool, from 0.
using BlockId = Id<struct BlockIdTag, std::uint32_t>;
// One sequence, named by the service; unique for the life of the process.
using SequenceId = Id<struct SequenceIdTag, std::uint64_t>;
// Whom blocks are booked to; interned by the service.
using TenantId = Id<struct TenantIdTag, std::uint32_t>;
// Tenants from this one on are the server itself: what it tries and what it computes for all.
constexpr TenantId kServerTenants{0x7ffffff0};
// One request's line in the ledger.
using RequestAccount = Id<struct RequestAccountTag, std::uint32_t>;
// One row of the block tables.
using TableRow = Id<struct TableRowTag, std::uint32_t>;
// Who may reuse a prefix; interned by the service. A scope that several tenants may begin their own
// prompts with has the highest bit set.
using ScopeId = Id<struct ScopeIdTag, std::uint32_t>;
constexpr bool is_shared(ScopeId scope) noexcept {
  return scope.value() >> 31 != 0;
}
// To whom blocks of the prefix index belong: a tenant, or the account of a scope that several
// share; interned by the service.
using CacheOwner = Id<struct CacheOwnerTag, std::uint32_t>;
// One step of the model, from 1.
using StepId = Id<struct StepIdTag, std::uint64_t>;

using BlockCount = Quantity<struct BlockCountTag, std::int64_t>;
using ByteCount = Quantity<struct ByteCountTag, std::int64_t>;

// A token of the model's vocabulary, as it lies in plans and kernels.
using Token = std::int32_t;

// A point of the caller's monotonic clock, and a length of it, in nanoseconds. The core reads no
// clock: time is handed in, so a simulation replays it exactly.
using Nanoseconds = std::int64_t;

}  // namespace kvledger

template <class Tag, class Rep>
struct std::hash<kvledger::Id<Tag, Rep>> {
  std::size_t operator()(kvledger::Id<Tag, Rep> id) const noexcept {
    return std::hash<Rep>{}(id.value());
  }
};
