#include "eval_options.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "palu/palu.h"

namespace palu::app {
namespace {

std::string Resolve(const std::string& cache) {
  return cache.starts_with("llama:") ? cache : KVCacheConfig::Parse(cache).ToString();
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

}  // namespace palu::app
