// File: threads.h - share independent tasks over threads.
#ifndef PALU_SRC_BASE_THREADS_H_
#define PALU_SRC_BASE_THREADS_H_

#include <cstdint>
#include <functional>

namespace palu {

// Number of threads for `requested` (0 = all).
int ResolveThreads(int requested);

// Calls body(i) once for every i in [0, n), from up to `threads` threads, in any order; returns
// when all are done. Every result must depend on i alone, never on the thread: that is what makes
// the library deterministic. An exception from a body is rethrown after all others have ended.
void ParallelFor(int threads, int64_t n, const std::function<void(int64_t)>& body);

}  // namespace palu

#endif  // PALU_SRC_BASE_THREADS_H_
