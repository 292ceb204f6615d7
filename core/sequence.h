// One prompt and its continuation, as the scheduler sees it.
//
// A sequence owns its tokens and the count of those whose keys and values are computed. A step
// lets the count catch up; there is no prefill phase and no decode phase.
//
//   tokens    | prompt ............ | output ...... |
//   computed  |========================>            |     the rest is pending
//
// One pending token is a decode step; more are a prefill chunk, whether the prompt is new, the
// sequence was preempted, or several tokens were accepted at once.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/ledger.h"
#include "core/prefix_index.h"
#include "core/request.h"
#include "core/reservation.h"
#include "core/types.h"

namespace kvledger {

class TenantLine;

// Why a sequence ended; also the order in which they are documented in the contract.
enum class EndReason : std::uint8_t {
  kStop = 1,       // the model's end-of-text token, or a stop string found by the service
  kLength = 2,     // its own limit on output tokens
  kContext = 3,    // no room for another token in the context or in the pool
  kCancelled = 4,  // the caller went away or its deadline passed
  kFailed = 5,     // the step it was part of failed
};

// Where a sequence's time went. Every nanosecond from arrival to end is in exactly one of them.
struct SequenceTimes {
  Nanoseconds queued = 0;    // waiting for room, the first time or after a preemption
  Nanoseconds requeued = 0;  // of that, after preemptions
  Nanoseconds prefill = 0;   // computing tokens before the next output token can exist
  Nanoseconds decode = 0;    // producing output tokens
  // Of `prefill` and `decode`, what the steps' time for others' prompts was.
  Nanoseconds prefill_delayed = 0;
  Nanoseconds decode_delayed = 0;
  Nanoseconds paused = 0;  // held back because nobody takes its tokens
};

// Priorities lie between -kPriorityMax and kPriorityMax; the service's contract is narrower.
inline constexpr std::int32_t kPriorityMax = 100;

// Most samples of one request.
inline constexpr std::int64_t kSamplesMax = 16;

// In which scopes a request's prefix is looked up and kept (prefix_cache.h). The first
// `shared_tokens` tokens lie in the shared scope, as far as whole blocks go; what follows and all
// that is generated lies in the request's own. Below a node of its own scope is only that, so
// nothing behind the border can enter the shared one.
struct PrefixScopes {
  // Whether computed blocks are kept for others of the same scopes.
  bool keeps = false;
  // Whether it may begin with blocks that others computed.
  bool reuses = false;
  ScopeId own;
  bool has_shared = false;
  ScopeId shared;
  std::int64_t shared_tokens = 0;
  // Whether what it computes of the shared part is kept in the shared scope; else the part that is
  // not there already lies in its own.
  bool writes_shared = false;
  // Whether its blocks stay when it has ended, held by its own scope, a shared one, until that is
  // purged.
  bool stays = false;
};

// What a request asks of the scheduler.
struct Arrival {
  // Of its first sample; the others have the ids that follow.
  SequenceId id;
  TenantId tenant;
  // When the service took the request in; not after the time of the plan that receives it.
  Nanoseconds arrived_at = 0;
  // Lower runs first.
  std::int32_t priority = 0;
  // Longest step while it decodes; 0 is the scheduler's own limit.
  Nanoseconds step_time_max = 0;
  // Most output tokens of a sample, at least 1.
  std::int64_t output_tokens_max = 1;
  bool ignore_end_of_text = false;
  // Sequences that continue the prompt, from 1 to kSamplesMax.
  std::int64_t samples = 1;
  PrefixScopes scopes;
};

// One block of a sequence that the prefix index knows: its node, pinned while the sequence runs,
// and the ledger's stamp for it.
struct PathEntry {
  PrefixNode node;
  Nanoseconds stamp = 0;
};

struct Sequence {
  enum class State : std::uint8_t { kWaiting, kRunning, kEnded };

  // The sample `index` of a request, which does not know it yet.
  Sequence(const Arrival& arrival, std::vector<Token> prompt, std::shared_ptr<Request> whose,
           std::uint64_t index = 0);

  std::int64_t token_count() const noexcept { return static_cast<std::int64_t>(tokens.size()); }
  std::int64_t pending() const noexcept { return token_count() - computed; }
  // Whether there is no room for another token.
  bool has_outgrown() const noexcept { return token_count() >= tokens_max; }
  std::int64_t output_count() const noexcept { return token_count() - prompt_count; }
  // The most tokens that it can come to. Its limit may be any number, so it is compared before it
  // is added.
  std::int64_t last_token() const noexcept {
    return prompt_count + std::min(output_tokens_max, tokens_max - prompt_count);
  }

  // Books the time since the last change of activity to the current one, and changes it.
  enum class Activity : std::uint8_t { kQueued, kPrefill, kDecode };
  void spend(Nanoseconds now, Activity next) noexcept;
  // Where what it waits for others' prompts is booked now.
  Nanoseconds& delayed() noexcept {
    return activity == Activity::kDecode ? times.decode_delayed : times.prefill_delayed;
  }

  const SequenceId id;
  const std::shared_ptr<Request> request;
  const TenantId tenant;
  const RequestAccount account;
  const std::int32_t priority;
  const std::int64_t prompt_count;
  const std::int64_t output_tokens_max;
  const bool ignore_end_of_text;
  const Nanoseconds arrived_at;
  const Nanoseconds step_time_max;  // while it decodes; 0 is the scheduler's
  // Most tokens that it may reach.
  std::int64_t tokens_max = 0;

  State state = State::kWaiting;
  // Of its tenant, in the queue (fair_queue.h).
  TenantLine* line = nullptr;
  // Order among all sequences: lower goes first. Fixed at arrival, so a preempted sequence keeps
  // its place and everything that waits long enough becomes the first.
  std::int64_t rank = 0;
  std::vector<Token> tokens;
  std::int64_t computed = 0;
  // The most that was ever computed: computing below it again is recomputation.
  std::int64_t computed_peak = 0;
  TableRow row;
  Reservation reservation;

  // Loses what was purged.
  PrefixScopes scopes;
  // Of its first blocks. While it waits they are only what was found when it was last looked at.
  std::vector<PathEntry> path;
  // The first block that lies in its own scope.
  std::int64_t own_from = 0;
  // The first block that it put into the index itself; -1 for none.
  std::int64_t filled_from = -1;
  // The first block that another sequence computed too, and put into the index before it; -1 for
  // none. It is exchanged for that one in the next plan.
  std::int64_t twice_from = -1;
  // Whether the index could not follow it any further.
  bool path_ends = false;
  // Tokens that it did not compute since it was admitted last.
  std::int64_t reused_now = 0;
  // Tokens that it found computed, each time it did, by whose scope they were in.
  std::int64_t reused_own = 0;
  std::int64_t reused_shared = 0;

  // Not to be planned until somebody takes what it produced.
  bool paused = false;
  // Not to be admitted while another sample computes the prompt.
  bool held_back = false;
  // True while an uncommitted step names the sequence.
  bool in_step = false;
  EndReason end_reason = EndReason::kStop;

  std::int64_t overtaken = 0;
  // Steps in a row that it sat out, because it needs a block and others are about to give some.
  std::int64_t waited_steps = 0;
  std::int64_t preemptions = 0;
  PreemptionReasons preempted_for;
  std::int64_t computed_tokens = 0;  // each time they were
  std::int64_t recomputed_tokens = 0;
  // Tokens that it did not compute because another sample had.
  std::int64_t shared_tokens = 0;
  bool admitted_before = false;
  SequenceTimes times;
  Activity activity = Activity::kQueued;
  Nanoseconds activity_since = 0;
};

}  // namespace kvledger
