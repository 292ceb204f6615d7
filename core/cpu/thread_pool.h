// The core's own threads: a fixed crew that shares out the items of one job after another.
//
// run() hands out item numbers from one counter, so an uneven item delays nobody else, and the
// calling thread works too. Which thread computes an item never changes a result: kernels write
// each output from one item, and combine partial results in a fixed order.
//
// Between jobs a worker spins for a moment, because the next kernel usually follows within
// microseconds, and then sleeps. The caller waits only for workers that took an item: one that is
// still waking up, or that the system gave no processor, holds nobody up.
//
// One thread at a time may call run().

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace kvledger::cpu {

class ThreadPool {
 public:
  // `threads` in all, the caller's included; at least 1.
  explicit ThreadPool(int threads);
  ~ThreadPool();

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Lets all threads meet `rounds` times, spinning: what one meeting takes tells how near the
  // processors are to each other.
  void barriers(std::int64_t rounds);

  int threads() const noexcept { return static_cast<int>(workers_.size()) + 1; }

  // Calls `work(item, thread)` once for each item from 0 to `items` - 1, with `thread` from 0 to
  // threads() - 1, and returns when all calls have returned.
  template <class Work>
  void run(std::int64_t items, Work&& work) {
    using Function = std::remove_reference_t<Work>;
    run_job(
        items,
        [](const void* context, std::int64_t item, int thread) {
          (*static_cast<const Function*>(context))(item, thread);
        },
        &work);
  }

 private:
  using Call = void (*)(const void* context, std::int64_t item, int thread);

  void run_job(std::int64_t items, Call call, const void* context);
  void work_on(std::uint64_t ticket, int thread);
  void serve(int thread);

  // The items not yet taken in the low half, the number of the job in the high half. Who counts
  // one down has taken an item, and the job cannot end before that item is done.
  std::atomic<std::uint64_t> ticket_{0};
  std::atomic<std::int64_t> done_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  // The job. Written before its ticket and read after an item is taken: between the last item of
  // a job and the next job they may change at any time.
  std::atomic<std::int64_t> items_{0};
  std::atomic<Call> call_{nullptr};
  std::atomic<const void*> context_{nullptr};
  std::vector<std::thread> workers_;
};

}  // namespace kvledger::cpu
