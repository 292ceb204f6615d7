// Whose time a step took: the elapsed nanoseconds of every step, divided among what it computed.
//
// Steps compute several requests at once, so the times in which they were prefilled or decoded
// overlap and say nothing about who used the machine. Here each step's time is split among its
// chunks by the arithmetic that they need: a token costs one, and its attention `key_growth` more
// for every token before it. That is known before the step and the same on every machine, so a
// bill can be worked out again; what the steps are expected to take (step_time.h) is learnt, and
// changes with what else the machine does.
//
//   step     |<------------------------- elapsed ------------------------->|
//   chunks   |  a: 1 token  |  b: 1 token, long context  |  c: 200 tokens  |
//
// Shares are whole nanoseconds that add up to the step, exactly. So over all steps
//
//   total == booked to open requests + on receipts (closed) + unclaimed
//
// where unclaimed is the part of requests that ended, and had their receipt, while their last step
// still ran. The service ends requests between steps, so there it stays 0.
//
// O(chunks) a step; nothing here allocates. One thread at a time.

#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/request.h"
#include "core/scheduler.h"
#include "core/types.h"

namespace kvledger {

// Nanoseconds of all steps so far, from plan to commit.
struct ComputeTotals {
  Nanoseconds steps = 0;
  Nanoseconds closed = 0;
  Nanoseconds unclaimed = 0;
};

class ComputeTime {
 public:
  // `key_growth` is how much more a token costs for each one before it, of what the first costs.
  explicit ComputeTime(double key_growth);

  // Divides a step's time among its chunks, as they were planned: before their tokens are counted
  // as computed.
  void book(std::span<const Chunk> chunks, Nanoseconds elapsed);
  // What a request that has ended came to.
  Nanoseconds close(const Request& request) noexcept;

  ComputeTotals totals() const noexcept { return totals_; }
  // Whether all adds up, where `open` is booked to requests without a receipt; else what does not.
  std::optional<std::string> audit(Nanoseconds open) const;

 private:
  __extension__ typedef unsigned __int128 Weight;

  Weight weight(const Chunk& chunk) const noexcept;

  const std::uint64_t key_weight_;
  ComputeTotals totals_;
};

}  // namespace kvledger
