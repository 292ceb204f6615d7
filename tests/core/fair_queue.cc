#include "core/fair_queue.h"

#include <deque>
#include <memory>
#include <vector>

#include "tests/check_throws.h"

using namespace kvledger;

namespace {

using Ids = std::vector<std::uint64_t>;

constexpr auto anybody = [](TenantId) { return true; };

// Sequences that come, wait and are served by hand.
struct Waiting {
  FairQueue queue{100};
  std::deque<std::unique_ptr<Sequence>> sequences;

  Sequence& come(std::uint64_t id, std::uint32_t tenant, std::size_t tokens) {
    Arrival arrival;
    arrival.id = SequenceId{id};
    arrival.tenant = TenantId{tenant};
    auto request = std::make_shared<Request>(arrival.id, RequestAccount{});
    sequences.push_back(
        std::make_unique<Sequence>(arrival, std::vector<Token>(tokens, 5), request));
    Sequence& sequence = *sequences.back();
    sequence.rank = static_cast<std::int64_t>(id);
    sequence.line = &queue.enter(arrival.tenant);
    queue.insert(sequence);
    return sequence;
  }
  void serve(Sequence& sequence, std::int64_t service) {
    queue.extract(sequence);
    queue.give(*sequence.line, service);
    queue.count({sequence.line});
  }
  Ids order() {
    Ids ids;
    FairQueue::Cursor cursor = queue.look();
    while (const Sequence* sequence = cursor.next()) {
      ids.push_back(sequence->id.value());
    }
    return ids;
  }
};

}  // namespace

TEST_CASE("one tenant waits in the order of ranks") {
  // If this fails, the order of service is chance where only one tenant is served.
  Waiting waiting;
  for (const std::uint64_t id : {4, 1, 3, 2}) {
    waiting.come(id, 1, 10);
  }
  CHECK(waiting.order() == Ids{1, 2, 3, 4});
  waiting.queue.extract(*waiting.sequences[2]);
  CHECK(waiting.order() == Ids{1, 2, 4});
  CHECK(waiting.queue.size() == 3);
}

TEST_CASE("tenants take turns by the tokens that they are given, not by requests") {
  // If this fails, who sends long prompts is served more than who sends short ones.
  Waiting waiting;
  waiting.come(1, 1, 40);
  waiting.come(2, 1, 40);
  waiting.come(3, 2, 10);
  waiting.come(4, 2, 10);
  waiting.come(5, 2, 10);
  waiting.come(6, 2, 10);
  waiting.come(7, 2, 10);
  CHECK(waiting.order() == Ids{1, 3, 4, 5, 6, 2, 7});
}

TEST_CASE("who was given least goes first") {
  // If this fails, who floods the queue is served before who comes with a single request.
  Waiting waiting;
  Sequence& first = waiting.come(1, 1, 10);
  waiting.come(2, 1, 10);
  waiting.come(3, 1, 10);
  waiting.serve(first, 50);
  waiting.come(4, 2, 10);
  CHECK(waiting.order() == Ids{4, 2, 3});
}

TEST_CASE("who was away has saved up no more than the credit") {
  // If this fails, a tenant that was idle for a day stops all others for as long.
  Waiting waiting;
  Sequence* next = &waiting.come(1, 1, 10);
  for (std::uint64_t id = 2; id <= 20; ++id) {
    Sequence& following = waiting.come(id, 1, 10);
    waiting.serve(*next, 1000);
    next = &following;
  }
  CHECK(next->line->service() == 19'000);
  Sequence& late = waiting.come(21, 2, 10);
  CHECK(late.line->service() == 18'000 - 100);  // the least of those who waited, and the credit
  CHECK(waiting.order() == Ids{21, 20});
}

TEST_CASE("who leaves and comes back has still been given what it was given") {
  // If this fails, a tenant gets rid of its share by waiting for a moment.
  Waiting waiting;
  Sequence& greedy = waiting.come(1, 1, 10);
  waiting.come(2, 2, 10);
  waiting.serve(greedy, 5000);
  waiting.come(3, 1, 10);
  CHECK(waiting.order() == Ids{2, 3});
  CHECK(waiting.sequences[2]->line->service() == 5000);
}

TEST_CASE("what was given while nobody waited is held against nobody") {
  // If this fails, a tenant that used an idle machine is starved when others come.
  Waiting waiting;
  Sequence& alone = waiting.come(1, 1, 10);
  waiting.queue.extract(alone);
  waiting.queue.give(*alone.line, 1'000'000);
  waiting.queue.count({});
  waiting.come(2, 2, 10);
  CHECK(waiting.sequences[1]->line->service() == 1'000'000 - 100);
}

TEST_CASE("a tenant can be left out of a look") {
  // If this fails, one tenant at its limit makes each step look at all that it has waiting.
  Waiting waiting;
  waiting.come(1, 1, 10);
  waiting.come(2, 1, 10);
  waiting.come(3, 2, 30);
  FairQueue::Cursor cursor = waiting.queue.look();
  CHECK(cursor.next()->id.value() == 1);
  cursor.skip_tenant();
  CHECK(cursor.next()->id.value() == 3);
  CHECK(cursor.next() == nullptr);
  CHECK(cursor.next() == nullptr);
}

TEST_CASE("somebody is before a sequence of another tenant if that one was given less") {
  // If this fails, samples of one tenant go on before another that has waited for its turn.
  Waiting waiting;
  Sequence& one = waiting.come(1, 1, 10);
  Sequence& two = waiting.come(2, 2, 10);
  waiting.serve(one, 30);
  CHECK(waiting.queue.is_before(one, anybody));
  waiting.serve(two, 60);
  CHECK_FALSE(waiting.queue.is_before(one, anybody));
  waiting.come(3, 2, 10);
  CHECK_FALSE(waiting.queue.is_before(one, anybody));                       // it was given more
  CHECK(waiting.queue.is_before(*waiting.sequences[1], anybody) == false);  // it came first
}

TEST_CASE("two tenants that always wait are served within the credit of each other") {
  // If this fails, the promise of fairness has no bound.
  Waiting waiting;
  std::uint64_t id = 0;
  waiting.come(++id, 1, 700);
  waiting.come(++id, 1, 700);
  waiting.come(++id, 2, 30);
  waiting.come(++id, 2, 30);
  const TenantLine& left = *waiting.sequences[0]->line;
  const TenantLine& right = *waiting.sequences[2]->line;
  for (int i = 0; i < 10'000; ++i) {
    FairQueue::Cursor cursor = waiting.queue.look();
    Sequence& next = *cursor.next();
    const std::uint32_t tenant = next.tenant.value();
    waiting.serve(next, next.token_count());
    waiting.come(++id, tenant, tenant == 1 ? 700 : 30);
    REQUIRE(std::abs(left.service() - right.service()) <= 100 + 700);
  }
  CHECK(left.service() + right.service() > 500'000);
}

TEST_CASE("who waits for nothing but its own limit is before nobody") {
  // If this fails, a tenant at its own limit keeps the samples of all others from beginning.
  Waiting waiting;
  Sequence& one = waiting.come(1, 1, 10);
  waiting.come(2, 2, 10);
  waiting.serve(one, 30);
  CHECK(waiting.queue.is_before(one, anybody));
  CHECK_FALSE(waiting.queue.is_before(one, [](TenantId tenant) { return tenant != TenantId{2}; }));
}

TEST_CASE("who could not be served has saved up no more than who was away") {
  // If this fails, a tenant whose limit is raised stops all others for as long as it was held up.
  Waiting waiting;
  Sequence& held_up = waiting.come(1, 1, 10);
  Sequence& other = waiting.come(2, 2, 10);
  waiting.queue.give(*other.line, 5000);
  waiting.queue.count({other.line});
  waiting.queue.give(*other.line, 5000);
  waiting.queue.count({other.line});
  CHECK(held_up.line->service() == 0);
  waiting.queue.lift(*held_up.line);
  CHECK(held_up.line->service() == 5000 - 100);
  waiting.queue.lift(*other.line);
  CHECK(other.line->service() == 10'000);
  CHECK(waiting.order() == Ids{1, 2});
}
