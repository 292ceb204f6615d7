#include "core/sequence.h"

#include "tests/check_throws.h"

using namespace kvledger;
using Activity = Sequence::Activity;

namespace {

Sequence arrived_at(Nanoseconds time, std::int64_t prompt_tokens = 5) {
  Arrival arrival;
  arrival.id = SequenceId{8};
  arrival.tenant = TenantId{2};
  arrival.arrived_at = time;
  arrival.priority = -3;
  arrival.output_tokens_max = 9;
  return Sequence(arrival, std::vector<Token>(static_cast<std::size_t>(prompt_tokens), 1),
                  std::make_shared<Request>(arrival.id, RequestAccount{4}));
}

void check_times(const Sequence& sequence, Nanoseconds queued, Nanoseconds prefill,
                 Nanoseconds decode) {
  CHECK(sequence.times.queued == queued);
  CHECK(sequence.times.prefill == prefill);
  CHECK(sequence.times.decode == decode);
}

}  // namespace

TEST_CASE("a sequence begins as its arrival says") {
  // If this fails, a request runs with the settings of nobody.
  const Sequence sequence = arrived_at(70);
  CHECK(sequence.id == SequenceId{8});
  CHECK(sequence.tenant == TenantId{2});
  CHECK(sequence.account == RequestAccount{4});
  CHECK(sequence.priority == -3);
  CHECK(sequence.prompt_count == 5);
  CHECK(sequence.output_tokens_max == 9);
  CHECK_FALSE(sequence.ignore_end_of_text);
  CHECK(sequence.state == Sequence::State::kWaiting);
  CHECK(sequence.activity == Activity::kQueued);
  check_times(sequence, 0, 0, 0);
}

TEST_CASE("pending is what is not computed, output what is not prompt") {
  // If this fails, tokens are computed twice or never.
  Sequence sequence = arrived_at(0);
  CHECK(sequence.token_count() == 5);
  CHECK(sequence.pending() == 5);
  CHECK(sequence.output_count() == 0);
  sequence.computed = 3;
  CHECK(sequence.pending() == 2);
  sequence.computed = 5;
  sequence.tokens.push_back(7);
  CHECK(sequence.pending() == 1);
  CHECK(sequence.output_count() == 1);
  sequence.computed = 0;
  CHECK(sequence.pending() == 6);
}

TEST_CASE("every nanosecond goes to one activity") {
  // If this fails, the times of a receipt do not add up.
  Sequence sequence = arrived_at(100);
  sequence.spend(107, Activity::kPrefill);
  sequence.spend(120, Activity::kDecode);
  sequence.spend(150, Activity::kQueued);
  sequence.spend(155, Activity::kPrefill);
  sequence.spend(156, Activity::kDecode);
  sequence.spend(160, Activity::kDecode);
  sequence.spend(160, Activity::kDecode);
  check_times(sequence, 7 + 5, 13 + 1, 30 + 4);
  CHECK(sequence.times.queued + sequence.times.prefill + sequence.times.decode == 160 - 100);
}

TEST_CASE("time that runs backwards is not spent, nor counted again") {
  // If this fails, a clock set back makes times negative or counts a span twice.
  Sequence sequence = arrived_at(100);
  sequence.spend(50, Activity::kPrefill);
  check_times(sequence, 0, 0, 0);
  sequence.spend(110, Activity::kDecode);
  sequence.spend(90, Activity::kDecode);
  sequence.spend(130, Activity::kDecode);
  check_times(sequence, 0, 10, 20);
}
