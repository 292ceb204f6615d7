#include "tests/simulation/reader_model.h"

#include <algorithm>
#include <utility>

#include "tests/simulation/random.h"

namespace kvledger::simulation {

using Node = IndexModel::Node;
using Place = IndexModel::Place;

ReaderModel::Reader& ReaderModel::arrive(const Reader& reader) {
  Reader& arrived = readers[reader.id] = reader;
  arrived.own_from = border(arrived);
  return arrived;
}

std::int64_t ReaderModel::border(const Reader& reader) const {
  return reader.scopes.has_shared ? reader.scopes.shared_tokens / slots_ : 0;
}

std::uint32_t ReaderModel::scope_at(const Reader& reader, std::int64_t at) const {
  return (at < reader.own_from ? reader.scopes.shared : reader.scopes.own).value();
}

std::uint32_t ReaderModel::owner_at(const Reader& reader, std::int64_t at) const {
  const std::uint32_t scope = scope_at(reader, at);
  return is_shared(ScopeId{scope}) ? scope : reader.tenant;
}

Place ReaderModel::place_of(const Reader& reader, std::int64_t at) const {
  Place place;
  if (at > 0) {
    place = reader.path[static_cast<std::size_t>(at - 1)].place;
  }
  place.scopes.push_back(scope_at(reader, at));
  place.tokens.assign(reader.tokens.begin(), reader.tokens.begin() + (at + 1) * slots_);
  return place;
}

Node* ReaderModel::next_filled(const Reader& reader) {
  if (!reader.path.empty() && known(reader.path.back()) == nullptr) {
    return nullptr;
  }
  Node* const node = index.find(place_of(reader, static_cast<std::int64_t>(reader.path.size())));
  return node != nullptr && node->block ? node : nullptr;
}

// What was found before still counts where it still is; the rest is looked for. The part in the
// shared scope ends where that has no more, for whoever may not write there.
ReaderModel::Match ReaderModel::match(Reader& waiting, std::size_t room) {
  Match match;
  if (!waiting.scopes.reuses) {
    waiting.path.clear();
    return match;
  }
  std::size_t still = 0;
  while (still < waiting.path.size()) {
    const Node* const node = known(waiting.path[still]);
    if (node == nullptr || !node->block) {
      break;
    }
    ++still;
  }
  waiting.path.resize(still);
  if (static_cast<std::int64_t>(still) <= waiting.own_from) {
    waiting.own_from = border(waiting);
  }
  const auto count = static_cast<std::int64_t>(waiting.tokens.size());
  for (auto at = static_cast<std::int64_t>(still);
       (at + 1) * slots_ < count && waiting.path.size() < room; ++at) {
    const Node* node = next_filled(waiting);
    if (node == nullptr && at < waiting.own_from && !waiting.scopes.writes_shared) {
      waiting.own_from = at;
      node = next_filled(waiting);
    }
    if (node == nullptr) {
      break;
    }
    waiting.path.push_back(Entry{*node->place, node->id});
  }
  std::int64_t scopes_may_take = index.room_of_scopes();
  for (std::size_t at = 0; at < waiting.path.size(); ++at) {
    if (books.references(*known(waiting.path[at])->block) > 0) {
      continue;
    }
    if (is_shared(ScopeId{waiting.path[at].place.scopes.back()}) && scopes_may_take-- <= 0) {
      waiting.path.resize(at);
      break;
    }
    ++match.cached;
  }
  match.blocks = static_cast<std::int64_t>(waiting.path.size());
  const std::int64_t found = match.blocks * slots_;
  const std::vector<Token> rest(waiting.tokens.begin() + found,
                                waiting.tokens.begin() + std::min(count - 1, found + slots_));
  const Node* const last = waiting.path.empty() ? nullptr : known(waiting.path.back());
  const auto [source, tail] = index.likest(last, scope_at(waiting, match.blocks), rest);
  match.tail = tail;
  match.source = source == nullptr ? 0 : source->id;
  return match;
}

std::uint32_t ReaderModel::adopt(Reader& reader, std::int64_t at) {
  Node& node = *known(reader.path[static_cast<std::size_t>(at)]);
  index.pin(node);
  index.use(node);
  books.join(reader.id, reader.request, *node.block);
  count(reader, at, slots_);
  return *node.block;
}

void ReaderModel::count(Reader& reader, std::int64_t at, std::int64_t tokens) {
  reader.reused_now += tokens;
  reused += tokens;
  (is_shared(ScopeId{scope_at(reader, at)}) ? reader.reused_shared : reader.reused_own) += tokens;
}

void ReaderModel::begin(Reader& waiting, const Match& match, std::int64_t needed) {
  waiting.runs = true;
  for (std::int64_t at = 0; at < match.blocks; ++at) {
    waiting.table.push_back(adopt(waiting, at));
  }
  waiting.computed = match.blocks * slots_;
  Node* source = nullptr;
  if (match.tail > 0) {
    const Node* const last = waiting.path.empty() ? nullptr : known(waiting.path.back());
    const std::vector<Token> rest(waiting.tokens.begin() + waiting.computed,
                                  waiting.tokens.begin() + waiting.computed + match.tail);
    source = index.likest(last, scope_at(waiting, match.blocks), rest).first;
    index.pin(*source);
    index.use(*source);
  }
  expect(reserve(waiting, needed), "model: an admitted sequence finds no room");
  if (source != nullptr) {
    take(waiting);
    waiting.computed += match.tail;
    count(waiting, match.blocks, match.tail);
    index.unpin(*source);
  }
}

bool ReaderModel::reserve(Reader& running, std::int64_t count) {
  if (count > index.available(running.tenant)) {
    return false;
  }
  index.make_room(running.tenant, count);
  books.reserve(running.request, count);
  running.reserved += count;
  return true;
}

bool ReaderModel::must_copy(const Reader& reader) const {
  const bool has_siblings = std::ranges::any_of(readers, [&](const auto& entry) {
    return entry.second.request == reader.request && entry.first != reader.id;
  });
  const auto at = static_cast<std::size_t>(reader.computed / slots_);
  return has_siblings && at < reader.table.size() && books.references(reader.table[at]) > 1;
}

std::int64_t ReaderModel::missing(const Reader& running, std::int64_t tokens) const {
  return blocks_for(running.computed + tokens) - static_cast<std::int64_t>(running.table.size()) +
         (tokens > 0 && must_copy(running) ? 1 : 0);
}

// Another sample goes on with the block that this one would write into; its end is copied.
void ReaderModel::take(Reader& running) {
  const std::uint32_t block = books.acquire(running.id, running.request);
  --running.reserved;
  if (must_copy(running)) {
    std::uint32_t& shared = running.table[static_cast<std::size_t>(running.computed / slots_)];
    books.leave(running.id, std::exchange(shared, block));
  } else {
    running.table.push_back(block);
  }
}

void ReaderModel::share(const Reader& from, Reader& to, std::int64_t tokens, std::int64_t needed) {
  expect(reserve(to, needed), "model: an admitted sample finds no room");
  to.runs = true;
  to.path.clear();
  to.own_from = from.own_from;
  to.path_ends = from.path_ends;
  for (std::int64_t at = 0; at < blocks_for(tokens); ++at) {
    const auto place = static_cast<std::size_t>(at);
    const bool is_known = place < from.path.size();
    if (is_known && at == tokens / slots_) {
      to.table.push_back(books.acquire(to.id, to.request));  // a copy
      --to.reserved;
      break;
    }
    books.join(to.id, to.request, from.table[place]);
    to.table.push_back(from.table[place]);
    if (is_known) {
      if (Node* const node = known(from.path[place])) {
        index.pin(*node);
      }
      to.path.push_back(from.path[place]);
    }
  }
  to.computed = tokens;
}

bool ReaderModel::catch_up(Reader& running, std::size_t room) {
  bool has_caught_up = false;
  const auto count_of_tokens = static_cast<std::int64_t>(running.tokens.size());
  for (;;) {
    const auto at = static_cast<std::int64_t>(running.path.size());
    if (!running.scopes.reuses || running.path_ends || running.computed / slots_ != at ||
        (at + 1) * slots_ >= count_of_tokens || running.path.size() >= room) {
      return has_caught_up;
    }
    Node* const node = next_filled(running);
    if (node == nullptr || (is_shared(ScopeId{node->scope()}) && index.room_of_scopes() <= 0)) {
      return has_caught_up;
    }
    running.path.push_back(Entry{*node->place, node->id});
    const std::uint32_t block = adopt(running, at);
    if (at < static_cast<std::int64_t>(running.table.size())) {
      std::uint32_t& own = running.table[static_cast<std::size_t>(at)];
      books.leave(running.id, std::exchange(own, block));
    } else {
      running.table.push_back(block);
      if (running.reserved > 0) {
        --running.reserved;
        books.reserve(running.request, -1);
      }
    }
    running.computed = (at + 1) * slots_;
    has_caught_up = true;
  }
}

void ReaderModel::exchange_twice(Reader& running) {
  for (std::int64_t at = std::exchange(running.twice_from, -1);
       at >= 0 && at < static_cast<std::int64_t>(running.path.size()); ++at) {
    const auto place = static_cast<std::size_t>(at);
    const Node* const node = known(running.path[place]);
    std::uint32_t& own = running.table[place];
    if (node != nullptr && node->block && *node->block != own) {
      books.join(running.id, running.request, *node->block);
      books.leave(running.id, std::exchange(own, *node->block));
    }
  }
}

void ReaderModel::insert(Reader& running, std::size_t room) {
  while (running.scopes.keeps && !running.path_ends && running.path.size() < room &&
         (static_cast<std::int64_t>(running.path.size()) + 1) * slots_ <= running.computed) {
    running.path_ends = !insert_one(running);
  }
}

// False where the index cannot follow the sequence any further.
bool ReaderModel::insert_one(Reader& running) {
  const auto at = static_cast<std::int64_t>(running.path.size());
  const std::uint32_t block = running.table[static_cast<std::size_t>(at)];
  if (at < running.own_from && !running.scopes.writes_shared) {
    if (Node* const there = next_filled(running)) {
      index.pin(*there);
      running.twice_from = running.twice_from < 0 ? at : running.twice_from;
      running.path.push_back(Entry{*there->place, there->id});
      return true;
    }
    running.own_from = at;
  }
  if (at > 0 && known(running.path.back()) == nullptr) {
    return false;
  }
  const std::uint32_t owner = owner_at(running, at);
  Node* const node = index.place(place_of(running, at), owner);
  if (node == nullptr) {
    return false;
  }
  if (!node->block) {
    if (books.blocks[block].kept || is_beyond_a_sibling(running, block) ||
        (is_shared(ScopeId{node->scope()}) && !index.may_give(running.tenant))) {
      index.unpin(*node);
      return false;
    }
    index.fill(*node, block);
    books.keep(block, owner);
    ++inserted;
    running.filled_from = running.filled_from < 0 ? at : running.filled_from;
  } else if (*node->block != block) {
    running.twice_from = running.twice_from < 0 ? at : running.twice_from;
  }
  running.path.push_back(Entry{*node->place, node->id});
  return true;
}

bool ReaderModel::is_beyond_a_sibling(const Reader& reader, std::uint32_t block) const {
  return books.references(block) > 1 && std::ranges::any_of(readers, [&](const auto& entry) {
           const Reader& other = entry.second;
           return other.request == reader.request && other.id != reader.id && other.runs &&
                  (other.path_ends || other.path.size() > reader.path.size());
         });
}

// Its end before its beginning, so that its end goes first.
void ReaderModel::give_back(Reader& running) {
  books.reserve(running.request, -std::exchange(running.reserved, 0));
  for (const std::uint32_t block : running.table) {
    books.leave(running.id, block, in_step.contains(running.request));
  }
  for (auto entry = running.path.rbegin(); entry != running.path.rend(); ++entry) {
    if (Node* const node = known(*entry)) {
      index.unpin(*node);
    }
  }
  running.table.clear();
  running.runs = false;
  running.computed = 0;
  running.filled_from = running.twice_from = -1;
  running.path_ends = false;
  running.reused_now = 0;
}

void ReaderModel::stay(const Reader& ended) {
  for (std::size_t at = 0;
       at < std::min(ended.path.size(), static_cast<std::size_t>(ended.prompt / slots_)); ++at) {
    Node* const node = known(ended.path[at]);
    if (node == nullptr || !node->block) {
      return;
    }
    if (!books.blocks[*node->block].scope_holds) {
      index.pin(*node);
      books.hold_for_scope(*node->block);
      staying_.push_back(Staying{ended.scopes.own.value(), ended.path[at], *node->block});
    }
  }
}

// What a request's samples put in, or began with in their own scope, and all below it.
void ReaderModel::discard(std::uint64_t request) {
  for (auto& [id, reader] : readers) {
    if (reader.request != request || !reader.runs) {
      continue;
    }
    std::int64_t first = reader.own_from;
    if (reader.filled_from >= 0) {
      first = std::min(first, reader.filled_from);
    }
    if (first < static_cast<std::int64_t>(reader.path.size())) {
      if (Node* const node = known(reader.path[static_cast<std::size_t>(first)])) {
        index.purge(*node);
      }
    }
  }
}

std::int64_t ReaderModel::purge(std::uint32_t scope) {
  for (auto& [id, reader] : readers) {
    PrefixScopes& scopes = reader.scopes;
    if (scopes.own.value() == scope) {
      scopes.keeps = scopes.reuses = false;
    }
    if (scopes.has_shared && scopes.shared.value() == scope) {
      scopes.has_shared = false;
      if (reader.runs) {
        reader.path_ends = true;
      } else {
        reader.path.clear();
        reader.own_from = 0;
      }
    }
  }
  std::vector<Staying> stay_on;
  for (const Staying& staying : staying_) {
    if (staying.scope != scope) {
      stay_on.push_back(staying);
      continue;
    }
    if (Node* const node = known(staying.entry)) {
      index.unpin(*node);
    }
    books.end_hold_for_scope(staying.block);
  }
  staying_ = std::move(stay_on);
  return index.purge(scope);
}

}  // namespace kvledger::simulation
