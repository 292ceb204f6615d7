#include "core/engine.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/make_room.h"

namespace kvledger {
namespace {

std::int64_t tokens_max(const EngineSettings& settings) {
  KVL_CHECK_GT(settings.slots_per_block, 0);
  return std::min(settings.context_tokens, settings.blocks.value() * settings.slots_per_block + 1);
}

BlockCount table_width(const EngineSettings& settings) {
  const std::int64_t slots = settings.slots_per_block;
  return BlockCount{std::max<std::int64_t>(1, (tokens_max(settings) - 1 + slots - 1) / slots)};
}

}  // namespace

Engine::Engine(const EngineSettings& settings, Nanoseconds now)
    : settings_(settings),
      ledger_(settings.blocks, now, settings.books_clock),
      pool_(ledger_),
      tables_(settings.scheduler.sequences_max, table_width(settings)),
      cache_(settings.prefixes, settings.slots_per_block, ledger_, pool_),
      scheduler_(settings.scheduler, settings.slots_per_block, tokens_max(settings), pool_, tables_,
                 cache_),
      compute_(settings.prefixes.cost_growth / settings.slots_per_block),
      plan_(settings.scheduler.token_budget, settings.scheduler.sequences_max,
            settings.scheduler.token_budget +
                settings.scheduler.sequences_max * table_width(settings).value()) {
  KVL_CHECK_GE(sequence_tokens_max(), 2);
}

std::int64_t Engine::sequence_tokens_max() const noexcept {
  return std::min(settings_.context_tokens,
                  shareable_blocks().value() * settings_.slots_per_block + 1);
}

std::int64_t Engine::sequence_tokens_max(TenantId tenant) const noexcept {
  const std::int64_t reach = cache_.shares().reach_of(tenant, shareable_blocks()).value();
  return std::min(sequence_tokens_max(), reach * settings_.slots_per_block + 1);
}

// Sequences preempted in this plan that have outgrown a share which was lowered can never come
// back.
void Engine::end_stranded(std::size_t preempted_before) {
  for (std::size_t i = preempted_before; i < report_.preemptions.size(); ++i) {
    const auto found = sequences_.find(SequenceId{report_.preemptions[i].sequence});
    if (found != sequences_.end() && found->second->state == Sequence::State::kWaiting &&
        found->second->has_outgrown()) {
      finish(*found->second, EndReason::kContext);
    }
  }
}

void Engine::set_shares(const std::vector<PoolShare>& shares, Nanoseconds now) {
  ledger_.advance(now);
  BlockCount guaranteed;
  for (const PoolShare& share : shares) {
    guaranteed += share.guaranteed;
  }
  KVL_CHECK_LE(guaranteed, shareable_blocks());
  make_room(report_.receipts, report_.receipts.size() + sequences_.size());
  make_room(ended_, ended_.size() + sequences_.size());
  std::vector<Sequence*> stranded;
  stranded.reserve(sequences_.size());
  cache_.set_shares(shares);
  for (const auto& [id, sequence] : sequences_) {
    const std::int64_t most = sequence_tokens_max(sequence->tenant);
    const bool runs = sequence->state == Sequence::State::kRunning;
    // Who runs may have reserved all that it can ever need.
    sequence->tokens_max = runs ? std::min(sequence->tokens_max, most) : most;
    if (sequence->state == Sequence::State::kWaiting && sequence->has_outgrown()) {
      stranded.push_back(sequence.get());
    }
  }
  for (Sequence* sequence : stranded) {
    finish(*sequence, EndReason::kContext);
  }
}

std::int64_t Engine::prompt_tokens_max(const Arrival& arrival) const {
  const std::int64_t most = sequence_tokens_max(arrival.tenant) - 1;
  if (!arrival.scopes.stays) {
    return most;
  }
  if (sequences_.size() > staying_requests_) {
    return 0;  // those that are here count on the whole pool
  }
  const std::int64_t half = settings_.blocks.value() / 2;
  const BlockCount left = shareable_blocks() - BlockCount{half} - cache_.shares().guaranteed();
  return std::min(most, left.value() * settings_.slots_per_block);
}

Engine::~Engine() {
  // Reservations must not die with claims on a pool that is going away.
  uncommitted_.reset();
  for (auto& [id, sequence] : sequences_) {
    sequence->in_step = false;
    sequence->request->in_step = false;
    scheduler_.remove(*sequence);
  }
}

bool Engine::accept(const Arrival& arrival, std::span<const Token> prompt) {
  const auto tokens = static_cast<std::int64_t>(prompt.size());
  KVL_CHECK_GE(arrival.samples, 1);
  KVL_CHECK_LE(arrival.samples, kSamplesMax);
  for (std::uint64_t i = 0; i < static_cast<std::uint64_t>(arrival.samples); ++i) {
    KVL_CHECK(!sequences_.contains(SequenceId{arrival.id.value() + i}));
  }
  KVL_CHECK_GE(arrival.priority, -kPriorityMax);
  KVL_CHECK_LE(arrival.priority, kPriorityMax);
  KVL_CHECK_GE(arrival.output_tokens_max, 1);
  const std::int64_t most = prompt_tokens_max(arrival);
  if (tokens < 1 || tokens > most) {
    report_.refusals.push_back(Refusal{arrival.id.value(), tokens, most});
    return false;
  }
  const auto samples = static_cast<std::uint64_t>(arrival.samples);
  make_room(report_.receipts, report_.receipts.size() + sequences_.size() + 1);
  make_room(ended_, ended_.size() + sequences_.size() + samples);
  if (arrival.scopes.stays) {
    cache_.make_room_to_stay(staying_blocks_ + tokens / settings_.slots_per_block);
  }
  if (arrival.scopes.has_shared) {
    ledger_.account(TenantId{arrival.scopes.shared.value()});
  }
  if (is_shared(arrival.scopes.own)) {
    ledger_.account(TenantId{arrival.scopes.own.value()});
  }
  const RequestAccount account = ledger_.open(arrival.tenant);
  std::uint64_t made = 0;
  try {
    const auto request = std::make_shared<Request>(arrival.id, account);
    request->samples.reserve(samples);
    request->sample_count = samples;
    for (; made < samples; ++made) {
      auto sequence = std::make_unique<Sequence>(
          arrival, std::vector<Token>(prompt.begin(), prompt.end()), request, made);
      sequence->tokens_max = sequence_tokens_max(arrival.tenant);
      cache_.begin(*sequence);
      request->samples.push_back(sequence.get());
      const SequenceId id = sequence->id;
      sequences_.emplace(id, std::move(sequence));
    }
    scheduler_.enqueue(*request);
  } catch (...) {
    for (std::uint64_t i = 0; i < made; ++i) {
      sequences_.erase(SequenceId{arrival.id.value() + i});
    }
    ledger_.close(account);
    throw;
  }
  if (arrival.scopes.stays) {
    ++staying_requests_;
    staying_blocks_ += tokens / settings_.slots_per_block;
  }
  return true;
}

const StepPlan& Engine::plan(Nanoseconds now) {
  KVL_CHECK(!uncommitted_.has_value());
  ended_.clear();
  const auto rows = static_cast<std::size_t>(settings_.scheduler.sequences_max);
  make_room(report_.admissions, report_.admissions.size() + rows);
  make_room(report_.preemptions, report_.preemptions.size() + rows);
  ledger_.advance(now);
  const StepId step{steps_ + 1};
  plan_.begin(step);
  const std::size_t preempted_before = report_.preemptions.size();
  scheduler_.schedule(ledger_.now(), plan_, report_);
  end_stranded(preempted_before);
  cache_.keep_within_shares();
  plan_.finish();
  if (!scheduler_.chunks().empty()) {
    steps_ = step.value();
    uncommitted_ = step;
    pool_.open_step();
    planned_at_ = ledger_.now();
    for (const Chunk& chunk : scheduler_.chunks()) {
      chunk.sequence->in_step = true;
      chunk.sequence->request->in_step = true;
    }
  }
  return plan_;
}

void Engine::commit(StepId step, std::span<const Token> tokens,
                    std::span<const std::int32_t> offsets, Nanoseconds now) {
  make_room(report_.tokens, report_.tokens.size() + tokens.size());
  for (const Chunk& chunk : scheduler_.chunks()) {
    if (chunk.sequence->state != Sequence::State::kEnded) {
      Sequence& sequence = *chunk.sequence;
      make_room(sequence.tokens, sequence.tokens.size() + tokens.size());
      const std::int64_t computed = sequence.computed + chunk.tokens;
      make_room(sequence.path, static_cast<std::size_t>(computed / settings_.slots_per_block));
    }
  }
  settle_step(step, now);
  scheduler_.observe(ledger_.now() - planned_at_, ledger_.now(), true);
  const StepPlanView& view = plan_.view();
  KVL_CHECK_EQ(static_cast<std::int64_t>(offsets.size()), view.header.logits + 1);
  KVL_CHECK_EQ(offsets.front(), 0);
  KVL_CHECK_EQ(static_cast<std::size_t>(offsets.back()), tokens.size());
  std::size_t wanted = 0;
  for (const Chunk& chunk : scheduler_.chunks()) {
    Sequence& sequence = *chunk.sequence;
    const bool has_output = chunk.tokens == sequence.pending();
    const std::size_t output = wanted;
    wanted += has_output ? 1 : 0;
    if (sequence.state == Sequence::State::kEnded) {
      continue;
    }
    count_computed(sequence, chunk.tokens);
    if (!has_output) {
      keep_computed(sequence);
      continue;
    }
    const auto first = static_cast<std::size_t>(offsets[output]);
    const auto last = static_cast<std::size_t>(offsets[output + 1]);
    KVL_CHECK_LT(first, last);
    KVL_CHECK_LE(last, tokens.size());
    if (tokens[first] < 0) {
      // What gave such logits may stand in any block that it has: nobody shall begin with it.
      cache_.discard(*sequence.request);
    } else {
      keep_computed(sequence);
    }
    sequence.spend(ledger_.now(), Sequence::Activity::kDecode);
    for (std::size_t i = first; i < last; ++i) {
      if (append_output(sequence, tokens[i])) {
        break;
      }
    }
  }
  KVL_CHECK_EQ(static_cast<std::int64_t>(wanted), view.header.logits);
  cache_.keep_within_shares();
  ended_.clear();
}

void Engine::abandon(StepId step, Nanoseconds now) {
  settle_step(step, now);
  scheduler_.observe(ledger_.now() - planned_at_, ledger_.now(), false);
  for (const Chunk& chunk : scheduler_.chunks()) {
    if (chunk.sequence->state != Sequence::State::kEnded) {
      finish(*chunk.sequence, EndReason::kFailed);
    }
  }
  ended_.clear();
}

void Engine::end(std::span<const std::uint64_t> ids, EndReason reason, Nanoseconds now) {
  ledger_.advance(now);
  for (const std::uint64_t id : ids) {
    const auto found = sequences_.find(SequenceId{id});
    if (found != sequences_.end()) {
      finish(*found->second, reason);
    }
  }
}

void Engine::pause(std::span<const std::uint64_t> ids, Nanoseconds now) {
  ledger_.advance(now);
  for (const std::uint64_t id : ids) {
    const auto found = sequences_.find(SequenceId{id});
    if (found != sequences_.end()) {
      found->second->spend(ledger_.now(), found->second->activity);
      scheduler_.pause(*found->second);
    }
  }
}

void Engine::resume(std::span<const std::uint64_t> ids, Nanoseconds now) {
  ledger_.advance(now);
  for (const std::uint64_t id : ids) {
    const auto found = sequences_.find(SequenceId{id});
    if (found != sequences_.end()) {
      found->second->spend(ledger_.now(), found->second->activity);
      scheduler_.resume(*found->second);
    }
  }
}

// The step is over: what it read and wrote may change again.
void Engine::settle_step(StepId step, Nanoseconds now) {
  KVL_CHECK(uncommitted_.has_value());
  KVL_CHECK_EQ(*uncommitted_, step);
  ledger_.advance(now);
  uncommitted_.reset();
  {
    const auto timed = ledger_.timed();
    compute_.book(scheduler_.chunks(), ledger_.now() - planned_at_);
  }
  pool_.settle();
  for (const Chunk& chunk : scheduler_.chunks()) {
    chunk.sequence->in_step = false;
    chunk.sequence->request->in_step = false;
  }
}

const StepReport& Engine::take_report() {
  taken_.clear();
  make_room(taken_.receipts, sequences_.size());  // whoever ends next gets one
  std::swap(report_, taken_);
  return taken_;
}

Books Engine::books(Nanoseconds now) {
  const auto timed = ledger_.timed();
  ledger_.advance(now);
  Books books = books_of(ledger_);
  for (const auto& [id, sequence] : sequences_) {
    if (sequence->state == Sequence::State::kRunning) {
      books.empty_slots += empty_slots(*sequence, settings_.slots_per_block, tables_, pool_);
    }
  }
  return books;
}

void Engine::count_computed(Sequence& sequence, std::int64_t tokens) {
  const std::int64_t before = sequence.computed;
  sequence.computed += tokens;
  sequence.computed_tokens += tokens;
  const std::int64_t again =
      std::max<std::int64_t>(0, std::min(sequence.computed, sequence.computed_peak) - before);
  sequence.recomputed_tokens += again;
  scheduler_.count_work(tokens, again);
  sequence.computed_peak = std::max(sequence.computed_peak, sequence.computed);
  if (sequence.request->is_shared() && before < sequence.prompt_count &&
      sequence.computed >= sequence.prompt_count) {
    scheduler_.prompt_computed(*sequence.request);
  }
}

// Before the sequence may end: its blocks then go back, and only those in the index stay.
void Engine::keep_computed(Sequence& sequence) {
  cache_.insert(sequence, [&](std::int64_t index) { return tables_.at(sequence.row, index); });
}

std::int64_t Engine::purge(ScopeId scope, Nanoseconds now) {
  ledger_.advance(now);
  for (const auto& [id, sequence] : sequences_) {
    cache_.end_scope(*sequence, scope);
  }
  return cache_.purge(scope);
}

bool Engine::append_output(Sequence& sequence, Token token) {
  if (token < 0) {
    finish(sequence, EndReason::kFailed);
    return true;
  }
  sequence.tokens.push_back(token);
  report_.tokens.push_back(OutputToken{sequence.id.value(), token, 0});
  std::optional<EndReason> reason;
  const auto& end_of_text = settings_.end_of_text;
  if (!sequence.ignore_end_of_text &&
      std::find(end_of_text.begin(), end_of_text.end(), token) != end_of_text.end()) {
    reason = EndReason::kStop;
  } else if (sequence.output_count() >= sequence.output_tokens_max) {
    reason = EndReason::kLength;
  } else if (sequence.has_outgrown()) {
    reason = EndReason::kContext;
  }
  if (!reason) {
    return false;
  }
  report_.tokens.back().end_reason = static_cast<std::int32_t>(*reason);
  finish(sequence, *reason);
  return true;
}

void Engine::finish(Sequence& sequence, EndReason reason) {
  const std::shared_ptr<Request> request = sequence.request;
  end_sequence(sequence, reason);
  // A request fails as a whole: nobody can use some of its samples.
  while (reason == EndReason::kFailed && !request->samples.empty()) {
    end_sequence(*request->samples.front(), reason);
  }
}

void Engine::end_sequence(Sequence& sequence, EndReason reason) {
  const std::shared_ptr<Request> request = sequence.request;
  sequence.spend(ledger_.now(), sequence.activity);
  sequence.end_reason = reason;
  scheduler_.remove(sequence);
  if (sequence.scopes.stays) {
    --staying_requests_;
    staying_blocks_ -= sequence.prompt_count / settings_.slots_per_block;
    if (reason <= EndReason::kContext && !uncommitted_) {  // else a step may still write there
      cache_.stay(sequence);
    }
  }
  request->absorb(sequence);
  if (request->samples.empty()) {
    write_receipt(*request, sequence);
  }
  ended_.push_back(std::move(sequences_.extract(sequence.id).mapped()));
}

void Engine::write_receipt(const Request& request, const Sequence& last) {
  const auto timed = ledger_.timed();
  const Statement statement = ledger_.close(request.account);
  const BlockTime held = to_block_time(statement.held);
  const BlockTime reserved = to_block_time(statement.reserved);
  const BlockTime of_scopes = to_block_time(statement.of_scopes);
  // What samples of one request share with each other it would not have held twice: with more than
  // one, what others' blocks saved cannot be told apart from that.
  const BlockTime saved =
      to_block_time(request.sample_count == 1 ? statement.saved : BlockNanoseconds{0});
  Receipt receipt;
  receipt.sequence = request.id.value();
  receipt.tenant = last.tenant.value();
  receipt.end_reason = static_cast<std::uint32_t>(last.end_reason);
  receipt.prompt_tokens = last.prompt_count;
  receipt.output_tokens = request.output_tokens;
  receipt.computed_tokens = request.computed_tokens;
  receipt.recomputed_tokens = request.recomputed_tokens;
  receipt.shared_tokens = request.shared_tokens;
  receipt.reused_own = request.reused_own;
  receipt.reused_shared = request.reused_shared;
  receipt.preemptions = request.preemptions;
  receipt.preempted_own = request.preempted_for.own;
  receipt.preempted_others = request.preempted_for.others;
  receipt.preempted_itself = request.preempted_for.itself;
  receipt.preempted_paused = request.preempted_for.paused;
  receipt.peak_blocks = statement.held_peak.value();
  receipt.queued = last.times.queued;
  receipt.prefill = last.times.prefill;
  receipt.decode = last.times.decode;
  receipt.paused = last.times.paused;
  // A step may be longer than what of it the request was there for.
  receipt.prefill_delayed = std::min(last.times.prefill_delayed, last.times.prefill);
  receipt.decode_delayed = std::min(last.times.decode_delayed, last.times.decode);
  receipt.requeued = last.times.requeued;
  receipt.compute = compute_.close(request);
  receipt.uncached_tokens = request.uncached_tokens;
  receipt.held_seconds = held.seconds;
  receipt.held_nanos = held.nanos;
  receipt.reserved_seconds = reserved.seconds;
  receipt.reserved_nanos = reserved.nanos;
  receipt.scope_seconds = of_scopes.seconds;
  receipt.scope_nanos = of_scopes.nanos;
  receipt.saved_seconds = saved.seconds;
  receipt.saved_nanos = saved.nanos;
  report_.receipts.push_back(receipt);
}

std::optional<std::string> Engine::audit() const {
  if (auto wrong = ledger_.audit()) {
    return wrong;
  }
  if (auto wrong = pool_.audit()) {
    return wrong;
  }
  if (auto wrong = cache_.audit()) {
    return wrong;
  }
  if (auto wrong = compute_.audit(open_compute())) {
    return wrong;
  }
  return audit_tables();
}

// Step time that is booked to requests which have no receipt yet.
Nanoseconds Engine::open_compute() const {
  Nanoseconds open = 0;
  for (const auto& [id, sequence] : sequences_) {
    if (sequence.get() == sequence->request->samples.front()) {
      open += sequence->request->compute;
    }
  }
  return open;
}

// Every block in a table is held by that table's request, tenant or shared scope, and referenced
// once for each table.
std::optional<std::string> Engine::audit_tables() const {
  std::vector<std::uint32_t> tables(static_cast<std::size_t>(ledger_.total().value()), 0);
  std::unordered_map<const Request*, std::int64_t> alone;
  for (const auto& [id, sequence] : sequences_) {
    if (sequence->state != Sequence::State::kRunning) {
      continue;
    }
    const std::int64_t length = tables_.length(sequence->row).value();
    const std::string who = "sequence " + std::to_string(id.value());
    std::int64_t& blocks = alone[sequence->request.get()];
    for (std::int64_t i = 0; i < length; ++i) {
      const BlockId block = tables_.at(sequence->row, i);
      const bool first = tables[block.value()]++ == 0;
      if (const auto holder = ledger_.holder_of(block)) {
        if (*holder != sequence->account) {
          return who + " has block " + std::to_string(block.value()) +
                 " in its table, which is not its request's";
        }
        blocks += first ? 1 : 0;
        continue;
      }
      const std::optional<TenantId> owner = ledger_.owner_of(block);
      if (ledger_.state_of(block) != BlockState::kHeld ||
          (owner != sequence->tenant && !is_shared(ScopeId{owner->value()}))) {
        return who + " has block " + std::to_string(block.value()) +
               " in its table, which is not its tenant's";
      }
    }
  }
  for (const auto& [request, blocks] : alone) {
    if (ledger_.held_by(request->account).value() != blocks) {
      return "request " + std::to_string(request->id.value()) + " has " + std::to_string(blocks) +
             " blocks in its tables and " +
             std::to_string(ledger_.held_by(request->account).value()) + " in the ledger";
    }
  }
  for (const auto& [id, sequence] : sequences_) {
    if (sequence->state == Sequence::State::kRunning &&
        scheduler_.blocks_for(sequence->computed) > tables_.length(sequence->row)) {
      return "sequence " + std::to_string(id.value()) + " has computed tokens without a block";
    }
  }
  cache_.count_references(tables);
  std::int64_t referenced = 0;
  for (std::uint32_t i = 0; i < tables.size(); ++i) {
    referenced += tables[i] > 0 ? 1 : 0;
    if (tables[i] != pool_.references(BlockId{i})) {
      return "block " + std::to_string(i) + " is referenced " +
             std::to_string(pool_.references(BlockId{i})) + " times and stands in " +
             std::to_string(tables[i]) + " tables";
    }
  }
  const std::int64_t booked = ledger_.balances()[BlockState::kHeld].value();
  if (booked != referenced) {
    return "held " + std::to_string(booked) + " blocks, in tables " + std::to_string(referenced);
  }
  return std::nullopt;
}

}  // namespace kvledger
