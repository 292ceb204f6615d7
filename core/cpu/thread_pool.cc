#include "core/cpu/thread_pool.h"

#include "core/check.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvledger::cpu {
namespace {

constexpr std::uint64_t kJobShift = 32;
constexpr std::uint64_t kItemMask = (std::uint64_t{1} << kJobShift) - 1;

// About 50 microseconds of polling before a worker sleeps: longer than the Python between two
// kernels, far shorter than the wait for a next request.
constexpr int kSpins = 1500;

void pause() noexcept {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) {
  KVL_CHECK_GE(threads, 1);
  workers_.reserve(static_cast<std::size_t>(threads) - 1);
  for (int thread = 1; thread < threads; ++thread) {
    workers_.emplace_back([this, thread] { serve(thread); });
  }
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  ticket_.fetch_add(std::uint64_t{1} << kJobShift);
  ticket_.notify_all();
  for (std::thread& worker : workers_) {
    worker.join();
  }
}

void ThreadPool::run_job(std::int64_t items, Call call, const void* context) {
  KVL_CHECK_LT(items, std::int64_t{1} << 31);
  if (workers_.empty() || items <= 1) {
    for (std::int64_t item = 0; item < items; ++item) {
      call(context, item, 0);
    }
    return;
  }
  items_.store(items, std::memory_order_relaxed);
  call_.store(call, std::memory_order_relaxed);
  context_.store(context, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  const std::uint64_t job = ((ticket_.load(std::memory_order_relaxed) >> kJobShift) + 1)
                            << kJobShift;
  const std::uint64_t ticket = job | static_cast<std::uint64_t>(items);
  ticket_.store(ticket, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) {
    ticket_.notify_all();
  }
  work_on(ticket, 0);
  while (done_.load(std::memory_order_acquire) != items) {
    pause();
  }
}

void ThreadPool::barriers(std::int64_t rounds) {
  alignas(64) std::atomic<std::int64_t> arrived{0};
  const std::int64_t crew = threads();
  // One item for each thread: an item ends only when all have begun.
  run(crew, [&](std::int64_t, int) {
    for (std::int64_t round = 1; round <= rounds; ++round) {
      arrived.fetch_add(1, std::memory_order_acq_rel);
      while (arrived.load(std::memory_order_acquire) < round * crew) {
        pause();
      }
    }
  });
}

// Takes items of the job that `ticket` belongs to until none is left.
void ThreadPool::work_on(std::uint64_t ticket, int thread) {
  const std::uint64_t job = ticket >> kJobShift;
  std::int64_t finished = 0;
  while ((ticket >> kJobShift) == job && (ticket & kItemMask) > 0) {
    if (ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
      const auto left = static_cast<std::int64_t>(ticket & kItemMask);
      const std::int64_t item = items_.load(std::memory_order_relaxed) - left;
      const void* context = context_.load(std::memory_order_relaxed);
      call_.load(std::memory_order_relaxed)(context, item, thread);
      ++finished;
      ticket = ticket_.load(std::memory_order_acquire);
    }
  }
  if (finished > 0) {
    done_.fetch_add(finished, std::memory_order_release);
  }
}

void ThreadPool::serve(int thread) {
  std::uint64_t seen = 0;
  while (true) {
    std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
    for (int spin = 0; spin < kSpins && (ticket >> kJobShift) == seen; ++spin) {
      pause();
      ticket = ticket_.load(std::memory_order_acquire);
    }
    if ((ticket >> kJobShift) == seen) {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      ticket = ticket_.load(std::memory_order_seq_cst);
      if ((ticket >> kJobShift) == seen) {
        ticket_.wait(ticket, std::memory_order_seq_cst);
      }
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
      continue;
    }
    if (stopping_.load()) {
      return;
    }
    seen = ticket >> kJobShift;
    work_on(ticket, thread);
  }
}

}  // namespace kvledger::cpu
