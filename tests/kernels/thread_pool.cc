#include "core/cpu/thread_pool.h"

#include <chrono>
#include <vector>

#include "tests/check_throws.h"

namespace kvledger::cpu {

// An item that runs twice or never would leave a hole in a matrix.
TEST_CASE("every item runs exactly once, job after job") {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    for (int job = 0; job < 2000; ++job) {
      const std::int64_t items = job % 37;
      std::vector<std::atomic<int>> runs(static_cast<std::size_t>(items));
      pool.run(items, [&](std::int64_t item, int thread) {
        CHECK(thread >= 0);
        CHECK(thread < threads);
        runs[static_cast<std::size_t>(item)].fetch_add(1);
      });
      for (const auto& count : runs) {
        REQUIRE(count.load() == 1);
      }
    }
  }
}

// A worker that is late for a job must not take items of the next one for its own: jobs of
// different sizes in quick succession, with more threads than processors, gave it the chance.
TEST_CASE("a late worker does not disturb the next job") {
  ThreadPool pool(6);
  std::vector<std::atomic<std::int64_t>> runs(64);
  std::int64_t expected = 0;
  for (int job = 0; job < 200'000; ++job) {
    const std::int64_t items = 2 + job % 3 * 20;
    pool.run(items, [&](std::int64_t item, int) {
      runs[static_cast<std::size_t>(item)].fetch_add(1, std::memory_order_relaxed);
    });
    expected += items;
  }
  std::int64_t sum = 0;
  for (const auto& count : runs) {
    sum += count.load();
  }
  CHECK(sum == expected);
}

// A worker that went to sleep must come back for the next job.
TEST_CASE("workers that sleep wake up") {
  ThreadPool pool(3);
  for (int job = 0; job < 20; ++job) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::atomic<int> sum{0};
    pool.run(100, [&](std::int64_t item, int) { sum.fetch_add(static_cast<int>(item)); });
    CHECK(sum.load() == 4950);
  }
}

// The measurement of how near the processors are must end, whatever the number of threads.
TEST_CASE("barriers end") {
  ThreadPool pool(2);
  pool.barriers(1000);
  pool.run(5, [](std::int64_t, int) {});
}

// With no thread at all nobody would do the work.
TEST_CASE("a pool has at least one thread") {
  CHECK_BREAKS(ThreadPool(0));
}

}  // namespace kvledger::cpu
