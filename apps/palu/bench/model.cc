// `palu bench model`: rounds over rows, each in a process of its own.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "bench/model_options.h"
#include "bench/model_row.h"
#include "bench/samples.h"
#include "bench/self_process.h"
#include "files.h"
#include "interrupt.h"
#include "palu/methods.h"
#include "parallel.h"
#include "progress.h"
#include "run_options.h"
#include "sizes.h"

namespace palu::app {
namespace {

struct ModelRow {
  int64_t depth = 0;
  std::string cache;
  std::vector<ModelSample> samples;
};

std::vector<double> Values(const ModelRow& row, double ModelSample::*field) {
  std::vector<double> values;
  for (const ModelSample& sample : row.samples) values.push_back(sample.*field);
  return values;
}

int64_t PeakOf(const ModelRow& row) {
  int64_t peak = 0;
  for (const ModelSample& sample : row.samples) peak = std::max(peak, sample.peak_rss_bytes);
  return peak;
}

std::vector<std::string> RowArguments(const ModelBenchOptions& o, int64_t depth,
                                      const std::string& cache) {
  return {"bench",    kModelRowVerb,
          "-m",       o.model,
          "--depth",  std::to_string(depth),
          "--cache",  cache,
          "-n",       std::to_string(o.tokens),
          "--prompt", std::to_string(o.prompt),
          "-t",       std::to_string(o.threads)};
}

// What can be known to fail later fails now, in one process that sees all rows.
int CheckRows(const ModelBenchOptions& o) {
  std::vector<std::string> arguments = RowArguments(o, o.depths[0], o.caches[0]);
  arguments.push_back("--check");
  for (size_t i = 1; i < o.depths.size(); ++i) {
    arguments.insert(arguments.end(), {"--depth", std::to_string(o.depths[i])});
  }
  for (size_t i = 1; i < o.caches.size(); ++i) {
    arguments.insert(arguments.end(), {"--cache", o.caches[i]});
  }
  Note note("checking the model and the caches");
  return RunSelf(arguments).code;
}

std::string TableOf(const std::vector<ModelRow>& rows, int64_t depth) {
  size_t width = 5;
  for (const ModelRow& row : rows) width = std::max(width, row.cache.size());
  std::string text =
      fmt::format("depth {}\n  {:<{}}  {:>12}  {:>17}  {:>12}  {:>17}  {:>10}\n", depth, "cache",
                  width, "prompt tok/s", "min..max", "decode tok/s", "min..max", "peak RSS");
  for (const ModelRow& row : rows) {
    if (row.depth != depth || row.samples.empty()) continue;
    const Spread prompt = SpreadOf(Values(row, &ModelSample::prompt_tok_s));
    const Spread decode = SpreadOf(Values(row, &ModelSample::decode_tok_s));
    text += fmt::format("  {:<{}}  {:>12.1f}  {:>17}  {:>12.1f}  {:>17}  {:>10}\n", row.cache,
                        width, prompt.median, fmt::format("{:.1f}..{:.1f}", prompt.min, prompt.max),
                        decode.median, fmt::format("{:.1f}..{:.1f}", decode.min, decode.max),
                        FormatBytes(PeakOf(row)));
  }
  return text + "\n";
}

nlohmann::ordered_json JsonOf(const ModelBenchOptions& o, const std::vector<ModelRow>& rows) {
  nlohmann::ordered_json json = {{"model", std::filesystem::path(o.model).filename().string()},
                                 {"kernel", KernelTarget()},
                                 {"threads", ThreadCount(o.threads)},
                                 {"prompt", o.prompt},
                                 {"tokens", o.tokens},
                                 {"results", nlohmann::ordered_json::array()}};
  for (const ModelRow& row : rows) {
    if (row.samples.empty()) continue;
    const Spread prompt = SpreadOf(Values(row, &ModelSample::prompt_tok_s));
    const Spread decode = SpreadOf(Values(row, &ModelSample::decode_tok_s));
    json["results"].push_back({{"depth", row.depth},
                               {"cache", row.cache},
                               {"rounds", row.samples.size()},
                               {"prompt_tok_s", prompt.median},
                               {"prompt_tok_s_min", prompt.min},
                               {"prompt_tok_s_max", prompt.max},
                               {"decode_tok_s", decode.median},
                               {"decode_tok_s_min", decode.min},
                               {"decode_tok_s_max", decode.max},
                               {"peak_rss_bytes", PeakOf(row)}});
  }
  return json;
}

// One more sample for every row of a depth. Returns an exit code; 0 = go on.
int RunRound(const ModelBenchOptions& o, int64_t depth, std::vector<ModelRow>& rows,
             const std::function<void()>& done) {
  for (ModelRow& row : rows) {
    if (row.depth != depth) continue;
    if (Interrupted()) return kInterruptedExit;
    const SelfResult result = RunSelf(RowArguments(o, depth, row.cache));
    if (Interrupted()) return kInterruptedExit;
    if (result.code > 128) {
      spdlog::error("{} at depth {}: its process was ended by signal {}", row.cache, depth,
                    result.code - 128);
      return 1;
    }
    if (result.code != 0) return result.code;  // it has said why
    row.samples.push_back(ModelSampleFrom(result.out));
    done();
  }
  return 0;
}

}  // namespace

int BenchModel(const ModelBenchOptions& o) {
  if (!o.json.empty()) CheckWritable(o.json);
  if (const int code = CheckRows(o); code != 0) return code;
  CatchInterrupt();
  std::vector<ModelRow> rows;
  for (const int64_t depth : o.depths) {
    for (const std::string& cache : o.caches) rows.push_back({depth, cache, {}});
  }
  WriteOut(
      fmt::format("kernels: {}, threads: {}; prompt of {}, {} tokens one by one, {} rounds\n\n",
                  KernelTarget(), ThreadCount(o.threads), o.prompt, o.tokens, o.rounds));
  int code = 0;
  for (size_t d = 0; d < o.depths.size() && code == 0; ++d) {
    {
      Progress progress(fmt::format("depth {}", o.depths[d]),
                        static_cast<int64_t>(o.caches.size()) * o.rounds, ProgressUnit::kShare);
      int64_t done = 0;
      for (int round = 0; round < o.rounds && code == 0; ++round) {
        code = RunRound(o, o.depths[d], rows, [&] { progress.Update(++done); });
      }
    }
    WriteOut(TableOf(rows, o.depths[d]));
  }
  if (!o.json.empty()) WriteJson(o.json, JsonOf(o, rows));
  return code;
}

}  // namespace palu::app
