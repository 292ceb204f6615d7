#include "core/compute_time.h"

#include <cmath>

#include "core/check.h"
#include "core/sequence.h"

namespace kvledger {
namespace {

// Weight of a token without the keys before it. Those of one key are a hundred-thousandth of it in
// large models, and still told apart to a part in a hundred.
constexpr std::uint64_t kTokenWeight = std::uint64_t{1} << 24;

}  // namespace

ComputeTime::ComputeTime(double key_growth)
    : key_weight_(static_cast<std::uint64_t>(
          std::llround(key_growth * static_cast<double>(kTokenWeight)))) {
  KVL_CHECK(key_growth >= 0.0 && key_growth <= 1.0);
}

ComputeTime::Weight ComputeTime::weight(const Chunk& chunk) const noexcept {
  const std::int64_t before = keys_of_chunk(chunk.sequence->computed, chunk.tokens) - chunk.tokens;
  return static_cast<Weight>(chunk.tokens) * kTokenWeight +
         static_cast<Weight>(before) * key_weight_;
}

// Each share ends where the step's time up to its chunk ends, rounded down: so none is lost.
void ComputeTime::book(std::span<const Chunk> chunks, Nanoseconds elapsed) {
  KVL_CHECK_GE(elapsed, 0);
  Weight whole = 0;
  for (const Chunk& chunk : chunks) {
    whole += weight(chunk);
  }
  KVL_CHECK(whole > 0);
  totals_.steps += elapsed;
  Weight before = 0;
  Nanoseconds given = 0;
  for (const Chunk& chunk : chunks) {
    before += weight(chunk);
    const auto until = static_cast<Nanoseconds>(static_cast<Weight>(elapsed) * before / whole);
    Request& request = *chunk.sequence->request;
    (request.samples.empty() ? totals_.unclaimed : request.compute) += until - given;
    given = until;
  }
  KVL_CHECK_EQ(given, elapsed);
}

Nanoseconds ComputeTime::close(const Request& request) noexcept {
  totals_.closed += request.compute;
  return request.compute;
}

std::optional<std::string> ComputeTime::audit(Nanoseconds open) const {
  const Nanoseconds booked = open + totals_.closed + totals_.unclaimed;
  if (booked == totals_.steps) {
    return std::nullopt;
  }
  return "steps took " + std::to_string(totals_.steps) + " ns, booked are " +
         std::to_string(booked);
}

}  // namespace kvledger
