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

// Keeps the first exception of many tasks.
class FirstError {
 public:
  void Run(const std::function<void(int64_t)>& body, int64_t i) noexcept {
    try {
      body(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }
  void Rethrow() {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::exception_ptr error_;
};

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
  threads = static_cast<int>(std::min<int64_t>(threads, n));
  if (threads <= 1) {
    for (int64_t i = 0; i < n; ++i) body(i);
    return;
  }
  FirstError errors;
#ifdef PALU_OPENMP
  // The OpenMP pool is the one that ggml uses, so a host's threads and ours are the same threads.
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < n; ++i) errors.Run(body, i);
#else
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < n;) errors.Run(body, i);
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(work);
  work();
  for (std::thread& thread : pool) thread.join();
#endif
  errors.Rethrow();
}

}  // namespace palu
