#include "core/books.h"

#include <algorithm>

#include "core/check.h"

namespace kvledger {
namespace {

AccountRow row_of(TenantId id, const TenantStatement& statement) {
  const BlockTime held = to_block_time(statement.held_time);
  const BlockTime reserved = to_block_time(statement.reserved_time);
  const BlockTime cached = to_block_time(statement.cached_time);
  const BlockTime closed = to_block_time(statement.closed_time);
  AccountRow row;
  row.account = id.value();
  row.open_requests = statement.open_requests;
  row.held = statement.held.value();
  row.reserved = statement.reserved.value();
  row.cached = statement.cached.value();
  row.held_seconds = held.seconds;
  row.held_nanos = held.nanos;
  row.reserved_seconds = reserved.seconds;
  row.reserved_nanos = reserved.nanos;
  row.cached_seconds = cached.seconds;
  row.cached_nanos = cached.nanos;
  row.closed_seconds = closed.seconds;
  row.closed_nanos = closed.nanos;
  return row;
}

}  // namespace

Books books_of(const Ledger& ledger) {
  Books books;
  books.elapsed = ledger.now() - ledger.opened_at();
  const Balances balances = ledger.balances();
  for (std::size_t i = 0; i < kBlockStates; ++i) {
    const BlockTime time = to_block_time(ledger.time_in(static_cast<BlockState>(i)));
    books.states.push_back(StateRow{balances.blocks[i].value(), time.seconds, time.nanos, 0});
  }
  const std::vector<TenantId> ids = ledger.tenants();
  books.accounts.reserve(ids.size());
  for (const TenantId id : ids) {
    books.accounts.push_back(row_of(id, ledger.statement(id)));
  }
  return books;
}

std::int64_t empty_slots(const Sequence& running, std::int32_t slots_per_block,
                         const BlockTables& tables, const BlockPool& pool) {
  KVL_CHECK(running.state == Sequence::State::kRunning);
  const std::int64_t slots = slots_per_block;
  const auto stored = [&](const Sequence& sequence, std::int64_t index) {
    return std::clamp<std::int64_t>(sequence.computed - index * slots, 0, slots);
  };
  std::int64_t empty = 0;
  for (std::int64_t i = running.computed / slots; i < tables.length(running.row).value(); ++i) {
    const BlockId block = tables.at(running.row, i);
    std::int64_t most = stored(running, i);
    bool counts = true;
    if (pool.references(block) > 1) {
      for (const Sequence* other : running.request->samples) {
        if (other == &running || other->state != Sequence::State::kRunning ||
            tables.length(other->row).value() <= i || tables.at(other->row, i) != block) {
          continue;
        }
        // Where one is past the block, it is full and there is nothing to count.
        counts = counts && running.id < other->id;
        most = std::max(most, stored(*other, i));
      }
    }
    empty += counts ? slots - most : 0;
  }
  return empty;
}

}  // namespace kvledger
