// The verb `recommend`: the best cache that fits a model, a context and a memory limit.
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "files.h"
#include "kv_estimate.h"
#include "palu/palu.h"
#include "run_options.h"
#include "sizes.h"
#include "verbs.h"

namespace palu::app {
namespace {

constexpr char kFooter[] =
    "With --results the measured row of least KL divergence that fits is chosen. Without, presets "
    "are taken in the order of their measured quality on other models (docs/results).";

struct RecommendOptions {
  std::string model, memory;
  std::vector<std::string> results, caches;
  int64_t context = 0;  // 0 = the model's training context
};

struct Candidate {
  std::string cache;
  int64_t bytes = 0;
  std::optional<double> kl, kl_p999;  // measured on this model
};

// Rows of a file that `palu eval --json` wrote.
std::vector<Candidate> MeasuredRows(const std::string& path, const std::string& model) {
  std::vector<Candidate> rows;
  try {
    const nlohmann::json json = nlohmann::json::parse(ReadText(path));
    const std::string measured = json.at("model");
    if (measured != model) {
      spdlog::warn("{} was measured on {}, not on {}", path, measured, model);
    }
    for (const nlohmann::json& row : json.at("results")) {
      rows.push_back({row.at("cache"), 0, row.at("kl_mean"), row.at("kl_p999")});
    }
  } catch (const nlohmann::json::exception& e) {
    throw FormatError(fmt::format("{} is no result of `palu eval --json`: {}", path, e.what()));
  }
  return rows;
}

std::vector<Candidate> Candidates(const RecommendOptions& o, const std::string& model) {
  std::vector<Candidate> rows;
  for (const std::string& path : o.results) {
    for (Candidate& row : MeasuredRows(path, model)) rows.push_back(std::move(row));
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Candidate& a, const Candidate& b) { return *a.kl < *b.kl; });
  for (const std::string& cache : o.caches) rows.push_back({cache, 0, {}, {}});
  // Best first.
  if (rows.empty()) {
    for (const char* cache : {"fp16", "palu:quality", "palu", "palu:small"}) {
      rows.push_back({cache, 0, {}, {}});
    }
  }
  return rows;
}

int64_t BytesOf(const ModelShape& shape, const std::string& cache, int64_t tokens) {
  if (cache.starts_with("llama:")) return EstimateKvBytes(shape, cache, tokens);
  return KVCacheBuilder::EstimateBytes(shape, KVCacheConfig::Parse(cache), tokens);
}

std::string Number(const std::optional<double>& x) { return x ? fmt::format("{:.5f}", *x) : "-"; }

int Recommend(const RecommendOptions& o) {
  const int64_t limit = ParseSize(o.memory);
  RunOptions run;
  run.model = o.model;
  run.context = o.context;
  const std::shared_ptr<const llama::Model> model = LoadModel(run);
  const int64_t tokens = o.context > 0 ? o.context : model->info().train_context;
  ModelShape shape = model->shape();
  shape.context = tokens;
  // `palu eval` names models by their files.
  std::vector<Candidate> rows = Candidates(o, std::filesystem::path(o.model).filename());
  for (Candidate& row : rows) row.bytes = BytesOf(shape, row.cache, tokens);

  const auto fits = [&](const Candidate& row) { return row.bytes <= limit; };
  const auto best = std::find_if(rows.begin(), rows.end(), fits);
  if (best == rows.end()) {
    const auto smallest =
        std::min_element(rows.begin(), rows.end(),
                         [](const Candidate& a, const Candidate& b) { return a.bytes < b.bytes; });
    throw MemoryError(
        fmt::format("no cache holds {} tokens of this model in {}; the smallest here, {}, needs {}",
                    tokens, FormatBytes(limit), smallest->cache, FormatBytes(smallest->bytes)));
  }
  size_t width = 5;
  for (const Candidate& row : rows) width = std::max(width, row.cache.size());
  std::string text =
      fmt::format("{:<{}}  {:>10}  {:>9}  {:>9}\n", "cache", width, "KV", "KL", "99.9 %");
  for (const Candidate& row : rows) {
    text += fmt::format("{:<{}}  {:>10}  {:>9}  {:>9}  {}\n", row.cache, width,
                        FormatBytes(row.bytes), Number(row.kl), Number(row.kl_p999),
                        !fits(row)       ? "too large"
                        : &row == &*best ? "<- this one"
                                         : "");
  }
  text += fmt::format("\n--cache {}   {} tokens in {} of {}\n", best->cache, tokens,
                      FormatBytes(best->bytes), FormatBytes(limit));
  WriteOut(text);
  return 0;
}

}  // namespace

void AddRecommend(CLI::App& app, Action& action) {
  auto options = std::make_shared<RecommendOptions>();
  RecommendOptions& o = *options;
  CLI::App* verb = app.add_subcommand(
      "recommend", "Choose the best cache that fits a model, a context and a memory limit");
  verb->footer(kFooter);
  verb->add_option("-m,--model", o.model, "GGUF file")->required()->type_name("FILE");
  verb->add_option("--context", o.context, "Tokens; 0 = what the model was trained for")
      ->capture_default_str()
      ->check(CLI::Range(0, 1 << 30).description(""))
      ->type_name("N");
  verb->add_option("--kv-memory", o.memory, "Memory for the KV cache, such as 200M")
      ->required()
      ->type_name("SIZE");
  verb->add_option("--results", o.results, "What `palu eval --json` wrote for this model; repeat")
      ->type_name("FILE");
  verb->add_option("--cache", o.caches, "A cache to consider instead of the presets; repeat")
      ->type_name("CACHE");
  verb->callback([options, &action] { action = [options] { return Recommend(*options); }; });
}

}  // namespace palu::app
