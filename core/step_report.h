// What a call of the engine changed, as flat arrays: which sequences were admitted, preempted or
// refused, which tokens came out, and one receipt for every request that ended.
//
// Every record is plain data of fixed layout, so the bindings hand the arrays to numpy as they
// are. Who needs them past the next report copies them.

#pragma once

#include <cstdint>
#include <vector>

#include "core/ledger.h"
#include "core/sequence.h"
#include "core/types.h"

namespace kvledger {

// A sequence took its place among the running ones.
struct Admission {
  std::uint64_t sequence = 0;
  // Nanoseconds it waited before this admission, all waits together.
  std::int64_t queued = 0;
  // Row of the block tables; per-sequence settings of the sampler go by it.
  std::int32_t row = 0;
  // 1 if it ran before and was preempted.
  std::int32_t again = 0;
  // Tokens with which it begins because another sample of its request has computed them.
  std::int64_t shared_tokens = 0;
  // Tokens with which it begins because the prefix index had them.
  std::int64_t reused_tokens = 0;
};

// A sequence lost its blocks and went back to the queue.
struct Preemption {
  std::uint64_t sequence = 0;
  // Tokens whose keys and values are gone.
  std::int64_t computed_tokens = 0;
};

// An arrival that the engine cannot ever run; the service should not have sent it.
struct Refusal {
  std::uint64_t sequence = 0;
  // Tokens of its prompt, and the most a prompt may have.
  std::int64_t tokens = 0;
  std::int64_t tokens_max = 0;
};

struct OutputToken {
  std::uint64_t sequence = 0;
  std::int32_t token = 0;
  // EndReason if this is the last one, 0 otherwise.
  std::int32_t end_reason = 0;
};

// What one request cost, all its samples together. Times are nanoseconds, of the sample that ended
// last, and add up to the time from arrival to end; the end reason is that sample's too.
struct Receipt {
  // The request's first sample.
  std::uint64_t sequence = 0;
  std::uint32_t tenant = 0;
  std::uint32_t end_reason = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t output_tokens = 0;
  // Tokens whose keys and values were computed, recomputed ones counted each time.
  std::int64_t computed_tokens = 0;
  std::int64_t recomputed_tokens = 0;
  // Tokens that samples did not compute because another sample had.
  std::int64_t shared_tokens = 0;
  // Tokens that the prefix index had, each time it did: in scopes of its own, and in shared ones.
  std::int64_t reused_own = 0;
  std::int64_t reused_shared = 0;
  std::int64_t preemptions = 0;
  // Of these, by what for (PreemptionReasons); together they are all.
  std::int64_t preempted_own = 0;
  std::int64_t preempted_others = 0;
  std::int64_t preempted_itself = 0;
  std::int64_t preempted_paused = 0;
  std::int64_t peak_blocks = 0;
  std::int64_t queued = 0;
  std::int64_t prefill = 0;
  std::int64_t decode = 0;
  std::int64_t paused = 0;
  // Of `prefill` and `decode`, what the time for others' prompts in these steps was.
  std::int64_t prefill_delayed = 0;
  std::int64_t decode_delayed = 0;
  // Of `queued`, the waits after preemptions.
  std::int64_t requeued = 0;
  // Its part of the time of the steps that it took part in (compute_time.h).
  std::int64_t compute = 0;
  // Tokens that would have been computed without kept keys and values (request.h).
  std::int64_t uncached_tokens = 0;
  // Blocks held, and blocks reserved but not yet held, summed over time.
  std::uint64_t held_seconds = 0;
  std::uint64_t reserved_seconds = 0;
  // Blocks of shared scopes that it referred to: booked to the scopes, and so part of neither.
  std::uint64_t scope_seconds = 0;
  // Block-time that it would have held more, had it shared no block with other requests of its
  // tenant; 0 for a request with several samples.
  std::uint64_t saved_seconds = 0;
  std::uint32_t held_nanos = 0;
  std::uint32_t reserved_nanos = 0;
  std::uint32_t scope_nanos = 0;
  std::uint32_t saved_nanos = 0;
};

struct StepReport {
  std::vector<Admission> admissions;
  std::vector<Preemption> preemptions;
  std::vector<Refusal> refusals;
  std::vector<OutputToken> tokens;
  std::vector<Receipt> receipts;

  void clear() noexcept {
    admissions.clear();
    preemptions.clear();
    refusals.clear();
    tokens.clear();
    receipts.clear();
  }
};

}  // namespace kvledger
