// One request: the sequences that continue its prompt, and what they have in common.
//
// A request has one sequence for each of its samples. They are booked to one account and share the
// blocks of the prompt:
//
//   sample 0  computes the prompt ──┬── its own tokens ...
//   sample 1       (held back)      ├── its own tokens ...     each begins with the prompt's
//   sample 2       (held back)      └── its own tokens ...     blocks, and copies the last one
//                                                              when it is the first to write
//
// While no sample that runs has computed the prompt, one of them, the carrier, computes it for all
// and the others are held back. The receipt comes when the last sample has ended.

#pragma once

#include <cstdint>
#include <vector>

#include "core/types.h"

namespace kvledger {

struct Sequence;

// How often sequences lost their blocks, by what for. Their sum is all of them.
struct PreemptionReasons {
  // Another sequence of its own tenant needed a block, or it did itself at its tenant's limit.
  std::int64_t own = 0;
  // Another tenant's sequence needed one.
  std::int64_t others = 0;
  // It needed one itself, and nobody behind it had any to give.
  std::int64_t itself = 0;
  // Somebody needed one while it was paused.
  std::int64_t paused = 0;

  void add(const PreemptionReasons& more) noexcept;
};

struct Request {
  Request(SequenceId first, RequestAccount ledger_account) noexcept
      : id(first), account(ledger_account) {}

  // Whether there is anybody to share blocks with.
  bool is_shared() const noexcept { return samples.size() > 1; }
  // A running sample that has computed the whole prompt, or null.
  const Sequence* source() const noexcept;
  // Who computes the prompt while there is no source: a running sample before a waiting one, then
  // the one that has computed most, then the first. Null if all are paused.
  const Sequence* carrier() const noexcept;
  // Adds up what a sample that has ended produced and cost.
  void absorb(const Sequence& ended) noexcept;

  // The id of its first sample; the others' follow it.
  const SequenceId id;
  const RequestAccount account;
  // How many samples it had at first.
  std::uint64_t sample_count = 1;
  // Those that have not ended, by id.
  std::vector<Sequence*> samples;
  // True while an uncommitted step names one of its sequences, ended or not: any of its blocks may
  // be read.
  bool in_step = false;

  // Of samples that have ended.
  std::int64_t output_tokens = 0;
  std::int64_t computed_tokens = 0;
  std::int64_t recomputed_tokens = 0;
  std::int64_t shared_tokens = 0;
  std::int64_t reused_own = 0;
  std::int64_t reused_shared = 0;
  std::int64_t preemptions = 0;
  PreemptionReasons preempted_for;
  // Tokens that a model without kept keys and values would have computed for the same output: all
  // of the context, again for each token.
  std::int64_t uncached_tokens = 0;

  // Its part of the time of steps, of all samples (compute_time.h).
  Nanoseconds compute = 0;
};

}  // namespace kvledger
