// File: threads.h - share independent tasks over threads.
#ifndef PALU_SRC_BASE_THREADS_H_
#define PALU_SRC_BASE_THREADS_H_

#include <cstdint>
#include <functional>
#include <span>

namespace palu {

// Number of threads for `requested` (0 = all).
int ResolveThreads(int requested);

// Calls body(i) once for every i in [0, n), from up to `threads` threads, in any order; returns
// when all are done. Every result must depend on i alone, never on the thread: that is what makes
// the library deterministic. After an exception no body begins any more; it is rethrown when those
// that run have ended.
// Cost with OpenMP: waking `threads` threads, even if n is smaller (a smaller team would end the
// others, and starting them again costs a hundred times as much). Without: starting threads.
void ParallelFor(int threads, int64_t n, const std::function<void(int64_t)>& body);

struct Stage {
  int64_t n;
  std::function<void(int64_t)> body;
};

// The same for one stage after the other: none begins before the last has ended, and none after an
// exception. Threads are woken once for all.
void ParallelStages(int threads, std::span<const Stage> stages);

}  // namespace palu

#endif  // PALU_SRC_BASE_THREADS_H_
