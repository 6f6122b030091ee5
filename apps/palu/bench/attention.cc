#include "bench/attention.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "bench/attention_cache.h"
#include "bench/samples.h"
#include "interrupt.h"
#include "measure.h"
#include "progress.h"

namespace palu::app {
namespace {

constexpr int kChunk = 512;           // tokens of an append
constexpr double kSeconds = 0.5;      // of samples of one cache, where the least number takes less
constexpr size_t kMaxSamples = 2000;  // of one cache

struct Contender {
  CachePlan plan;
  std::unique_ptr<AttentionCache> cache;
  std::vector<double> samples;  // ms of one layer
  int next = 0;                 // run
};

void Sample(Contender& c, int group) {
  const Timer timer;
  c.cache->Run(c.next);
  c.samples.push_back(timer.Seconds() * 1e3 / group);
  c.next = (c.next + 1) % (c.plan.layers / group);
}

// False after Ctrl-C.
bool SampleAll(std::vector<Contender>& all, int repeat, bool one_layer) {
  const auto group = [&](const Contender& c) { return one_layer ? 1 : c.plan.group; };
  const auto round = [&] {
    for (Contender& c : all) {
      if (Interrupted()) return false;
      Sample(c, group(c));
    }
    return true;
  };
  if (!round()) return false;  // the first use of memory and threads does not count
  for (Contender& c : all) c.samples.clear();
  const Timer timer;
  const size_t least = repeat;
  while (all[0].samples.size() < least ||
         (timer.Seconds() < kSeconds * static_cast<double>(all.size()) &&
          all[0].samples.size() < kMaxSamples)) {
    if (!round()) return false;
  }
  return true;
}

std::vector<AttentionRow> RowsOf(const AttentionPlan& plan, const std::vector<Contender>& all,
                                 int queries, int threads) {
  std::vector<AttentionRow> rows;
  double base = 0;
  for (const Contender& c : all) {
    const Spread ms = SpreadOf(c.samples);
    if (c.plan.cache == kBaseCache) base = ms.median;
    const double gb = static_cast<double>(c.cache->layer_bytes()) / 1e9;
    rows.push_back({plan.shape.Name(), plan.tokens, queries, c.plan.cache, c.cache->kernel(),
                    threads, ms.median, ms.min, gb / (ms.median / 1e3), 0});
  }
  for (AttentionRow& row : rows) row.vs_fp16 = base / row.ms_median;
  return rows;
}

// Empty after Ctrl-C.
std::vector<AttentionRow> Measure(const AttentionPlan& plan, std::vector<Contender>& all,
                                  const std::vector<float>& queries, int n, int repeat,
                                  int threads) {
  // Many queries keep a layer busy for long; there is nothing to gain from several in a sample.
  const bool one_layer = n > 1;
  for (Contender& c : all) {
    c.cache->Prepare(queries, n, one_layer ? 1 : c.plan.group);
    c.samples.clear();
    c.next = 0;
  }
  if (!SampleAll(all, repeat, one_layer)) return {};
  return RowsOf(plan, all, n, threads);
}

// Appends all tokens, the last chunk unsealed. False after Ctrl-C.
bool Fill(const AttentionPlan& plan, SyntheticTokens& tokens, std::vector<Contender>& all) {
  Progress progress(fmt::format("filling {} x {}", plan.shape.Name(), plan.tokens), plan.tokens,
                    ProgressUnit::kShare);
  const int64_t last = plan.tokens - std::max(1, plan.queries);
  for (int64_t at = 0; at < plan.tokens;) {
    if (Interrupted()) return false;
    const int64_t end = at < last ? last : plan.tokens;
    const int n = static_cast<int>(at < last ? std::min<int64_t>(kChunk, end - at) : end - at);
    tokens.Make(at, n);
    for (Contender& c : all) c.cache->Append(tokens, at, n, at >= last);
    at += n;
    progress.Update(at);
  }
  return true;
}

}  // namespace

std::vector<AttentionRow> MeasureAttention(AttentionPlan& plan, int repeat, int threads) {
  SyntheticTokens tokens(plan.shape.query_heads, plan.shape.kv_heads, plan.shape.head_dim);
  std::vector<Contender> all;
  for (const CachePlan& c : plan.caches) {
    all.push_back(
        {c, MakeAttentionCache(c.cache, plan.shape, plan.tokens, c.layers, threads), {}, 0});
  }
  if (!Fill(plan, tokens, all)) return {};
  std::vector<AttentionRow> rows;
  const auto measure = [&](int n) {
    const std::vector<float> queries = tokens.Queries(plan.tokens - n, n);
    const std::vector<AttentionRow> more = Measure(plan, all, queries, n, repeat, threads);
    rows.insert(rows.end(), more.begin(), more.end());
  };
  // As in a model: the chunk that is computed is not encoded yet.
  if (plan.queries > 0) measure(plan.queries);
  for (Contender& c : all) c.cache->Seal();
  if (!Interrupted()) measure(1);
  for (const Contender& c : all) {
    const std::string remark = c.cache->remark();
    if (!remark.empty()) plan.notes.push_back(c.plan.cache + ": " + remark);
  }
  return rows;
}

std::string ToText(const std::vector<AttentionRow>& rows) {
  size_t width = 5;
  for (const AttentionRow& row : rows) width = std::max(width, row.cache.size());
  std::string text;
  const AttentionRow* before = nullptr;
  for (const AttentionRow& row : rows) {
    if (before == nullptr || before->queries != row.queries || before->tokens != row.tokens ||
        before->shape != row.shape) {
      const std::string what =
          row.queries == 1 ? "decode of 1 token" : fmt::format("prefill of {} tokens", row.queries);
      text += fmt::format("{}, {} tokens, {}\n", row.shape, row.tokens, what);
      text += fmt::format("  {:<{}}  {:>10}  {:>10}  {:>7}  {:>7}  kernel\n", "cache", width,
                          "ms median", "min", "GB/s", "x fp16");
    }
    text += fmt::format("  {:<{}}  {:>10.4f}  {:>10.4f}  {:>7.2f}  {:>7.2f}  {}\n", row.cache,
                        width, row.ms_median, row.ms_min, row.gb_s, row.vs_fp16, row.kernel);
    before = &row;
  }
  return text;
}

nlohmann::ordered_json ToJson(const std::vector<AttentionRow>& rows,
                              const std::optional<MachineLimits>& limits) {
  nlohmann::ordered_json json;
  json["limits"] = limits ? ToJson(*limits) : nlohmann::ordered_json(nullptr);
  json["results"] = nlohmann::ordered_json::array();
  for (const AttentionRow& row : rows) {
    json["results"].push_back({{"shape", row.shape},
                               {"tokens", row.tokens},
                               {"queries", row.queries},
                               {"cache", row.cache},
                               {"kernel", row.kernel},
                               {"threads", row.threads},
                               {"ms_median", row.ms_median},
                               {"ms_min", row.ms_min},
                               {"gb_s", row.gb_s},
                               {"vs_fp16", row.vs_fp16}});
  }
  return json;
}

}  // namespace palu::app
