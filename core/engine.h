// The core as the service sees it: sequences come in, steps go out, tokens come back, receipts
// are handed out.
//
//   plan(now, arrivals)      -> the next step, or an empty one when there is nothing to compute
//   commit(step, tokens)     what the model produced for it
//   abandon(step)            the step failed: everything it named ends with kFailed
//   pause(ids), resume(ids)  at any time: whether sequences take part in steps
//   end(ids, reason)         at any time; blocks that an uncommitted step names stay in
//                            `releasing` until it is committed or abandoned
//
// One step may be uncommitted at a time. Every request that was accepted yields exactly one
// receipt, when its last sequence has ended. All calls come from one thread and take the time from
// the caller; a clock that jumps back stands still here.
//
// Where memory ends, accept(), plan(), commit() and take_report() throw std::bad_alloc with nothing
// changed; abandon(), end(), pause() and resume() allocate nothing. So the books can always be
// closed.

#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/block_pool.h"
#include "core/block_table.h"
#include "core/books.h"
#include "core/call_timer.h"
#include "core/compute_time.h"
#include "core/ledger.h"
#include "core/prefix_cache.h"
#include "core/scheduler.h"
#include "core/sequence.h"
#include "core/step_plan.h"
#include "core/step_report.h"
#include "core/types.h"

namespace kvledger {

struct EngineSettings {
  SchedulerSettings scheduler;
  BlockCount blocks;
  std::int32_t slots_per_block = 0;
  // Most tokens of one sequence, prompt and output: the model's context window.
  std::int64_t context_tokens = 0;
  // Tokens that end a text.
  std::vector<Token> end_of_text;
  PrefixCacheSettings prefixes;
  // For counting what the books take; without it nobody counts.
  CallTimer::Clock books_clock = nullptr;
};

class Engine {
 public:
  Engine(const EngineSettings& settings, Nanoseconds now);
  ~Engine();

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Most tokens that a sequence can reach, prompt and output: the context window, or one more
  // than the pool has slots (the last token needs none), without those that stay with scopes.
  std::int64_t sequence_tokens_max() const noexcept;

  // Takes in one new request, with ids never used before. False, with a refusal in the report,
  // if it could never run: an empty prompt, or one that leaves no room for a token. Blocks stay
  // (PrefixScopes) only of requests that come while there are no others, and of half the pool.
  bool accept(const Arrival& arrival, std::span<const Token> prompt);

  // Plans the next step; the plan is valid until the next call.
  const StepPlan& plan(Nanoseconds now);

  // `tokens[offsets[i]:offsets[i + 1]]` are the new tokens of the i-th sequence whose logits the
  // plan wanted, at least one each; a negative token says that its logits were unusable and ends
  // that request alone with kFailed.
  void commit(StepId step, std::span<const Token> tokens, std::span<const std::int32_t> offsets,
              Nanoseconds now);

  void abandon(StepId step, Nanoseconds now);

  // Ends sequences by id, with kFailed all samples of their requests; unknown ids are ignored, for
  // a sequence may end by itself meanwhile.
  void end(std::span<const std::uint64_t> ids, EndReason reason, Nanoseconds now);

  // Stops planning sequences, or goes on with them; unknown ids are ignored.
  void pause(std::span<const std::uint64_t> ids, Nanoseconds now);
  void resume(std::span<const std::uint64_t> ids, Nanoseconds now);

  // From now on these are the tenants' shares of the pool; guarantees add up to no more than
  // shareable_blocks(). What runs beyond them goes on as far as
  // its blocks reach; what waits and can never fit ends with kContext.
  void set_shares(const std::vector<PoolShare>& shares, Nanoseconds now);
  // Blocks that do not stay with scopes.
  BlockCount shareable_blocks() const noexcept {
    return BlockCount{settings_.blocks.value() - cache_.staying() - staying_blocks_};
  }
  // Most tokens that a sequence of a tenant can reach.
  std::int64_t sequence_tokens_max(TenantId tenant) const noexcept;

  // Takes everything out of the prefix index that is in a scope or below it; how many blocks. Those
  // that sequences have stay with them alone, and requests that are here already neither find nor
  // leave anything there any more. Allocates nothing.
  std::int64_t purge(ScopeId scope, Nanoseconds now);

  // What all steps did; any thread may read it.
  const StepBooks& step_books() const noexcept { return scheduler_.books(); }
  // How careful they have made admission; its level and moves may be read by any thread.
  const RecomputeGovernor& governor() const noexcept { return scheduler_.governor(); }

  // What changed since the last call, by whatever was called between. Valid until the next call.
  const StepReport& take_report();

  // The books at `now`, written out; O(accounts + open sequences). Only the time goes on.
  Books books(Nanoseconds now);

  const Ledger& ledger() const noexcept { return ledger_; }
  const BlockTables& tables() const noexcept { return tables_; }
  ComputeTotals compute_totals() const noexcept { return compute_.totals(); }
  // What the books took so far: postings, dividing steps' time, counting what steps did, receipts,
  // writing the books out. Each call contains one look at the clock.
  Nanoseconds books_nanoseconds() const noexcept { return ledger_.nanoseconds(); }
  PrefixCounts prefix_counts() const noexcept { return cache_.counts(); }
  std::int64_t running() const noexcept { return scheduler_.running(); }
  std::int64_t waiting() const noexcept { return scheduler_.waiting(); }
  // Whether a sequence has been accepted and has not ended.
  bool knows(SequenceId id) const { return sequences_.contains(id); }
  bool has_uncommitted_step() const noexcept { return uncommitted_.has_value(); }

  // Recomputes the books from blocks, tables and sequences, and says what disagrees; nothing if
  // all is right. O(blocks + sequences).
  std::optional<std::string> audit() const;

 private:
  void settle_step(StepId step, Nanoseconds now);
  void count_computed(Sequence& sequence, std::int64_t tokens);
  void end_stranded(std::size_t preempted_before);
  void keep_computed(Sequence& sequence);
  // Most tokens that a prompt may have; 0 if it may not come now.
  std::int64_t prompt_tokens_max(const Arrival& arrival) const;
  // Appends a token; true if the sequence ends with it.
  bool append_output(Sequence& sequence, Token token);
  void finish(Sequence& sequence, EndReason reason);
  void end_sequence(Sequence& sequence, EndReason reason);
  void write_receipt(const Request& request, const Sequence& last);
  std::optional<std::string> audit_tables() const;
  Nanoseconds open_compute() const;

  const EngineSettings settings_;
  Ledger ledger_;
  BlockPool pool_;
  BlockTables tables_;
  PrefixCache cache_;
  Scheduler scheduler_;
  ComputeTime compute_;
  StepPlan plan_;
  StepReport report_;  // being written
  StepReport taken_;   // being read by the caller
  std::unordered_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  // Ended, and perhaps named by the last step; forgotten when that is settled.
  std::vector<std::unique_ptr<Sequence>> ended_;
  // Blocks that requests which have not ended will leave with their scopes, and their number.
  std::int64_t staying_blocks_ = 0;
  std::size_t staying_requests_ = 0;
  std::optional<StepId> uncommitted_;
  Nanoseconds planned_at_ = 0;  // the uncommitted step
  std::uint64_t steps_ = 0;
};

}  // namespace kvledger
