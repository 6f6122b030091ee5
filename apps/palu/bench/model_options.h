// File: model_options.h - what `palu bench model` was asked for.
#ifndef PALU_APPS_BENCH_MODEL_OPTIONS_H_
#define PALU_APPS_BENCH_MODEL_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace palu::app {

struct ModelBenchOptions {
  std::string model, json;
  std::vector<int64_t> depths = {0, 4096};
  std::vector<std::string> caches = {"llama:f16", "llama:f16,fa=off", "llama:q8_0", "fp16", "palu"};
  int64_t prompt = 256;  // tokens of a prompt at each depth; 0 = none
  int64_t tokens = 32;   // written one by one at each depth
  int rounds = 5;
  int threads = 0;  // 0 = all cores
};

// Name of the hidden verb that measures one row in a process of its own.
inline constexpr char kModelRowVerb[] = "model-row";

// Runs all rows in processes of this program. Returns the exit code.
int BenchModel(const ModelBenchOptions& options);

// What that verb does: the only depth and cache of `options`, one JSON line on standard output.
int BenchModelRow(const ModelBenchOptions& options);
// Before anything is measured: every cache with the model, and every depth with the memory. Prints
// nothing when all is well. Errors: those of the model and the caches, MemoryError.
int CheckModelRows(const ModelBenchOptions& options);

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_MODEL_OPTIONS_H_
