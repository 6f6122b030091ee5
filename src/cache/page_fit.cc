// The fit: from some tokens, or from a basis file, to the codec of a layer.
#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "cache/page_coder.h"

namespace palu {
namespace {

// Makes of the un-rotated keys of group g, whose units are `heads` heads, keys as the cache will
// hold them: at every position, less their rotated means if the config asks for that.
void TurnKeys(size_t g, int heads, const LayerContext& context, const RopeParams& rope,
              LayerMoments& layer) {
  Moments& keys = layer.k[g];
  if (!layer.k_means.empty()) {
    const std::vector<double> mean = keys.Centre();
    for (int h = 0; h < heads; ++h) {
      const auto first = mean.begin() + h * context.shape.head_dim_k;
      layer.k_means[g].emplace_back(rope,
                                    std::vector<float>(first, first + context.shape.head_dim_k));
    }
  }
  keys = AverageOverPositions(keys, rope, context.positions, heads);
}

}  // namespace

std::shared_ptr<const LayerCodec> CalibratedCodec::Codec(const LayerContext& context,
                                                         const RopeParams& rope) {
  const std::lock_guard lock(mutex_);
  if (codec_) return codec_;
  const LayerShape& shape = context.shape;
  const KVCacheConfig& config = context.config;
  LayerMoments layer;
  DivideHeads(config, *context.method, shape.kv_heads, layer);
  const bool weighted = config.key_metric == KeyMetric::kQueries;
  if (config.key_mean == KeyMean::kRotated) layer.k_means.resize(layer.groups.size());
  for (size_t g = 0; g < layer.groups.size(); ++g) {
    const HeadRange& group = layer.groups[g];
    const HeadUnit& first = layer.units[group.first];
    const int heads = first.last - first.first;
    Moments k(heads * shape.head_dim_k), v(heads * shape.head_dim_v), q(heads * shape.head_dim_k);
    for (int u = group.first; u < group.last; ++u) {
      k.Add(moments_.Keys(layer.units[u]));
      v.Add(moments_.Values(layer.units[u]));
      if (weighted) q.Add(moments_.Queries(layer.units[u]));
    }
    layer.k.push_back(std::move(k));
    layer.v.push_back(std::move(v));
    TurnKeys(g, heads, context, rope, layer);
    if (weighted) layer.q.push_back(AverageOverPositions(q, rope, context.positions, heads));
  }
  codec_ = FitLayer(config, *context.method, shape.head_dim_k, shape.head_dim_v, context.bits,
                    layer, context.account, context.threads);
  rope_ = rope;
  moments_ = {};
  return codec_;
}

bool CalibratedCodec::Fits(const RopeParams& rope) const {
  const std::lock_guard lock(mutex_);
  return !codec_ || rope_ == rope;
}

int64_t CalibratedCodec::nbytes() const {
  const std::lock_guard lock(mutex_);
  return codec_ ? codec_->basis_bytes() : 0;
}

namespace {

// Turns keys back to position 0. positions: [n].
void UnrotateRows(const RopeParams& rope, const int64_t* positions, int64_t n, float* x, int dim) {
  for (int64_t i = 0; i < n;) {
    int64_t end = i + 1;
    while (end < n && positions[end] == positions[end - 1] + 1) ++end;
    Unrotate(rope, positions[i], x + i * dim, end - i, dim);
    i = end;
  }
}

// Moments of one side of rows [begin, end) of one unit; keys un-rotated where `rope` is given.
Moments UnitMoments(const LayerShape& shape, const FitRows& from, const HeadUnit& unit, bool is_v,
                    const RopeParams* rope, int64_t begin, int64_t end) {
  const int dim = is_v ? shape.head_dim_v : shape.head_dim_k;
  const int heads = unit.last - unit.first, width = heads * dim;
  constexpr int64_t kRows = 256;  // at a time
  std::vector<float> rows(static_cast<size_t>(kRows) * width),
      head(static_cast<size_t>(kRows) * dim);
  Moments moments(width);
  for (int64_t t = begin; t < end; t += kRows) {
    const int64_t count = std::min(kRows, end - t);
    for (int h = 0; h < heads; ++h) {
      from.read(unit.first + h, is_v, t, count, head.data());
      if (rope) UnrotateRows(*rope, &from.positions[t], count, head.data(), dim);
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(&head[i * dim], dim, &rows[i * width + h * dim]);
      }
    }
    moments.Add(rows.data(), count, width);
  }
  return moments;
}

}  // namespace

FitSample::FitSample(const LayerContext& context, const RopeParams& rope,
                     const MemoryAccountPtr& account)
    : context_(context), rope_(rope) {
  DivideHeads(context.config, *context.method, context.shape.kv_heads, layer_);
  int64_t bytes = 0;
  for (const HeadRange& group : layer_.groups) {
    const HeadUnit& unit = layer_.units[group.first];
    for (const int dim : {context.shape.head_dim_k, context.shape.head_dim_v}) {
      const int64_t width = int64_t{dim} * (unit.last - unit.first);
      bytes += (width + 1) * width * static_cast<int64_t>(sizeof(double));
    }
  }
  if (account) charge_ = MemoryCharge(account, bytes);
}

bool FitSample::averaged() const {
  return context_.config.key_fit == KeyFit::kAveraged && !rope_.inv_freq.empty();
}

void FitSample::Add(const FitRows& rows) {
  // One task per (unit, side, part of the rows); summed in that order afterwards, so that nothing
  // depends on the threads. A part makes up for its moments, which are width^2 numbers.
  constexpr int64_t kPartRows = 512, kRowsPerChannel = 8, kMostParts = 16;
  const auto n = static_cast<int64_t>(rows.positions.size());
  const int dim = std::max(context_.shape.head_dim_k, context_.shape.head_dim_v);
  const int64_t width = int64_t{dim} * (layer_.units[0].last - layer_.units[0].first);
  const int64_t part =
      std::max({kPartRows, kRowsPerChannel * width, (n + kMostParts - 1) / kMostParts});
  const int64_t parts = std::max<int64_t>(1, (n + part - 1) / part);
  std::vector<Moments> moments(2 * layer_.units.size() * static_cast<size_t>(parts), Moments(0));
  ParallelFor(context_.threads, static_cast<int64_t>(moments.size()), [&](int64_t i) {
    const int64_t unit = i / parts / 2, begin = i % parts * part;
    const bool is_v = i / parts % 2;
    moments[i] =
        UnitMoments(context_.shape, rows, layer_.units[unit], is_v,
                    averaged() && !is_v ? &rope_ : nullptr, begin, std::min(n, begin + part));
  });
  if (moments_.empty()) moments_.assign(2 * layer_.groups.size(), Moments(0));
  for (size_t g = 0; g < layer_.groups.size(); ++g) {
    const HeadRange& group = layer_.groups[g];
    for (int64_t i = 2 * parts * group.first; i < 2 * parts * group.last; ++i) {
      Moments& sum = moments_[2 * g + static_cast<size_t>(i / parts % 2)];
      if (sum.dim == 0) {
        sum = std::move(moments[i]);
      } else {
        sum.Add(moments[i]);
      }
    }
  }
  rows_ += n;
}

std::shared_ptr<const LayerCodec> FitSample::Fit() {
  const size_t groups = layer_.groups.size();
  layer_.k.assign(groups, Moments(0));
  layer_.v.assign(groups, Moments(0));
  if (averaged() && context_.config.key_mean == KeyMean::kRotated) layer_.k_means.resize(groups);
  ParallelFor(context_.threads, static_cast<int64_t>(groups), [&](int64_t g) {
    const HeadUnit& unit = layer_.units[layer_.groups[g].first];
    layer_.v[g] = std::move(moments_[2 * g + 1]);
    layer_.k[g] = std::move(moments_[2 * g]);
    if (averaged()) TurnKeys(g, unit.last - unit.first, context_, rope_, layer_);
  });
  const LayerShape& shape = context_.shape;
  return FitLayer(context_.config, *context_.method, shape.head_dim_k, shape.head_dim_v,
                  context_.bits, layer_, context_.account, context_.threads);
}

std::shared_ptr<const LayerCodec> FitCodec(const LayerContext& context, const RopeParams& rope,
                                           const FitRows& rows) {
  if (context.calibration) return context.calibration->Codec(context, rope);
  if (context.method->fits()) {
    FitSample sample(context, rope, nullptr);
    sample.Add(rows);
    return sample.Fit();
  }
  const LayerShape& shape = context.shape;
  LayerMoments moments;
  DivideHeads(context.config, *context.method, shape.kv_heads, moments);
  return FitLayer(context.config, *context.method, shape.head_dim_k, shape.head_dim_v, context.bits,
                  moments, context.account, context.threads);
}

}  // namespace palu
