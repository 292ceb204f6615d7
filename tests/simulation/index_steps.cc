// The steps of the model, and how requests end.

#include <algorithm>
#include <utility>

#include "core/make_room.h"
#include "tests/simulation/index_operations.h"

namespace kvledger::simulation {

void IndexOperations::open_step() {
  doing_ = "open a step";
  cache_.keep_within_shares();
  hear();
  model_.index.keep_within_shares();
  for (const std::uint64_t id : step_) {
    const Sequence& sequence = *live_.at(id).sequence;
    step_is_open_ = true;
    live_.at(id).sequence->in_step = sequence.request->in_step = true;
    model_.in_step.insert(reader(sequence).request);
  }
  if (step_is_open_) {
    pool_.open_step();
    model_.books.open_step();
  }
}

void IndexOperations::commit() {
  doing_ = "commit";
  step_is_open_ = false;
  pool_.settle();
  model_.books.settle();
  model_.in_step.clear();
  for (auto& [id, live] : live_) {
    live.sequence->in_step = live.sequence->request->in_step = false;
    live.planned = false;
  }
  check();
  for (const std::uint64_t id : std::exchange(step_, {})) {
    if (live_.contains(id)) {
      commit(live_.at(id), std::exchange(live_.at(id).chunk, 0));
      check();
    }
  }
  doing_ = "keep within shares";
  cache_.keep_within_shares();
  hear();
  model_.index.keep_within_shares();
  if (random_.chance(10)) {
    purge();
  }
  exchange();
}

void IndexOperations::commit(Live& live, std::int64_t tokens) {
  Sequence& sequence = *live.sequence;
  ReaderModel::Reader& running = reader(sequence);
  const bool has_output = tokens == sequence.pending();
  sequence.computed += tokens;
  running.computed += tokens;
  make_room(sequence.path, static_cast<std::size_t>(sequence.computed / world_.slots));
  if (has_output && random_.chance(20)) {
    doing_ = "discard";
    cache_.discard(*sequence.request);
    model_.discard(running.request);
    end_request(running.request);
    return;
  }
  doing_ = "insert";
  cache_.insert(sequence, [&](std::int64_t index) { return tables_.at(sequence.row, index); });
  model_.insert(running, sequence.path.capacity());
  for (const CacheSlot slot : std::exchange(heard_.entered, {})) {
    const auto entry = std::ranges::find(sequence.path, slot,
                                         [](const PathEntry& known) { return known.node.slot; });
    expect(entry != sequence.path.end(), "a block entered that is not its sequence's");
    block_at_[slot] = tables_.at(sequence.row, entry - sequence.path.begin()).value();
  }
  if (!has_output) {
    return;
  }
  const Token token = static_cast<Token>(random_.between(2, 3));
  sequence.tokens.push_back(token);
  running.tokens.push_back(token);
  if (sequence.token_count() >= world_.blocks * world_.slots || random_.chance(250)) {
    end(running.id, true);
  }
}

// What others computed too, and put into the index before, takes the place of a sequence's own.
void IndexOperations::exchange() {
  doing_ = "exchange";
  for (auto& [id, live] : live_) {
    expect_equal("the first block computed twice", live.sequence->twice_from,
                 reader(*live.sequence).twice_from);
    if (live.sequence->twice_from >= 0) {
      blocks_.exchange_twice(*live.sequence, plan_);
      model_.exchange_twice(reader(*live.sequence));
    }
  }
}

void IndexOperations::end(std::uint64_t id, bool as_planned) {
  doing_ = "end";
  ended_ = std::move(live_.extract(id).mapped().sequence);
  Sequence& sequence = *ended_;
  ReaderModel::Reader& reading = reader(sequence);
  const bool ran = sequence.state == Sequence::State::kRunning;
  if (ran) {
    blocks_.give_back(sequence);
    model_.give_back(reading);
  }
  sequence.state = Sequence::State::kEnded;
  std::erase(sequence.request->samples, &sequence);
  if (ran && as_planned && sequence.scopes.stays && !step_is_open_) {
    const std::int64_t before = cache_.staying();
    cache_.stay(sequence);
    model_.stay(reading);
    outcome_.stayed += cache_.staying() - before;
  }
  outcome_.found_own += reading.reused_own;
  outcome_.found_shared += reading.reused_shared;
  const std::uint64_t request = reading.request;
  model_.readers.erase(id);
  if (sequence.request->samples.empty()) {
    check_statement(sequence, request);
  }
}

void IndexOperations::end_request(std::uint64_t request) {
  std::vector<std::uint64_t> ids;
  for (const auto& [id, live] : live_) {
    if (live.sequence->request->id.value() == request) {
      ids.push_back(id);
    }
  }
  for (const std::uint64_t id : ids) {
    end(id, false);
  }
}

// Everybody ends, and everything is purged: nothing is left.
void IndexOperations::end_all() {
  if (step_is_open_) {
    commit();
  }
  while (!live_.empty()) {
    tick();
    end(live_.begin()->first, false);
    check();
  }
  for (std::uint32_t tenant = 1; tenant <= kTenants; ++tenant) {
    for (std::uint32_t space = 0; space < 2; ++space) {
      const ScopeId scope = own_scope(tenant, space);
      expect_equal("blocks purged", cache_.purge(scope), model_.purge(scope.value()));
    }
  }
  for (const std::uint32_t scope : {kGroup, kPublic}) {
    expect_equal("blocks purged", cache_.purge(ScopeId{scope}), model_.purge(scope));
  }
  check();
  audit();
  expect_equal("blocks free at the end", ledger_.free().value(), world_.blocks);
  expect_equal("nodes left at the end", model_.index.nodes(), 0);
}

}  // namespace kvledger::simulation
