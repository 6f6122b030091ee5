#include "bench/attention_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "bench/attention_cache.h"
#include "palu/errors.h"
#include "sizes.h"

namespace palu::app {
namespace {

constexpr int64_t kMaxLayers = 1024;
// In a model one call into llama.cpp computes many layers; then what a call costs does not count.
constexpr int64_t kGroup = 8;

int64_t LayersFor(int64_t walk, int64_t layer_bytes) {
  const int64_t layers = std::clamp<int64_t>((walk + layer_bytes - 1) / layer_bytes, 1, kMaxLayers);
  const int64_t group = std::min(layers, kGroup);
  return (layers + group - 1) / group * group;
}

struct Sizes {
  std::vector<int64_t> layer;
  int64_t fixed = 0;

  int64_t Total(int64_t walk) const {
    int64_t sum = fixed;
    for (const int64_t bytes : layer) sum += LayersFor(walk, bytes) * bytes;
    return sum;
  }
};

Sizes SizesOf(const AttentionOptions& o, const AttentionShape& shape, int64_t tokens, int queries) {
  Sizes sizes;
  for (const std::string& cache : o.caches) {
    const AttentionBytes bytes = EstimateAttentionBytes(cache, shape, tokens, std::max(1, queries));
    sizes.layer.push_back(std::max<int64_t>(1, bytes.layer));
    sizes.fixed += bytes.scratch;
  }
  return sizes;
}

}  // namespace

AttentionPlan PlanAttention(const AttentionOptions& o, const AttentionShape& shape, int64_t tokens,
                            int64_t memory) {
  AttentionPlan plan;
  plan.shape = shape;
  plan.tokens = tokens;
  plan.queries = static_cast<int>(std::min<int64_t>(o.prefill, tokens));
  if (plan.queries < o.prefill) {
    plan.notes.push_back(
        fmt::format("there are only {} tokens, so prefill has {} queries", tokens, plan.queries));
  }
  const Sizes sizes = SizesOf(o, shape, tokens, plan.queries);
  if (sizes.Total(1) > memory) {
    throw MemoryError(fmt::format(
        "shape {} with {} tokens: one layer of each of {} caches needs {}; allowed: {} (--memory)",
        shape.Name(), tokens, o.caches.size(), FormatBytes(sizes.Total(1)), FormatBytes(memory)));
  }
  int64_t walk = o.walk;
  while (walk > 1 && sizes.Total(walk) > memory) walk /= 2;
  for (size_t i = 0; i < o.caches.size(); ++i) {
    const int64_t layers = LayersFor(walk, sizes.layer[i]);
    plan.caches.push_back(
        {o.caches[i], static_cast<int>(layers), static_cast<int>(std::min(layers, kGroup))});
    if (layers * sizes.layer[i] >= o.walk) continue;
    plan.notes.push_back(fmt::format("{} walks {} a pass, not {}: {}", o.caches[i],
                                     FormatBytes(layers * sizes.layer[i]), FormatBytes(o.walk),
                                     walk < o.walk
                                         ? "the memory ends there"
                                         : fmt::format("{} layers are the most", kMaxLayers)));
  }
  return plan;
}

}  // namespace palu::app
