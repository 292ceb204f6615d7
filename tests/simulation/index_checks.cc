// What is compared after every operation.

#include <algorithm>
#include <string>

#include "tests/simulation/index_operations.h"

namespace kvledger::simulation {
namespace {

constexpr std::uint32_t kOwners[] = {1, 2, 3, 0x80000001, 0x80000002};

// Block-nanoseconds need more bits than a number that is printed.
void expect_time(const char* what, BlockNanoseconds booked, BlockNanoseconds model) {
  if (booked != model) {
    const auto off = static_cast<std::int64_t>(booked - model);
    throw Violation(std::string(what) + ": off by " + std::to_string(off) + " block-nanoseconds");
  }
}

}  // namespace

void IndexOperations::check() {
  expect(model_.index.told.empty(), "a block was evicted without need");
  check_blocks();
  check_owners();
  check_readers();
  const PrefixCounts counts = cache_.counts();
  expect_equal("blocks evicted", counts.evicted, model_.index.evicted);
  expect_equal("blocks inserted", counts.inserted, model_.inserted);
  expect_equal("tokens reused", counts.reused_tokens, model_.reused);
  expect_equal("blocks of another owner", counts.foreign, 0);
  expect_equal("blocks that stay", cache_.staying(), model_.staying());
}

void IndexOperations::check_blocks() const {
  const BooksModel& books = model_.books;
  const Balances balances = ledger_.balances();
  expect_equal("free", balances[BlockState::kFree].value(), books.free());
  expect_equal("reserved", balances[BlockState::kReserved].value(), books.reserved());
  for (const BlockState state : {BlockState::kHeld, BlockState::kCached, BlockState::kReleasing}) {
    expect_equal("blocks in a state", balances[state].value(), books.count(state));
  }
  for (const auto& [state, time] : books.state_time) {
    expect_time("the pool's time in a state", ledger_.time_in(state), time);
  }
  for (std::uint32_t id = 0; id < books.blocks.size(); ++id) {
    const BooksModel::Block& block = books.blocks[id];
    const std::optional<TenantId> owner = ledger_.owner_of(BlockId{id});
    expect_equal("a block's state", static_cast<int>(ledger_.state_of(BlockId{id})),
                 static_cast<int>(block.state));
    expect_equal("a block's owner", owner ? owner->value() : 0, block.owner.value_or(0));
    expect_equal("a block's references", pool_.references(BlockId{id}), books.references(id));
    expect_equal("whether a block is kept", pool_.is_kept(BlockId{id}), block.kept);
    const std::optional<RequestAccount> holder = ledger_.holder_of(BlockId{id});
    expect_equal("whether a block is one request's", holder.has_value(),
                 block.state == BlockState::kHeld && !block.of_scope && !block.split);
  }
}

void IndexOperations::check_owners() const {
  const BooksModel& books = model_.books;
  for (const std::uint32_t id : kOwners) {
    const TenantStatement statement = ledger_.statement(TenantId{id});
    expect_equal("held by an owner", statement.held.value(), books.count(BlockState::kHeld, id));
    expect_equal("reserved by a tenant", statement.reserved.value(), books.reserved(id));
    expect_equal("cached of an owner", statement.cached.value(),
                 books.count(BlockState::kCached, id));
    const auto found = books.owners.find(id);
    const BooksModel::Owner owner =
        found == books.owners.end() ? BooksModel::Owner{} : found->second;
    expect_time("an owner's held time", statement.held_time, owner.held_time);
    expect_time("a tenant's reserved time", statement.reserved_time, owner.reserved_time);
    expect_time("an owner's cached time", statement.cached_time, owner.cached_time);
    expect_time("a tenant's closed time", statement.closed_time, owner.closed_time);
    expect_equal("open requests of a tenant", statement.open_requests,
                 std::ranges::count_if(books.requests, [id](const auto& entry) {
                   return entry.second.tenant == id;
                 }));
    if (!step_is_open_) {
      expect_equal("blocks that a tenant may still have", cache_.available(TenantId{id}).value(),
                   model_.index.available(id));
    }
  }
}

void IndexOperations::check_readers() {
  for (const auto& [id, live] : live_) {
    const Sequence& sequence = *live.sequence;
    const ReaderModel::Reader& expected = reader(sequence);
    expect_equal("held by a request alone", ledger_.held_by(sequence.account).value(),
                 model_.books.alone(expected.request));
    expect_equal("reserved by a request", ledger_.reserved_by(sequence.account).value(),
                 model_.books.requests.at(expected.request).reserved);
    expect_equal("reserved by a sequence", sequence.reservation.remaining().value(),
                 expected.reserved);
    expect_equal("computed", sequence.computed, expected.computed);
    expect_equal("reused since admitted", sequence.reused_now, expected.reused_now);
    expect_equal("reused of its own scope", sequence.reused_own, expected.reused_own);
    expect_equal("reused of a shared scope", sequence.reused_shared, expected.reused_shared);
    expect_equal("where its own scope begins", sequence.own_from, expected.own_from);
    expect_equal("the first block that it put in", sequence.filled_from, expected.filled_from);
    expect_equal("whether its path ends", sequence.path_ends, expected.path_ends);
    expect_equal("length of a path", sequence.path.size(), expected.path.size());
    for (std::size_t i = 0; i < expected.path.size(); ++i) {
      const auto known = nodes_.emplace(expected.path[i].id, sequence.path[i].node).first;
      expect(known->second == sequence.path[i].node, "a path leads to another node");
    }
    if (!expected.runs) {
      continue;
    }
    expect_equal("length of a table", tables_.length(sequence.row).value(), expected.table.size());
    for (std::size_t i = 0; i < expected.table.size(); ++i) {
      expect_equal("a block in a table",
                   tables_.at(sequence.row, static_cast<std::int64_t>(i)).value(),
                   expected.table[i]);
    }
  }
}

void IndexOperations::check_statement(const Sequence& ended, std::uint64_t request) {
  const Statement statement = ledger_.close(ended.account);
  const BooksModel::Request expected = model_.books.close(request);
  outcome_.split += expected.whole_time > expected.split_time ? 1 : 0;
  expect_equal("a statement's tenant", statement.tenant.value(), expected.tenant);
  expect_time("a request's held time", statement.held, expected.held_time);
  expect_time("a request's reserved time", statement.reserved, expected.reserved_time);
  expect_time("a request's time of scopes", statement.of_scopes, expected.scopes_time);
  expect_time("what a request saved by sharing", statement.saved,
              std::max(expected.whole_time, expected.split_time) - expected.split_time);
  expect_equal("a request's peak", statement.held_peak.value(), expected.peak);
}

void IndexOperations::audit() const {
  for (const auto& wrong : {ledger_.audit(), pool_.audit(), cache_.audit()}) {
    if (wrong) {
      throw Violation(*wrong);
    }
  }
}

}  // namespace kvledger::simulation
