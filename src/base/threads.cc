#include "base/threads.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#ifdef PALU_OPENMP
#include <omp.h>
#endif

namespace palu {
namespace {

// Keeps the first exception of many tasks, after which no other begins.
class FirstError {
 public:
  void Run(const Stage& stage, int64_t i) noexcept {
    if (failed_.load(std::memory_order_relaxed)) return;
    try {
      stage.body(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
      failed_ = true;
    }
  }
  void Rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::mutex mutex_;
  std::exception_ptr error_;
};

// Tasks of all stages in one row. A thread takes the next one, and waits before the first of a
// stage until all before it have ended: threads took them, so they will.
class Tasks {
 public:
  explicit Tasks(std::span<const Stage> stages) : stages_(stages) {}

  void Work() {
    size_t stage = 0;
    int64_t first = 0;  // task of the stage
    for (;;) {
      const int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      while (stage < stages_.size() && task >= first + stages_[stage].n) {
        first += stages_[stage++].n;
      }
      if (stage == stages_.size()) return;
      AwaitEnded(first);
      errors_.Run(stages_[stage], task - first);
      ended_.fetch_add(1, std::memory_order_release);
    }
  }
  void Rethrow() { errors_.Rethrow(); }
  // Of one stage.
  int64_t most() const {
    int64_t n = 0;
    for (const Stage& stage : stages_) n = std::max(n, stage.n);
    return n;
  }

 private:
  void AwaitEnded(int64_t tasks) const {
    constexpr int kSpins = 2000;  // some microseconds: stages are short
    for (int i = 0; ended_.load(std::memory_order_acquire) < tasks; ++i) {
      if (i >= kSpins) std::this_thread::yield();
    }
  }

  std::span<const Stage> stages_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> ended_{0};
  FirstError errors_;
};

void RunOnThreads(int threads, Tasks& tasks) {
#ifdef PALU_OPENMP
  // The OpenMP pool is the one that ggml uses, so a host's threads and ours are the same threads.
  // Always all of them: libgomp ends those that a smaller team does not need.
#pragma omp parallel num_threads(threads)
  tasks.Work();
#else
  std::vector<std::jthread> pool;
  for (int t = 1; t < std::min<int64_t>(threads, tasks.most()); ++t) {
    pool.emplace_back([&] { tasks.Work(); });
  }
  tasks.Work();
#endif
}

}  // namespace

int ResolveThreads(int requested) {
  if (requested > 0) return requested;
#ifdef PALU_OPENMP
  return omp_get_max_threads();
#else
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#endif
}

void ParallelFor(int threads, int64_t n, const std::function<void(int64_t)>& body) {
  const Stage stage{n, body};
  ParallelStages(threads, {&stage, 1});
}

void ParallelStages(int threads, std::span<const Stage> stages) {
  Tasks tasks(stages);
  if (threads <= 1 || tasks.most() <= 1) {
    for (const Stage& stage : stages) {
      for (int64_t i = 0; i < stage.n; ++i) stage.body(i);
    }
    return;
  }
  RunOnThreads(threads, tasks);
  tasks.Rethrow();
}

}  // namespace palu
