// File: parallel.h - work of the program itself on several threads.
#ifndef PALU_APPS_PARALLEL_H_
#define PALU_APPS_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace palu::app {

// Calls work(i) once for every i in [0, n), on at most `threads` threads (1 or less: this one).
// `work` must not throw. Where OpenMP is used these are the threads that the model runs on, so the
// two never wait for each other in a loop.
void ParallelFor(int64_t n, int threads, const std::function<void(int64_t)>& work);

// The threads that an option of 0 (all cores) means.
int ThreadCount(int option);

}  // namespace palu::app

#endif  // PALU_APPS_PARALLEL_H_
