// What it costs to share work: calls with almost nothing to do, of as many tasks as a layer has.
//
//   threads_bench
#include <benchmark/benchmark.h>

#include "base/threads.h"

namespace palu {
namespace {

void Nothing(int64_t i) { benchmark::DoNotOptimize(i); }

// Now few tasks, now many, on the same threads.
void OneStage(benchmark::State& state) {
  const auto threads = static_cast<int>(state.range(0));
  int64_t calls = 0;
  for (auto _ : state) ParallelFor(threads, ++calls % 2 ? 2 * threads : 2, Nothing);
}
BENCHMARK(OneStage)->ArgName("threads")->RangeMultiplier(2)->Range(2, 16)->UseRealTime();

void ThreeStages(benchmark::State& state) {
  const auto threads = static_cast<int>(state.range(0));
  const Stage stages[] = {{2, Nothing}, {2 * threads, Nothing}, {2, Nothing}};
  for (auto _ : state) ParallelStages(threads, stages);
}
BENCHMARK(ThreeStages)->ArgName("threads")->RangeMultiplier(2)->Range(2, 16)->UseRealTime();

}  // namespace
}  // namespace palu
