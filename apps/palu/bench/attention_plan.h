// File: attention_plan.h - how many layers each cache gets, so that a pass over them does not fit
// the CPU's caches and all of them fit the memory.
#ifndef PALU_APPS_BENCH_ATTENTION_PLAN_H_
#define PALU_APPS_BENCH_ATTENTION_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "bench/attention_options.h"

namespace palu::app {

struct CachePlan {
  std::string cache;
  int layers = 1;
  int group = 1;  // layers that one decode sample attends in; divides `layers`
};

// One shape and context, all caches at once.
struct AttentionPlan {
  AttentionShape shape;
  int64_t tokens = 0;
  int queries = 0;  // of prefill; 0 = none
  std::vector<CachePlan> caches;
  std::vector<std::string> notes;  // what is less than was asked for
};

// memory: bytes that all layers and what they compute with may take. Errors: MemoryError when one
// layer of each cache is too much.
AttentionPlan PlanAttention(const AttentionOptions& options, const AttentionShape& shape,
                            int64_t tokens, int64_t memory);

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_ATTENTION_PLAN_H_
