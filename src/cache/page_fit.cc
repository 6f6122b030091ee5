// The fit: from some tokens, or from a basis file, to the codec of a layer.
#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "cache/page_coder.h"

namespace palu {
namespace {

// Adds the un-rotated keys of one unit of `heads` heads as the cache will hold them: at every
// position, less their rotated means if the config asks for that.
void AddKeys(Moments keys, int heads, const LayerContext& context, const RopeParams& rope,
             LayerMoments& layer) {
  if (context.config.key_mean == KeyMean::kRotated) {
    const std::vector<double> mean = keys.Centre();
    std::vector<RotatedMean>& means = layer.k_means.emplace_back();
    for (int h = 0; h < heads; ++h) {
      const auto first = mean.begin() + h * context.shape.head_dim_k;
      means.emplace_back(rope, std::vector<float>(first, first + context.shape.head_dim_k));
    }
  }
  layer.k.push_back(AverageOverPositions(keys, rope, context.positions, heads));
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
  for (const HeadRange& group : layer.groups) {
    const HeadUnit& first = layer.units[group.first];
    const int heads = first.last - first.first;
    Moments k(heads * shape.head_dim_k), v(heads * shape.head_dim_v), q(heads * shape.head_dim_k);
    for (int u = group.first; u < group.last; ++u) {
      k.Add(moments_.Keys(layer.units[u]));
      v.Add(moments_.Values(layer.units[u]));
      if (weighted) q.Add(moments_.Queries(layer.units[u]));
    }
    AddKeys(std::move(k), heads, context, rope, layer);
    layer.v.push_back(std::move(v));
    if (weighted) layer.q.push_back(AverageOverPositions(q, rope, context.positions, heads));
  }
  codec_ = FitLayer(config, *context.method, shape.head_dim_k, shape.head_dim_v, context.bits,
                    layer, context.account);
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

// Moments of one side of the rows of one unit; keys un-rotated where `rope` is given.
Moments UnitMoments(const LayerShape& shape, const FitRows& from, const HeadUnit& unit, bool is_v,
                    const RopeParams* rope) {
  const int dim = is_v ? shape.head_dim_v : shape.head_dim_k;
  const int heads = unit.last - unit.first, width = heads * dim;
  constexpr int64_t kRows = 256;  // at a time
  std::vector<float> rows(static_cast<size_t>(kRows) * width),
      head(static_cast<size_t>(kRows) * dim);
  Moments moments(width);
  const auto last = static_cast<int64_t>(from.positions.size());
  for (int64_t t = 0; t < last; t += kRows) {
    const int64_t count = std::min(kRows, last - t);
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

// Moments of both sides, by group.
LayerMoments CollectMoments(const LayerContext& context, const RopeParams& rope,
                            const FitRows& rows) {
  const bool averaged = context.config.key_fit == KeyFit::kAveraged && !rope.inv_freq.empty();
  LayerMoments layer;
  DivideHeads(context.config, *context.method, context.shape.kv_heads, layer);
  // One task per (unit, side); summed over units in order afterwards.
  std::vector<Moments> moments(2 * layer.units.size(), Moments(0));
  ParallelFor(context.threads, static_cast<int64_t>(moments.size()), [&](int64_t i) {
    const bool is_v = i % 2;
    moments[i] = UnitMoments(context.shape, rows, layer.units[i / 2], is_v,
                             averaged && !is_v ? &rope : nullptr);
  });
  for (const HeadRange& group : layer.groups) {
    Moments k = std::move(moments[2 * group.first]), v = std::move(moments[2 * group.first + 1]);
    for (int u = group.first + 1; u < group.last; ++u) {
      k.Add(moments[2 * u]);
      v.Add(moments[2 * u + 1]);
    }
    const HeadUnit& unit = layer.units[group.first];
    layer.v.push_back(std::move(v));
    if (averaged) {
      AddKeys(std::move(k), unit.last - unit.first, context, rope, layer);
    } else {
      layer.k.push_back(std::move(k));
    }
  }
  return layer;
}

}  // namespace

std::shared_ptr<const LayerCodec> FitCodec(const LayerContext& context, const RopeParams& rope,
                                           const FitRows& rows) {
  if (context.calibration) return context.calibration->Codec(context, rope);
  const LayerShape& shape = context.shape;
  LayerMoments moments;
  if (context.method->fits()) {
    moments = CollectMoments(context, rope, rows);
  } else {
    DivideHeads(context.config, *context.method, shape.kv_heads, moments);
  }
  return FitLayer(context.config, *context.method, shape.head_dim_k, shape.head_dim_v, context.bits,
                  moments, context.account);
}

}  // namespace palu
