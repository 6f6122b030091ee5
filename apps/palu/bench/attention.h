// File: attention.h - times one layer's attention, decode and prefill, for caches side by side.
#ifndef PALU_APPS_BENCH_ATTENTION_H_
#define PALU_APPS_BENCH_ATTENTION_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "bench/attention_plan.h"
#include "bench/limits.h"

namespace palu::app {

struct AttentionRow {
  std::string shape;
  int64_t tokens = 0;
  int queries = 1;  // 1 = decode
  std::string cache, kernel;
  int threads = 0;
  double ms_median = 0, ms_min = 0;  // of one layer
  double gb_s = 0;                   // stored bytes of the layer over the median, 1e9 a second
  double vs_fp16 = 0;                // the fp16 row's median over this one: above 1 is faster
};

// The rows of one plan, prefill and decode; fewer after Ctrl-C. Samples go round the caches, so
// that what disturbs the machine disturbs all of them. Adds to plan.notes.
std::vector<AttentionRow> MeasureAttention(AttentionPlan& plan, int repeat, int threads);

std::string ToText(const std::vector<AttentionRow>& rows);
nlohmann::ordered_json ToJson(const std::vector<AttentionRow>& rows,
                              const std::optional<MachineLimits>& limits);

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_ATTENTION_H_
