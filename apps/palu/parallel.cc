#include "parallel.h"

#include <algorithm>
#include <thread>
#include <vector>

#ifndef PALU_OPENMP
#include <atomic>
#endif

namespace palu::app {

int ThreadCount(int option) {
  return option > 0 ? option : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

void ParallelFor(int64_t n, int threads, const std::function<void(int64_t)>& work) {
  threads = static_cast<int>(std::clamp<int64_t>(n, 1, std::max(1, threads)));
  if (threads == 1) {
    for (int64_t i = 0; i < n; ++i) work(i);
    return;
  }
#ifdef PALU_OPENMP
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < n; ++i) work(i);
#else
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t i; (i = next.fetch_add(1)) < n;) work(i);
  };
  std::vector<std::thread> pool;
  for (int t = 1; t < threads; ++t) pool.emplace_back(run);
  run();
  for (std::thread& thread : pool) thread.join();
#endif
}

}  // namespace palu::app
