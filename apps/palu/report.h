// File: report.h - what a run says about itself, as text and as JSON.
#ifndef PALU_APPS_REPORT_H_
#define PALU_APPS_REPORT_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "llama/session.h"

namespace palu::app {

struct RunReport {
  std::string model;    // path
  std::string cache;    // resolved text form
  std::string kernels;  // SIMD target; of llama:TYPE caches "llama.cpp"
  std::string text;     // the answer, UTF-8
  std::string stop;     // why it ended: "end of text", "limit", "interrupted"
  int64_t prompt_tokens = 0, generated_tokens = 0;
  double prompt_tok_s = 0, decode_tok_s = 0;  // 0 = not measured
  int64_t peak_rss_bytes = 0;
  int threads = 0;
  llama::SessionStats stats;
};

struct RankSummary {
  int min = 0, max = 0;
  double median = 0;
};

// Of at least one rank.
RankSummary Summarise(std::vector<int> ranks);

// A few aligned lines for people.
std::string ToText(const RunReport& report);
nlohmann::ordered_json ToJson(const RunReport& report);

}  // namespace palu::app

#endif  // PALU_APPS_REPORT_H_
