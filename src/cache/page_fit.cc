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
  // One task per (unit, side); summed over units in order afterwards.
  std::vector<Moments> moments(2 * layer_.units.size(), Moments(0));
  ParallelFor(context_.threads, static_cast<int64_t>(moments.size()), [&](int64_t i) {
    const bool is_v = i % 2;
    moments[i] = UnitMoments(context_.shape, rows, layer_.units[i / 2], is_v,
                             averaged() && !is_v ? &rope_ : nullptr);
  });
  const bool first = moments_.empty();
  for (size_t g = 0; g < layer_.groups.size(); ++g) {
    const HeadRange& group = layer_.groups[g];
    for (int u = group.first; u < group.last; ++u) {
      for (size_t side = 0; side < 2; ++side) {
        Moments& from = moments[2 * static_cast<size_t>(u) + side];
        if (first && u == group.first) {
          moments_.push_back(std::move(from));
        } else {
          moments_[2 * g + side].Add(from);
        }
      }
    }
  }
  rows_ += static_cast<int64_t>(rows.positions.size());
}

std::shared_ptr<const LayerCodec> FitSample::Fit() {
  for (size_t g = 0; g < layer_.groups.size(); ++g) {
    const HeadUnit& unit = layer_.units[layer_.groups[g].first];
    Moments &k = moments_[2 * g], &v = moments_[2 * g + 1];
    layer_.v.push_back(std::move(v));
    if (averaged()) {
      AddKeys(std::move(k), unit.last - unit.first, context_, rope_, layer_);
    } else {
      layer_.k.push_back(std::move(k));
    }
  }
  const LayerShape& shape = context_.shape;
  return FitLayer(context_.config, *context_.method, shape.head_dim_k, shape.head_dim_v,
                  context_.bits, layer_, context_.account);
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
                  moments, context.account);
}

}  // namespace palu
