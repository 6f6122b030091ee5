// File: options.h - what `palu eval` was asked for.
#ifndef PALU_APPS_EVAL_OPTIONS_H_
#define PALU_APPS_EVAL_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace palu::app {

struct EvalOptions {
  std::string model, file, json, html;
  std::vector<std::string> caches;  // as typed
  int64_t context = 4096;
  int64_t chunks = 4;  // 0 = no distances, only the other checks
  int64_t batch = 64;  // tokens per batch in the scored half: a query sees so many tokens exactly
                       // at most, beside the window
  std::string mode = "batch";    // "decode": token by token, so batch is 1
  std::string weights = "file";  // "f32": the model's weights expanded first
  bool needle = false;
  std::vector<int64_t> needle_contexts = {2048, 4096, 8192};
  int64_t greedy = 0;  // prompts; 0 = no such check
  int threads = 0;     // 0 = all cores
};

// One row of the results.
struct EvalRow {
  std::string cache;     // as typed
  std::string resolved;  // all options spelled out: names its cells
  // The reference's own cache: runs in batches of another size, so that its distance from the
  // reference is that of another order of additions.
  bool noise_floor = false;
};

// One row per cache, without the second of two that mean the same. Errors: ConfigError.
std::vector<EvalRow> EvalRows(const EvalOptions& options);

// The command line that means the same: files without their folders, defaults left out.
std::string CommandLine(const EvalOptions& options);

// The cache that all others are compared with.
inline constexpr char kReferenceCache[] = "fp16";

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_OPTIONS_H_
