#include "tests/simulation/books_model.h"

#include <algorithm>

#include "tests/simulation/random.h"

namespace kvledger::simulation {

BooksModel::BooksModel(std::int64_t total) : blocks(static_cast<std::size_t>(total)) {
  for (std::int64_t block = total; block-- > 0;) {
    free_.push_back(static_cast<std::uint32_t>(block));
  }
}

void BooksModel::tick(Nanoseconds elapsed) {
  const auto time = static_cast<Time>(elapsed);
  for (const BlockState state : {BlockState::kHeld, BlockState::kCached, BlockState::kReleasing}) {
    state_time[state] += static_cast<Time>(count(state)) * time;
  }
  state_time[BlockState::kReserved] += static_cast<Time>(reserved()) * time;
  state_time[BlockState::kFree] += static_cast<Time>(free()) * time;
  for (Block& block : blocks) {
    if (block.state == BlockState::kCached) {
      owners[*block.owner].cached_time += time;
    }
    if (block.state != BlockState::kHeld) {
      continue;
    }
    owners[*block.owner].held_time += time;
    if (block.of_scope) {
      for (const Reference& reference : block.references) {
        requests.at(reference.request).scopes_time += time;
      }
    } else if (block.split) {
      for (const Reference& reference : block.references) {
        requests.at(reference.request).whole_time += time;
      }
      block.undivided += time;
      divide(block);
    } else {
      requests.at(block.references.front().request).held_time += time;
    }
  }
  for (auto& [id, request] : requests) {
    request.reserved_time += static_cast<Time>(request.reserved) * time;
    owners[request.tenant].reserved_time += static_cast<Time>(request.reserved) * time;
  }
}

// Among those who have it now, also what could not be divided among more of them.
void BooksModel::divide(Block& block) {
  const Time each = block.undivided / block.references.size();
  for (Reference& reference : block.references) {
    reference.due += each;
    block.undivided -= each;
  }
}

BooksModel::Request BooksModel::close(std::uint64_t request) {
  const Request closed = requests.at(request);
  expect(closed.reserved == 0, "model: a request ends with blocks reserved");
  owners[closed.tenant].closed_time += closed.held_time;
  requests.erase(request);
  return closed;
}

void BooksModel::reserve(std::uint64_t request, std::int64_t count) {
  requests.at(request).reserved += count;
}

std::uint32_t BooksModel::acquire(std::uint64_t sequence, std::uint64_t request) {
  expect(!free_.empty(), "model: nothing is free");
  const std::uint32_t taken = free_.back();
  free_.pop_back();
  --requests.at(request).reserved;
  blocks[taken].state = BlockState::kHeld;
  blocks[taken].owner = requests.at(request).tenant;
  blocks[taken].references.push_back(Reference{sequence, request});
  note_peaks();
  return taken;
}

void BooksModel::join(std::uint64_t sequence, std::uint64_t request, std::uint32_t joined) {
  Block& block = blocks.at(joined);
  if (block.state == BlockState::kCached) {
    block.state = BlockState::kHeld;
    block.of_scope = is_shared(ScopeId{*block.owner});
  }
  expect(block.state == BlockState::kHeld, "model: what is joined is not there");
  expect(block.of_scope || *block.owner == requests.at(request).tenant,
         "model: what is joined is another's");
  if (block.split) {
    divide(block);
  }
  block.split = block.split || (!block.of_scope && !block.references.empty() &&
                                block.references.front().request != request);
  block.references.push_back(Reference{sequence, request});
  note_peaks();
}

void BooksModel::leave(std::uint64_t sequence, std::uint32_t left, bool in_step) {
  Block& block = blocks.at(left);
  const auto reference = std::ranges::find(block.references, sequence, &Reference::sequence);
  expect(reference != block.references.end(), "model: who leaves is not there");
  if (block.split) {
    divide(block);
    Request& request = requests.at(reference->request);
    const Time due = reference->due + (block.references.size() == 1 ? block.undivided : 0);
    request.held_time += due;
    request.split_time += due;
  }
  block.references.erase(reference);
  give_up(left, in_step);
}

// Lets a block go where it goes when nobody refers to it any more.
void BooksModel::give_up(std::uint32_t given, bool in_step) {
  Block& block = blocks.at(given);
  if (!block.references.empty() || block.scope_holds) {
    return;
  }
  const bool touched = in_step || block.kept || block.split || block.of_scope;
  block.split = block.of_scope = false;
  block.undivided = 0;
  if (step_is_open_ && touched) {
    block.state = BlockState::kReleasing;
    releasing_.push_back(given);
  } else if (block.kept) {
    block.state = BlockState::kCached;
  } else {
    set_free(given);
  }
}

void BooksModel::set_free(std::uint32_t block) {
  blocks.at(block) = Block{};
  free_.push_back(block);
}

void BooksModel::settle() {
  step_is_open_ = false;
  for (const std::uint32_t block : releasing_) {
    if (blocks[block].kept) {
      blocks[block].state = BlockState::kCached;
    } else {
      set_free(block);
    }
  }
  releasing_.clear();
}

void BooksModel::keep(std::uint32_t kept, std::uint32_t owner) {
  Block& block = blocks.at(kept);
  expect(!block.kept && !block.split && !block.of_scope, "model: what is kept is another's");
  block.kept = true;
  block.of_scope = is_shared(ScopeId{owner});
  block.owner = owner;
}

void BooksModel::drop(std::uint32_t dropped) {
  expect(blocks.at(dropped).kept, "model: what is dropped was not kept");
  blocks[dropped].kept = false;
  if (blocks[dropped].state == BlockState::kCached) {
    set_free(dropped);
  }
}

void BooksModel::hold_for_scope(std::uint32_t held) {
  Block& block = blocks.at(held);
  expect(is_shared(ScopeId{*block.owner}) && !block.scope_holds, "model: no scope can hold it");
  block.state = BlockState::kHeld;
  block.of_scope = block.scope_holds = true;
}

void BooksModel::end_hold_for_scope(std::uint32_t block) {
  expect(blocks.at(block).scope_holds, "model: no scope holds it");
  blocks[block].scope_holds = false;
  give_up(block, true);
}

std::int64_t BooksModel::count(BlockState state) const {
  return std::ranges::count(blocks, state, &Block::state);
}

std::int64_t BooksModel::count(BlockState state, std::uint32_t owner) const {
  return std::ranges::count_if(
      blocks, [&](const Block& block) { return block.state == state && block.owner == owner; });
}

std::int64_t BooksModel::reserved() const {
  std::int64_t sum = 0;
  for (const auto& [id, request] : requests) {
    sum += request.reserved;
  }
  return sum;
}

std::int64_t BooksModel::reserved(std::uint32_t tenant) const {
  std::int64_t sum = 0;
  for (const auto& [id, request] : requests) {
    sum += request.tenant == tenant ? request.reserved : 0;
  }
  return sum;
}

std::int64_t BooksModel::alone(std::uint64_t request) const {
  return std::ranges::count_if(blocks, [&](const Block& block) {
    return block.state == BlockState::kHeld && !block.of_scope && !block.split &&
           block.references.front().request == request;
  });
}

std::int64_t BooksModel::split(std::uint64_t request) const {
  std::int64_t sum = 0;
  for (const Block& block : blocks) {
    sum += block.split ? std::ranges::count(block.references, request, &Reference::request) : 0;
  }
  return sum;
}

std::int64_t BooksModel::references(std::uint32_t block) const {
  return static_cast<std::int64_t>(blocks.at(block).references.size()) +
         (blocks[block].scope_holds ? 1 : 0);
}

void BooksModel::note_peaks() {
  for (auto& [id, request] : requests) {
    request.peak = std::max(request.peak, alone(id) + split(id));
  }
}

}  // namespace kvledger::simulation
