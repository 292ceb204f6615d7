#include "core/prefix_cache.h"

#include <algorithm>
#include <new>

#include "core/check.h"
#include "core/lru_policy.h"
#include "core/make_room.h"
#include "core/reuse_policy.h"

namespace kvledger {
namespace {

// Nodes for each block of the pool: those without a block keep the way to others below them.
constexpr std::int64_t kNodesForEachBlock = 2;
// Tenants apart with a policy that learns, which takes some megabytes for each; if there are more,
// the blocks of those that are new go by age alone.
constexpr std::size_t kLearningPartitions = 16;
// In whose place nothing is left out.
constexpr TenantId kNobody{~0U};

}  // namespace

PrefixCache::PrefixCache(const PrefixCacheSettings& settings, std::int64_t slots_per_block,
                         Ledger& ledger, BlockPool& pool)
    : slots_per_block_(slots_per_block),
      ledger_(ledger),
      pool_(pool),
      shares_(ledger),
      timer_(settings.on ? settings.clock : nullptr) {
  if (!settings.on) {
    return;
  }
  const std::int64_t blocks = pool.total().value();
  PrefixIndexSettings index;
  index.nodes = kNodesForEachBlock * blocks;
  index.capacity = blocks;
  index.block_tokens = slots_per_block;
  index.seed = settings.seed;
  index_.emplace(
      index,
      [this, growth = settings.cost_growth, make = settings.make_policy](
          CachedBlocks& cached, std::int64_t capacity) -> std::unique_ptr<EvictionPolicy> {
        if (make) {
          return make(cached, capacity);
        }
        if (!partitions_learn_) {
          return std::make_unique<LruPolicy>(cached, true);
        }
        return std::make_unique<ReusePolicy>(cached, capacity, growth);
      });
  freed_.reserve(static_cast<std::size_t>(blocks));
  pinned_.reserve(static_cast<std::size_t>(blocks));
}

void PrefixCache::begin(Sequence& sequence) const {
  const auto timed = timer_.call();
  if (!is_on()) {
    return;
  }
  make_room(sequence.path, static_cast<std::size_t>(sequence.prompt_count / slots_per_block_));
  sequence.own_from = border_of(sequence);
}

std::int64_t PrefixCache::border_of(const Sequence& sequence) const noexcept {
  const PrefixScopes& scopes = sequence.scopes;
  return scopes.has_shared ? scopes.shared_tokens / slots_per_block_ : 0;
}

PrefixNode PrefixCache::parent_of_next(const Sequence& sequence) const noexcept {
  return sequence.path.empty() ? PrefixIndex::root() : sequence.path.back().node;
}

ScopeId PrefixCache::scope_of(const Sequence& sequence, std::int64_t index) const noexcept {
  return index < sequence.own_from ? sequence.scopes.shared : sequence.scopes.own;
}

std::span<const Token> PrefixCache::tokens_of(const Sequence& sequence,
                                              std::int64_t index) const noexcept {
  return std::span<const Token>(sequence.tokens)
      .subspan(static_cast<std::size_t>(index * slots_per_block_),
               static_cast<std::size_t>(slots_per_block_));
}

TenantId PrefixCache::owner_of(const Sequence& sequence, ScopeId scope) const noexcept {
  return is_shared(scope) ? TenantId{scope.value()} : sequence.tenant;
}

PrefixMatch PrefixCache::match(Sequence& waiting) {
  const auto timed = timer_.call();
  PrefixMatch match;
  if (!is_on() || !waiting.scopes.reuses) {
    waiting.path.clear();
    return match;
  }
  revise(waiting);
  while (extend(waiting)) {
  }
  BlockCount room = room_of_scopes();
  for (std::size_t i = 0; i < waiting.path.size(); ++i) {
    if (pool_.references(*index_->block_of(waiting.path[i].node)) > 0) {
      continue;
    }
    if (is_shared(scope_of(waiting, static_cast<std::int64_t>(i)))) {
      if (room <= BlockCount{0}) {
        waiting.path.resize(i);
        break;
      }
      room -= BlockCount{1};
    }
    ++match.cached;
  }
  match.blocks = static_cast<std::int64_t>(waiting.path.size());
  const auto found = static_cast<std::size_t>(match.blocks * slots_per_block_);
  const auto usable = static_cast<std::size_t>(waiting.token_count() - 1);
  const std::span<const Token> rest =
      std::span<const Token>(waiting.tokens)
          .subspan(found, std::min(usable - found, static_cast<std::size_t>(slots_per_block_)));
  if (rest.empty()) {
    return match;
  }
  const auto likest =
      index_->likest(parent_of_next(waiting), scope_of(waiting, match.blocks), rest);
  if (likest && ledger_.owner_of(*index_->block_of(likest->node)) ==
                    owner_of(waiting, scope_of(waiting, match.blocks))) {
    match.tail = likest->tokens;
    match.source = likest->node;
  }
  return match;
}

void PrefixCache::revise(Sequence& waiting) const {
  const auto still =
      std::find_if(waiting.path.begin(), waiting.path.end(), [this](const PathEntry& entry) {
        return !index_->knows(entry.node) || !index_->block_of(entry.node).has_value();
      });
  waiting.path.erase(still, waiting.path.end());
  if (static_cast<std::int64_t>(waiting.path.size()) <= waiting.own_from) {
    waiting.own_from = border_of(waiting);
  }
}

// Finds one block more, if there is one that leaves the last token to be computed.
bool PrefixCache::extend(Sequence& waiting) {
  const auto index = static_cast<std::int64_t>(waiting.path.size());
  if ((index + 1) * slots_per_block_ >= waiting.token_count() ||
      waiting.path.size() == waiting.path.capacity()) {
    return false;
  }
  std::optional<PrefixNode> node = find(waiting, index, scope_of(waiting, index));
  if (!node && index < waiting.own_from && !waiting.scopes.writes_shared) {
    waiting.own_from = index;  // what is not there of the shared part is its own
    node = find(waiting, index, waiting.scopes.own);
  }
  if (node) {
    waiting.path.push_back(PathEntry{*node});
  }
  return node.has_value();
}

// The filled node for a block of the sequence, whose blocks before it are its path.
std::optional<PrefixNode> PrefixCache::find(const Sequence& sequence, std::int64_t index,
                                            ScopeId scope) {
  const PrefixNode parent = parent_of_next(sequence);
  if (parent != PrefixIndex::root() && !index_->knows(parent)) {
    return std::nullopt;
  }
  const std::optional<PrefixNode> node = index_->find(parent, scope, tokens_of(sequence, index));
  if (!node || !index_->block_of(*node)) {
    return std::nullopt;
  }
  if (ledger_.owner_of(*index_->block_of(*node)) != owner_of(sequence, scope)) {
    ++counts_.foreign;
    return std::nullopt;
  }
  return node;
}

BlockId PrefixCache::adopt(Sequence& sequence, std::int64_t index) {
  const auto timed = timer_.call();
  PathEntry& entry = checked_at(sequence.path, static_cast<std::size_t>(index));
  const BlockId block = *index_->block_of(entry.node);
  index_->pin(entry.node);
  index_->use(entry.node);
  entry.stamp = pool_.join(sequence.account, block);
  count(sequence, index, slots_per_block_);
  return block;
}

void PrefixCache::count_lookup(const Sequence& admitted) noexcept {
  if (is_on() && admitted.scopes.reuses && !admitted.admitted_before) {
    ++counts_.lookups;
  }
}

void PrefixCache::count(Sequence& sequence, std::int64_t index, std::int64_t tokens) {
  sequence.reused_now += tokens;
  const bool shared = is_shared(scope_of(sequence, index));
  (shared ? sequence.reused_shared : sequence.reused_own) += tokens;
  counts_.reused_tokens += static_cast<std::uint64_t>(tokens);
}

void PrefixCache::follow(const Sequence& from, Sequence& to, Nanoseconds stamp) {
  const auto timed = timer_.call();
  const PrefixNode node = from.path[to.path.size()].node;
  if (index_->knows(node)) {
    index_->pin(node);
  }
  make_room(to.path, to.path.size() + 1);
  to.path.push_back(PathEntry{node, stamp});
}

void PrefixCache::pin_source(const PrefixMatch& match) {
  const auto timed = timer_.call();
  index_->pin(match.source);
  index_->use(match.source);
}

void PrefixCache::unpin_source(const PrefixMatch& match) {
  const auto timed = timer_.call();
  index_->unpin(match.source);
}

void PrefixCache::count_tail(Sequence& sequence, const PrefixMatch& match) {
  count(sequence, match.blocks, match.tail);
}

bool PrefixCache::has_next(const Sequence& running) {
  const auto timed = timer_.call();
  const auto index = static_cast<std::int64_t>(running.path.size());
  return is_on() && running.scopes.reuses && !running.path_ends &&
         running.computed / slots_per_block_ == index &&
         (index + 1) * slots_per_block_ < running.token_count() &&
         running.path.size() < running.path.capacity() &&
         (!is_shared(scope_of(running, index)) || room_of_scopes() > BlockCount{0}) &&
         find(running, index, scope_of(running, index)).has_value();
}

BlockId PrefixCache::adopt_next(Sequence& sequence) {
  const auto timed = timer_.call();
  const auto index = static_cast<std::int64_t>(sequence.path.size());
  const std::optional<PrefixNode> node = find(sequence, index, scope_of(sequence, index));
  KVL_CHECK(node.has_value());
  sequence.path.push_back(PathEntry{*node});
  return adopt(sequence, index);
}

std::optional<PrefixCache::Place> PrefixCache::next_place(const Sequence& sequence) const {
  const auto timed = timer_.call();
  const auto index = static_cast<std::int64_t>(sequence.path.size());
  if (!is_on() || !sequence.scopes.keeps || sequence.path_ends ||
      (index + 1) * slots_per_block_ >= sequence.token_count()) {
    return std::nullopt;
  }
  return Place{parent_of_next(sequence), scope_of(sequence, index), tokens_of(sequence, index)};
}

bool PrefixCache::can_insert(const Sequence& sequence) const noexcept {
  const auto index = static_cast<std::int64_t>(sequence.path.size());
  return is_on() && sequence.scopes.keeps && !sequence.path_ends &&
         (index + 1) * slots_per_block_ <= sequence.computed &&
         sequence.path.size() < sequence.path.capacity();
}

void PrefixCache::insert_one(Sequence& sequence, BlockId block) {
  const auto index = static_cast<std::int64_t>(sequence.path.size());
  if (index < sequence.own_from && !sequence.scopes.writes_shared) {
    if (const auto known = find(sequence, index, sequence.scopes.shared)) {
      index_->pin(*known);
      note_twice(sequence, index);
      sequence.path.push_back(PathEntry{*known});
      return;
    }
    sequence.own_from = index;
  }
  const ScopeId scope = scope_of(sequence, index);
  const std::optional<PrefixNode> node = place(sequence, index, scope);
  if (!node) {
    sequence.path_ends = true;
    return;
  }
  if (!index_->block_of(*node)) {
    // Whoever has a block that the index knows must have pinned its node.
    if (pool_.is_kept(block) || is_beyond_a_sibling(sequence, index, block) ||
        (is_shared(scope) && !may_give(sequence))) {
      index_->unpin(*node);
      sequence.path_ends = true;
      return;
    }
    index_->fill(*node, block);
    pool_.keep(sequence.account, block, owner_of(sequence, scope));
    sequence.filled_from = sequence.filled_from < 0 ? index : sequence.filled_from;
    ++counts_.inserted;
  } else if (*index_->block_of(*node) != block) {
    note_twice(sequence, index);
  }
  sequence.path.push_back(PathEntry{*node});
}

// Whether another sample has the block that the index cannot follow there any more.
bool PrefixCache::is_beyond_a_sibling(const Sequence& sequence, std::int64_t index,
                                      BlockId block) const noexcept {
  return pool_.references(block) > 1 &&
         std::ranges::any_of(sequence.request->samples, [&](const Sequence* other) {
           return other != &sequence && other->state == Sequence::State::kRunning &&
                  (other->path_ends || static_cast<std::int64_t>(other->path.size()) > index);
         });
}

void PrefixCache::note_twice(Sequence& sequence, std::int64_t index) noexcept {
  sequence.twice_from = sequence.twice_from < 0 ? index : sequence.twice_from;
}

std::optional<BlockId> PrefixCache::exchange(Sequence& sequence, std::int64_t index, BlockId own) {
  const auto timed = timer_.call();
  PathEntry& entry = checked_at(sequence.path, static_cast<std::size_t>(index));
  if (!index_->knows(entry.node)) {
    return std::nullopt;
  }
  const std::optional<BlockId> block = index_->block_of(entry.node);
  if (!block || *block == own) {
    return std::nullopt;
  }
  entry.stamp = pool_.join(sequence.account, *block);
  pool_.release(sequence.account, own);
  return block;
}

// Nothing where the way there was purged, or the index has no room.
std::optional<PrefixNode> PrefixCache::place(const Sequence& sequence, std::int64_t index,
                                             ScopeId scope) {
  const PrefixNode parent = parent_of_next(sequence);
  if (!index_->may_place(parent, scope)) {
    return std::nullopt;
  }
  try {
    return index_->place(parent, scope, tokens_of(sequence, index),
                         CacheOwner{owner_of(sequence, scope).value()});
  } catch (const std::bad_alloc&) {
    return std::nullopt;
  }
}

void PrefixCache::discard(const Request& request) {
  for (const Sequence* sample : request.samples) {
    const std::int64_t first = sample->filled_from < 0
                                   ? sample->own_from
                                   : std::min(sample->filled_from, sample->own_from);
    if (!is_on() || sample->state != Sequence::State::kRunning ||
        first >= static_cast<std::int64_t>(sample->path.size())) {
      continue;
    }
    const PrefixNode node = sample->path[static_cast<std::size_t>(first)].node;
    if (index_->knows(node)) {
      index_->purge(node, freed_, pinned_);
      take_out();
    }
  }
}

void PrefixCache::leave(Sequence& sequence) {
  const auto timed = timer_.call();
  for (auto entry = sequence.path.rbegin(); entry != sequence.path.rend(); ++entry) {
    index_->unpin(entry->node);
    entry->stamp = 0;
  }
  sequence.filled_from = -1;
  sequence.twice_from = -1;
  sequence.path_ends = false;
  sequence.reused_now = 0;
}

void PrefixCache::make_room_to_stay(std::int64_t blocks) {
  make_room(staying_, staying_.size() + static_cast<std::size_t>(blocks));
}

void PrefixCache::stay(const Sequence& ended) {
  const auto timed = timer_.call();
  const auto whole = static_cast<std::size_t>(ended.prompt_count / slots_per_block_);
  for (std::size_t i = 0; i < std::min(whole, ended.path.size()); ++i) {
    const PrefixNode node = ended.path[i].node;
    if (!index_->knows(node) || !index_->block_of(node)) {
      return;
    }
    const auto block = *index_->block_of(node);
    const bool stays = std::ranges::any_of(
        staying_, [block](const Staying& staying) { return staying.block == block; });
    if (!stays) {
      index_->pin(node);
      pool_.hold_for_scope(block);
      staying_.push_back(Staying{ended.scopes.own, node, block});
    }
  }
}

BlockCount PrefixCache::reclaimable() const noexcept {
  return is_on() ? std::min(BlockCount{index_->cached()}, ledger_.balances()[BlockState::kCached])
                 : BlockCount{0};
}

BlockCount PrefixCache::available(TenantId tenant) const noexcept {
  return std::min(unkept(tenant), shares_.left_to(tenant));
}

BlockCount PrefixCache::unkept(TenantId tenant) const noexcept {
  return pool_.available() + reclaimable() - shares_.kept_from(tenant);
}

BlockCount PrefixCache::room_of_scopes() const noexcept {
  return pool_.available() + reclaimable() - shares_.kept_from(kNobody);
}

// Whether a block of a sequence may go to a shared scope: its tenant has one more to its guarantee
// then, which must be there.
bool PrefixCache::may_give(const Sequence& sequence) const noexcept {
  const BlockCount lost{shares_.is_beyond_guarantee(sequence.tenant) ? 0 : 1};
  return room_of_scopes() >= lost;
}

std::optional<Reservation> PrefixCache::reserve(RequestAccount account, TenantId tenant,
                                                BlockCount count) {
  const auto timed = timer_.call();
  if (count > available(tenant)) {
    return std::nullopt;
  }
  while (pool_.available() < count) {
    KVL_CHECK(evict_for(tenant));
  }
  return pool_.reserve(account, count);
}

void PrefixCache::set_shares(const std::vector<PoolShare>& shares) {
  const auto timed = timer_.call();
  const std::vector<PoolShare> before = shares_.apart();
  shares_.set(shares);
  if (!is_on()) {
    return;
  }
  for (const PoolShare& share : before) {
    if (!shares_.is_apart(share.tenant)) {
      index_->merge(CacheOwner{share.tenant.value()});
    }
  }
  partitions_learn_ = shares_.apart().size() <= kLearningPartitions;
  for (const PoolShare& share : shares_.apart()) {
    const CacheOwner owner{share.tenant.value()};
    if (!index_->has_partition(owner)) {
      index_->partition(owner, std::max<std::int64_t>(1, share.max.value()));
    }
  }
}

BlockCount PrefixCache::protected_of(const PoolShare& share) const noexcept {
  const BlockCount unused = std::max(BlockCount{0}, share.guaranteed - ledger_.live(share.tenant));
  return std::min(unused, BlockCount{index_->cached(CacheOwner{share.tenant.value()})});
}

// From whoever has most beyond its guarantee; a tenant's own guarantee is no hindrance to itself.
bool PrefixCache::evict_for(TenantId tenant) {
  if (!is_on()) {
    return false;
  }
  BlockCount common{index_->cached()};
  BlockCount most{0};
  std::optional<CacheOwner> whose;
  for (const PoolShare& share : shares_.apart()) {
    const CacheOwner owner{share.tenant.value()};
    const BlockCount cached{index_->cached(owner)};
    common -= cached;
    const BlockCount beyond = share.tenant == tenant ? cached : cached - protected_of(share);
    if (beyond > most) {
      most = beyond;
      whose = owner;
    }
  }
  return evict_from(common >= most ? std::nullopt : whose);
}

bool PrefixCache::evict_from(std::optional<CacheOwner> owner) {
  while (const auto victim = owner ? index_->evict(*owner) : index_->evict()) {
    const bool is_cached = ledger_.state_of(*victim) == BlockState::kCached;
    pool_.drop(*victim);
    if (is_cached) {
      ++counts_.evicted;
      return true;
    }
  }
  return false;
}

void PrefixCache::keep_within_shares() {
  const auto timed = timer_.call();
  if (!is_on()) {
    return;
  }
  for (const PoolShare& share : shares_.apart()) {
    const CacheOwner owner{share.tenant.value()};
    while (index_->cached(owner) > 0 &&
           ledger_.live(share.tenant) + BlockCount{index_->cached(owner)} > share.max) {
      KVL_CHECK(evict_from(owner));
    }
  }
  for (const PoolShare& share : shares_.apart()) {
    while (share.sealed && pool_.available() < shares_.sealed_from(kNobody) && evict_for(kNobody)) {
    }
  }
}

void PrefixCache::end_scope(Sequence& sequence, ScopeId scope) const noexcept {
  PrefixScopes& scopes = sequence.scopes;
  if (scopes.own == scope) {
    scopes.keeps = scopes.reuses = false;
  }
  if (scopes.has_shared && scopes.shared == scope) {
    scopes.has_shared = false;
    if (sequence.state == Sequence::State::kRunning) {
      sequence.path_ends = true;  // its way to its own scope leads through the shared one
    } else {
      sequence.path.clear();
      sequence.own_from = 0;
    }
  }
}

std::int64_t PrefixCache::purge(ScopeId scope) {
  const auto timed = timer_.call();
  if (!is_on()) {
    return 0;
  }
  std::erase_if(staying_, [&](const Staying& staying) {
    if (staying.scope != scope) {
      return false;
    }
    index_->unpin(staying.node);
    pool_.end_hold_for_scope(staying.block);
    return true;
  });
  index_->purge(scope, freed_, pinned_);
  return take_out();
}

std::int64_t PrefixCache::take_out() {
  for (const auto* blocks : {&freed_, &pinned_}) {
    for (const BlockId block : *blocks) {
      pool_.drop(block);
    }
  }
  const auto count = static_cast<std::int64_t>(freed_.size() + pinned_.size());
  freed_.clear();
  pinned_.clear();
  return count;
}

PrefixCounts PrefixCache::counts() const noexcept {
  PrefixCounts counts = counts_;
  counts.mismatches = is_on() ? index_->mismatches() : 0;
  counts.nanoseconds = timer_.nanoseconds();
  return counts;
}

void PrefixCache::count_references(std::vector<std::uint32_t>& references) const {
  for (const Staying& staying : staying_) {
    ++checked_at(references, staying.block.value());
  }
}

std::optional<std::string> PrefixCache::audit() const {
  if (!is_on()) {
    return std::nullopt;
  }
  if (auto wrong = index_->audit()) {
    return wrong;
  }
  std::int64_t kept = 0;
  for (std::uint32_t i = 0; i < static_cast<std::uint32_t>(pool_.total().value()); ++i) {
    kept += pool_.is_kept(BlockId{i}) ? 1 : 0;
  }
  if (kept != index_->filled()) {
    return "the index has " + std::to_string(index_->filled()) + " blocks, the pool keeps " +
           std::to_string(kept);
  }
  if (index_->cached() > ledger_.balances()[BlockState::kCached].value() &&
      ledger_.balances()[BlockState::kReleasing].value() == 0) {
    return "the index would evict blocks that somebody holds";
  }
  return std::nullopt;
}

}  // namespace kvledger
