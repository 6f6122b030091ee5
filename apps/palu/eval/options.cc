#include "eval/options.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <filesystem>

#include "eval/sha256.h"
#include "palu/palu.h"

namespace palu::app {
namespace {

std::string Resolve(const std::string& cache) {
  if (cache.starts_with("llama:")) return cache;
  const KVCacheConfig config = KVCacheConfig::Parse(cache);
  const std::string text = config.ToString();
  if (config.basis != BasisKind::kFile) return text;
  return text + " (sha256 " + Sha256OfFile(config.basis_file) + ")";  // a file may change
}

std::string NameOf(const std::string& path) {
  return std::filesystem::path(path).filename().string();
}

}  // namespace

std::vector<EvalRow> EvalRows(const EvalOptions& options) {
  const std::string reference = Resolve(kReferenceCache);
  std::vector<EvalRow> rows;
  for (const std::string& cache : options.caches) {
    const std::string resolved = Resolve(cache);
    const auto same = std::find_if(rows.begin(), rows.end(),
                                   [&](const EvalRow& row) { return row.resolved == resolved; });
    if (same != rows.end()) {
      spdlog::warn("--cache {} means the same as {}: one row", cache, same->cache);
      continue;
    }
    rows.push_back({cache, resolved, resolved == reference});
  }
  return rows;
}

std::string CommandLine(const EvalOptions& o) {
  const EvalOptions defaults;
  std::string line = fmt::format("palu eval -m {} -f {} --ctx {} --chunks {}", NameOf(o.model),
                                 NameOf(o.file), o.context, o.chunks);
  if (o.mode != defaults.mode) {
    line += " --mode " + o.mode;
  } else if (o.batch != defaults.batch) {
    line += fmt::format(" --batch {}", o.batch);
  }
  if (o.weights != defaults.weights) line += " --weights " + o.weights;
  if (o.needle) line += fmt::format(" --needle --needle-ctx {}", fmt::join(o.needle_contexts, ","));
  if (o.greedy > 0) line += fmt::format(" --greedy {}", o.greedy);
  if (o.threads != defaults.threads) line += fmt::format(" -t {}", o.threads);
  for (const std::string& cache : o.caches) line += " --cache " + cache;
  if (!o.json.empty()) line += " --json " + NameOf(o.json);
  if (!o.html.empty()) line += " --html " + NameOf(o.html);
  return line;
}

}  // namespace palu::app
