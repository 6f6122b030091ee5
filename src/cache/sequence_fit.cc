// The fit: from the first tokens, or from a basis file, to the codec of a layer.
#include <algorithm>
#include <vector>

#include "base/threads.h"
#include "cache/sequence.h"

namespace palu {
namespace {

// Adds one head group's un-rotated keys as the cache will hold them: at every position, less their
// rotated mean if the config asks for that.
void AddKeys(Moments keys, const LayerContext& context, const RopeParams& rope,
             LayerMoments& layer) {
  if (context.config.key_mean == KeyMean::kRotated) {
    const std::vector<double> mean = keys.Centre();
    layer.k_means.emplace_back(rope, std::vector<float>(mean.begin(), mean.end()));
  }
  layer.k.push_back(AverageOverPositions(keys, rope, context.positions));
}

}  // namespace

std::shared_ptr<const LayerCodec> CalibratedCodec::Codec(const LayerContext& context,
                                                         const RopeParams& rope) {
  const std::lock_guard lock(mutex_);
  if (codec_ && rope_.pairing == rope.pairing && rope_.inv_freq == rope.inv_freq) return codec_;
  const LayerShape& shape = context.shape;
  const KVCacheConfig& config = context.config;
  LayerMoments layer;
  layer.groups = HeadGroups(shape.kv_heads, config.n_head_groups);
  const bool weighted = config.key_metric == KeyMetric::kQueries;
  for (const HeadRange& range : layer.groups) {
    Moments k(shape.head_dim_k), v(shape.head_dim_v), q(shape.head_dim_k);
    for (int h = range.first; h < range.last; ++h) {
      k.Add(moments_.k[h]);
      v.Add(moments_.v[h]);
      q.Add(moments_.q[h]);
    }
    AddKeys(std::move(k), context, rope, layer);
    layer.v.push_back(std::move(v));
    if (weighted) layer.q.push_back(AverageOverPositions(q, rope, context.positions));
  }
  codec_ =
      FitLayer(config, *context.method, shape.head_dim_k, shape.head_dim_v, layer, context.account);
  rope_ = rope;
  return codec_;
}

int64_t CalibratedCodec::nbytes() const {
  const std::lock_guard lock(mutex_);
  return codec_ ? codec_->basis_bytes() : 0;
}

// True when the basis can be fitted, on tokens [sinks, rows_end). Sinks are left out: they stay
// exact and are unlike all other tokens.
bool Sequence::ReadyToFit(int64_t& rows_end) const {
  if (codec_ || !context_->method->encodes()) return false;
  if (context_->calibration) {
    rows_end = 0;
    return size_ > 0;
  }
  const int64_t least = config_sinks() + 2;  // one token has no spread
  if (context_->fit_tokens == 0) {
    rows_end = size_;
    return size_ >= least;
  }
  rows_end = std::max(context_->fit_tokens, least);
  return size_ >= rows_end;
}

// Moments of both sides of tokens [first, last), by head group.
LayerMoments Sequence::CollectMoments(int64_t first, int64_t last) const {
  const LayerShape& shape = context_->shape;
  const bool averaged = context_->config.key_fit == KeyFit::kAveraged && !rope_->inv_freq.empty();
  // One task per (side, head); summed over heads in order afterwards.
  std::vector<Moments> moments;
  for (int i = 0; i < 2 * shape.kv_heads; ++i)
    moments.emplace_back(i % 2 ? shape.head_dim_v : shape.head_dim_k);
  ParallelFor(context_->threads, 2 * shape.kv_heads, [&](int64_t i) {
    const int head = static_cast<int>(i / 2), dim = moments[i].dim;
    const bool is_v = i % 2;
    constexpr int64_t kRows = 256;  // at a time
    std::vector<float> rows(static_cast<size_t>(kRows) * dim);
    for (int64_t t = first; t < last; t += kRows) {
      const int64_t count = std::min(kRows, last - t);
      Decode(head, t, count, is_v ? nullptr : rows.data(), is_v ? rows.data() : nullptr);
      if (!is_v && averaged) Unrotate(*rope_, first_position_ + t, rows.data(), count, dim);
      moments[i].Add(rows.data(), count, dim);
    }
  });
  LayerMoments layer;
  layer.groups = HeadGroups(shape.kv_heads, context_->config.n_head_groups);
  for (const HeadRange& range : layer.groups) {
    Moments k(shape.head_dim_k), v(shape.head_dim_v);
    for (int h = range.first; h < range.last; ++h) {
      k.Add(moments[2 * h]);
      v.Add(moments[2 * h + 1]);
    }
    layer.v.push_back(std::move(v));
    if (averaged) {
      AddKeys(std::move(k), *context_, *rope_, layer);
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
      moments.groups = HeadGroups(shape.kv_heads, 1);
    }
    codec = FitLayer(context_->config, *context_->method, shape.head_dim_k, shape.head_dim_v,
                     moments, context_->account);
  }
  encoded_.emplace(&codec->layout, std::max(1, kSlabTokens / codec->layout.page_tokens),
                   context_->account);
  codec_ = std::move(codec);
}

}  // namespace palu
