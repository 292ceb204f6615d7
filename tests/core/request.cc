#include "core/request.h"

#include <memory>
#include <vector>

#include "core/sequence.h"
#include "tests/check_throws.h"

using namespace kvledger;

namespace {

// Three samples of a prompt of 4 tokens, waiting.
struct Samples {
  Samples() : request(std::make_shared<Request>(SequenceId{10}, RequestAccount{0})) {
    Arrival arrival;
    arrival.id = SequenceId{10};
    arrival.samples = 3;
    for (std::uint64_t i = 0; i < 3; ++i) {
      sequences.push_back(
          std::make_unique<Sequence>(arrival, std::vector<Token>{1, 2, 3, 4}, request, i));
      request->samples.push_back(sequences.back().get());
    }
  }

  Sequence& at(std::size_t index) { return *sequences[index]; }
  void run(std::size_t index, std::int64_t computed) {
    at(index).state = Sequence::State::kRunning;
    at(index).computed = computed;
  }

  std::shared_ptr<Request> request;
  std::vector<std::unique_ptr<Sequence>> sequences;
};

}  // namespace

TEST_CASE("samples have the ids that follow the first") {
  // If this fails, tokens of one sample come out as another's.
  Samples samples;
  CHECK(samples.at(0).id == SequenceId{10});
  CHECK(samples.at(2).id == SequenceId{12});
  CHECK(samples.request->is_shared());
  samples.request->samples.resize(1);
  CHECK_FALSE(samples.request->is_shared());
}

TEST_CASE("a source runs and has computed the whole prompt") {
  // If this fails, a sample begins with blocks that hold nothing.
  Samples samples;
  CHECK(samples.request->source() == nullptr);
  samples.run(1, 3);
  CHECK(samples.request->source() == nullptr);
  samples.at(0).computed = 4;  // waiting: its blocks are gone
  CHECK(samples.request->source() == nullptr);
  samples.run(1, 4);
  samples.at(1).paused = true;  // it still has them
  CHECK(samples.request->source() == &samples.at(1));
}

TEST_CASE("the prompt is computed by who runs, then by who has most, then by the first") {
  // If this fails, a prompt is computed several times, or by nobody.
  Samples samples;
  CHECK(samples.request->carrier() == &samples.at(0));
  samples.at(0).paused = true;
  CHECK(samples.request->carrier() == &samples.at(1));
  samples.run(2, 0);
  CHECK(samples.request->carrier() == &samples.at(2));
  samples.run(1, 2);
  CHECK(samples.request->carrier() == &samples.at(1));
  samples.at(1).paused = true;
  samples.at(2).paused = true;
  CHECK(samples.request->carrier() == nullptr);
}

TEST_CASE("what samples cost adds up") {
  // If this fails, a receipt leaves out samples.
  Samples samples;
  for (std::size_t i = 0; i < 3; ++i) {
    Sequence& sample = samples.at(i);
    sample.tokens.resize(4 + i, 9);
    sample.computed_tokens = 10;
    sample.recomputed_tokens = 2;
    sample.shared_tokens = 4;
    sample.preemptions = 10;
    sample.preempted_for = {1, 2, 3, 4};
    samples.request->absorb(sample);
  }
  CHECK(samples.request->output_tokens == 0 + 1 + 2);
  CHECK(samples.request->computed_tokens == 30);
  CHECK(samples.request->recomputed_tokens == 6);
  CHECK(samples.request->shared_tokens == 12);
  CHECK(samples.request->preemptions == 30);
  CHECK(samples.request->preempted_for.own == 3);
  CHECK(samples.request->preempted_for.others == 6);
  CHECK(samples.request->preempted_for.itself == 9);
  CHECK(samples.request->preempted_for.paused == 12);
}
