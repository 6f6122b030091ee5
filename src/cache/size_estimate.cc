// What a cache of so many tokens will hold, from the layouts that a fit on plausible data gives.
#include <algorithm>
#include <bit>
#include <cmath>

#include "cache/kv_cache_impl.h"
#include "methods/layer_codec.h"
#include "palu/builder.h"

namespace palu {
namespace {

// Moments of uncorrelated channels whose variances fall as those of keys and values do: by a factor
// of a hundred from first to last.
Moments TypicalMoments(int dim) {
  Moments m(dim);
  m.rows = 1024;
  for (int d = 0; d < dim; ++d) {
    m.second[static_cast<size_t>(d) * dim + d] =
        m.rows * std::pow(0.01, d / std::max(1.0, dim - 1.0));
  }
  return m;
}

std::shared_ptr<const LayerCodec> TypicalCodec(const LayerContext& context) {
  const LayerShape& shape = context.shape;
  const KVCacheConfig& config = context.config;
  LayerMoments moments;
  DivideHeads(config, *context.method, shape.kv_heads, moments);
  for (const HeadRange& group : moments.groups) {
    if (!context.method->fits()) break;
    const int heads = moments.units[group.first].last - moments.units[group.first].first;
    moments.k.push_back(TypicalMoments(heads * shape.head_dim_k));
    moments.v.push_back(TypicalMoments(heads * shape.head_dim_v));
    if (config.key_metric == KeyMetric::kQueries) {
      moments.q.push_back(TypicalMoments(heads * shape.head_dim_k));
    }
    if (config.key_mean == KeyMean::kRotated) {
      const RopeParams rope{RopePairing::kHalves, std::vector<float>(shape.head_dim_k / 2, 1.0f)};
      const RotatedMean mean(rope, std::vector<float>(shape.head_dim_k, 0.0f));
      moments.k_means.emplace_back(heads, mean);
    }
  }
  return FitLayer(config, *context.method, shape.head_dim_k, shape.head_dim_v, context.bits,
                  moments, context.account);
}

// Slabs and their table.
int64_t StoreBytes(const PageLayout& layout, int64_t pages, int64_t per_slab) {
  const int64_t slabs = (pages + per_slab - 1) / per_slab;
  const auto slab = static_cast<int64_t>(layout.page_bytes) * per_slab + int64_t{kReadPadding};
  const auto room = slabs == 0 ? 0 : std::bit_ceil(std::max<uint64_t>(slabs, 4));
  return slabs * slab + static_cast<int64_t>(room * sizeof(BufferPtr));
}

}  // namespace

int64_t EstimateLayerBytes(const LayerContext& context, int64_t tokens) {
  const PageLayout& raw = context.window.layout;
  const auto exact = [&](int64_t n) { return StoreBytes(raw, PagesFor(n, kBlockTokens), 1); };
  const bool windowed = context.windowed();
  // As a token at a time leaves it: the last one's window, in whole pages.
  const int64_t dropped =
      windowed ? std::max<int64_t>(0, tokens - context.shape.window) / kBlockTokens : 0;
  const int64_t held = tokens - dropped * kBlockTokens;
  if (!context.method->encodes() || tokens < context.fit_due()) return exact(held);
  const auto codec = TypicalCodec(context);
  const int64_t page = codec->layout.page_tokens, sinks = context.config.sink_tokens;
  const int64_t free = std::max<int64_t>(0, tokens - sinks - context.config.recent_tokens);
  const int64_t pages = std::max<int64_t>(0, free / page - dropped);
  const int64_t window = std::max<int64_t>(0, held - sinks - pages * page);
  return exact(std::min(tokens, sinks)) + exact(window) + codec->basis_bytes() +
         StoreBytes(codec->layout, pages, windowed ? 1 : PagesAtOnce(page));
}

}  // namespace palu
