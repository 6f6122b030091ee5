// The fit: from the first tokens, or from a basis file, to the codec of a layer.
#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "cache/sequence.h"

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

// True when the basis can be fitted, on tokens [sinks, rows_end). Sinks are left out: they stay
// exact and are unlike all other tokens.
bool Sequence::ReadyToFit(int64_t& rows_end) const {
  if (codec_ || !context_->method->encodes()) return false;
  const int64_t due = context_->fit_due();
  rows_end = context_->fit_tokens == 0 ? size_ : due;
  return size_ >= due;
}

// Moments of one side of tokens [first, last) of one unit; keys un-rotated if `unrotate`.
Moments Sequence::UnitMoments(const HeadUnit& unit, bool is_v, bool unrotate, int64_t first,
                              int64_t last) const {
  const LayerShape& shape = context_->shape;
  const int dim = is_v ? shape.head_dim_v : shape.head_dim_k;
  const int heads = unit.last - unit.first, width = heads * dim;
  constexpr int64_t kRows = 256;  // at a time
  std::vector<float> rows(static_cast<size_t>(kRows) * width),
      head(static_cast<size_t>(kRows) * dim);
  Moments moments(width);
  for (int64_t t = first; t < last; t += kRows) {
    const int64_t count = std::min(kRows, last - t);
    for (int h = 0; h < heads; ++h) {
      Decode(unit.first + h, t, count, is_v ? nullptr : head.data(), is_v ? head.data() : nullptr);
      if (unrotate) Unrotate(*rope_, first_position_ + t, head.data(), count, dim);
      for (int64_t i = 0; i < count; ++i) {
        std::copy_n(&head[i * dim], dim, &rows[i * width + h * dim]);
      }
    }
    moments.Add(rows.data(), count, width);
  }
  return moments;
}

// Moments of both sides of tokens [first, last), by group.
LayerMoments Sequence::CollectMoments(int64_t first, int64_t last) const {
  const bool averaged = context_->config.key_fit == KeyFit::kAveraged && !rope_->inv_freq.empty();
  LayerMoments layer;
  DivideHeads(context_->config, *context_->method, context_->shape.kv_heads, layer);
  // One task per (unit, side); summed over units in order afterwards.
  std::vector<Moments> moments(2 * layer.units.size(), Moments(0));
  ParallelFor(context_->threads, static_cast<int64_t>(moments.size()), [&](int64_t i) {
    const bool is_v = i % 2;
    moments[i] = UnitMoments(layer.units[i / 2], is_v, averaged && !is_v, first, last);
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
      AddKeys(std::move(k), unit.last - unit.first, *context_, *rope_, layer);
    } else {
      layer.k.push_back(std::move(k));
    }
  }
  return layer;
}

void Sequence::Fit(int64_t rows_end) {
  const LayerShape& shape = context_->shape;
  std::shared_ptr<const LayerCodec> codec;
  if (context_->calibration) {
    codec = context_->calibration->Codec(*context_, *rope_);
  } else {
    LayerMoments moments;
    if (context_->method->fits()) {
      moments = CollectMoments(config_sinks(), rows_end);
    } else {
      DivideHeads(context_->config, *context_->method, shape.kv_heads, moments);
    }
    codec = FitLayer(context_->config, *context_->method, shape.head_dim_k, shape.head_dim_v,
                     context_->bits, moments, context_->account);
  }
  // A sliding window drops its pages one by one.
  const int64_t per_slab = context_->windowed() ? 1 : PagesAtOnce(codec->layout.page_tokens);
  encoded_.emplace(&codec->layout, static_cast<int>(per_slab), context_->account);
  codec_ = std::move(codec);
}

}  // namespace palu
