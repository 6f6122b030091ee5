#include "methods/layer_codec.h"

#include <algorithm>

#include "base/fp16.h"
#include "base/threads.h"
#include "fit/basis.h"
#include "fit/bit_plan.h"
#include "palu/errors.h"

namespace palu {
namespace {

static_assert(kChannelsPerStep == kQuad, "budgets are spent in the steps that pages are packed in");

ScaleFormat Scales(const KVCacheConfig& config, Codec codec) {
  switch (codec) {
    case Codec::kTokenScalar:
      return ScaleFormat::kTokenMinMax;
    case Codec::kTokenBlock:
      return ScaleFormat::kTokenAbsMax;
    case Codec::kSigns:
      return ScaleFormat::kTokenFactors;
    default:
      return config.scales;
  }
}

void AppendRow(const std::vector<double>& rows, size_t row, int dim, std::vector<uint16_t>& to) {
  for (int d = 0; d < dim; ++d) to.push_back(F32ToF16(static_cast<float>(rows[row * dim + d])));
}

// One side: axes of every group, then ranks, then bits over all groups together, then plans.
class SideFit {
 public:
  // dim: of a head.
  SideFit(const KVCacheConfig& config, const SideMethod& method, CodeOrder order, int dim,
          const LayerMoments& layer, const std::vector<Moments>& moments,
          const std::vector<Moments>& metrics, double budget, bool exact)
      : config_(config),
        method_(method),
        order_(order),
        layer_(layer),
        moments_(moments),
        metrics_(metrics),
        dim_(dim),
        budget_(budget),
        exact_(exact),
        axes_(layer.groups.size()) {}

  // Groups are independent; all of them come before Make.
  void FitGroup(size_t g) {
    const HeadUnit& unit = layer_.units[layer_.groups[g].first];
    const int channels = dim_ * (unit.last - unit.first);
    axes_[g] = MakeAxes(channels, moments_.empty() ? nullptr : &moments_[g],
                        metrics_.empty() ? nullptr : &metrics_[g]);
  }

  SideCodec Make(int page_tokens) {
    for (size_t g = 0; g < axes_.size(); ++g) {
      ranks_.push_back(OwnRank(axes_[g], moments_.empty() ? 0 : moments_[g].rows));
    }
    ranks_ = AgreeOnRanks(std::move(ranks_), config_.rank_policy);
    // Units of joined heads may differ in width.
    for (size_t g = 0; g < ranks_.size(); ++g) {
      ranks_[g] = std::min(ranks_[g], static_cast<int>(axes_[g].variance.size()));
    }
    const std::vector<std::vector<uint8_t>> bits = Bits();
    SideCodec side;
    for (size_t g = 0; g < layer_.groups.size(); ++g) {
      side.groups.push_back(MakeGroup(g, bits[g], page_tokens));
      side.group_of_unit.insert(side.group_of_unit.end(), static_cast<size_t>(Units(g)),
                                static_cast<int>(g));
    }
    return side;
  }

 private:
  int Units(size_t g) const { return layer_.groups[g].last - layer_.groups[g].first; }

  PrincipalAxes MakeAxes(int dim, const Moments* moments, const Moments* metric) const {
    switch (method_.transform) {
      case Transform::kIdentity:
        return UnitAxes(IdentityRows(dim), dim);
      case Transform::kTurn:
        return UnitAxes(RandomHadamard(dim), dim);
      case Transform::kRotation:
        return AxesAlong(RandomHadamard(dim), *moments);
      case Transform::kLowRank:
        break;
    }
    switch (config_.basis) {
      case BasisKind::kNone:
        return AxesAlong(IdentityRows(dim), *moments);
      case BasisKind::kHadamard:
        return AxesAlong(RandomHadamard(dim), *moments);
      default:
        return metric ? FitWeightedAxes(*moments, *metric) : FitPrincipalAxes(*moments);
    }
  }

  // Channels of the latent. Only principal axes are ordered by what they hold.
  bool ordered() const {
    return method_.transform == Transform::kLowRank &&
           (config_.basis == BasisKind::kFit || config_.basis == BasisKind::kFile);
  }

  int OwnRank(const PrincipalAxes& axes, double rows) const {
    const int all = static_cast<int>(axes.variance.size());
    if (!ordered()) return all;
    if (config_.rank) return std::min(*config_.rank, all);
    return EnergyRank(axes.Sigma(rows), config_.energy_threshold, config_.energy_rule);
  }

  bool raw() const {
    return exact_ || method_.codec == Codec::kF16 ||
           (method_.may_stay_fp16 && !config_.quantize_values);
  }

  std::vector<std::vector<uint8_t>> Bits() const {
    std::vector<std::vector<uint8_t>> bits;
    const int fixed = raw() ? 16 : method_.fixed_bits;
    for (size_t g = 0; g < ranks_.size(); ++g) {
      if (fixed > 0) {
        bits.emplace_back(ranks_[g], static_cast<uint8_t>(fixed));
      } else if (config_.bit_plan == BitPlan::kUniform) {
        bits.emplace_back(ranks_[g], static_cast<uint8_t>(config_.uniform_bits));
      } else if (config_.bit_plan == BitPlan::kSchedule) {
        bits.push_back(ScheduleBits(ranks_[g], config_.rank.has_value()));
      } else if (config_.bit_plan == BitPlan::kMixed) {
        bits.push_back(MixedBits(ranks_[g], config_.hi_fraction, config_.hi_bit, config_.lo_bit));
      }
    }
    return bits.empty() ? FilledBits() : bits;
  }

  std::vector<std::vector<uint8_t>> FilledBits() const {
    std::vector<ChannelGroup> groups;
    for (size_t g = 0; g < axes_.size(); ++g) {
      const auto& variance = axes_[g].variance;
      groups.push_back({{variance.begin(), variance.begin() + ranks_[g]},
                        Units(g),
                        static_cast<int>(axes_[g].dim()),
                        config_.basis != BasisKind::kNone});
    }
    return WaterFill(groups, config_.scales, config_.group_size, budget_);
  }

  // Channels of 0 bits are dropped from the basis.
  GroupCodec MakeGroup(size_t g, const std::vector<uint8_t>& bits, int page_tokens) const {
    const PrincipalAxes& axes = axes_[g];
    GroupCodec group;
    group.units = Units(g);
    group.dim = axes.dim();
    group.mean.assign(axes.mean.begin(), axes.mean.end());
    const bool identity =
        method_.transform == Transform::kIdentity ||
        (method_.transform == Transform::kLowRank && config_.basis == BasisKind::kNone);
    std::vector<uint8_t> kept;
    for (size_t c = 0; c < bits.size(); ++c) {
      if (bits[c] == 0) continue;
      kept.push_back(bits[c]);
      if (!identity) AppendRow(axes.vectors, c, group.dim, group.basis);
      if (!axes.encoders.empty()) AppendRow(axes.encoders, c, group.dim, group.encoder);
    }
    group.plan = PagePlan::Make(std::move(kept), Scales(config_, method_.codec), config_.group_size,
                                page_tokens, order_);
    return group;
  }

  const KVCacheConfig& config_;
  const SideMethod& method_;
  const CodeOrder order_;
  const LayerMoments& layer_;
  const std::vector<Moments>&moments_, &metrics_;  // of its groups, or none
  const int dim_;
  const double budget_;  // of codes + scales, bits per element (bits=auto)
  const bool exact_;     // latents stay fp16 whatever the method
  std::vector<PrincipalAxes> axes_;
  std::vector<int> ranks_;
};

int64_t GroupBytes(const GroupCodec& g) {
  int64_t means = 0;
  for (const RotatedMean& mean : g.rotated_means) {
    means += static_cast<int64_t>(sizeof(RotatedMean)) + mean.nbytes();
  }
  return means +
         static_cast<int64_t>(sizeof(GroupCodec) + g.mean.size() * sizeof(float) +
                              (g.basis.size() + g.encoder.size()) * sizeof(uint16_t) +
                              g.plan.bits.size() * (1 + sizeof(int16_t)) +
                              g.plan.channel.size() * (sizeof(int16_t) + 3 * sizeof(float)));
}

double BitsPerElement(const SideCodec& side, bool with_scales) {
  double bits = 0, elements = 0;
  for (const GroupCodec& g : side.groups) {
    bits += g.units * (with_scales ? g.plan.stored_bits_per_token() : g.plan.code_bits_per_token());
    elements += static_cast<double>(g.units) * g.dim;
  }
  return bits / elements;
}

}  // namespace

int SideCodec::max_rank() const {
  int rank = 0;
  for (const GroupCodec& g : groups) rank = std::max(rank, g.rank());
  return rank;
}

int SideCodec::basis_rank() const {
  int rank = 0;
  for (const GroupCodec& g : groups) rank = std::max(rank, g.basis.empty() ? 0 : g.rank());
  return rank;
}

double SideCodec::CodeBits() const { return BitsPerElement(*this, false); }
double SideCodec::StoredBits() const { return BitsPerElement(*this, true); }

void DivideHeads(const KVCacheConfig& config, const MethodRow& method, int heads,
                 LayerMoments& layer) {
  const int joint = std::min(config.joint_heads, heads);
  layer.units = HeadGroups(heads, (heads + joint - 1) / joint);
  const int units = static_cast<int>(layer.units.size());
  // Joined heads have a basis per unit: units may differ in size.
  const int groups = !method.fits() ? 1 : joint > 1 ? units : config.n_head_groups;
  layer.groups = HeadGroups(units, groups);
}

SideBits EqualBits(const KVCacheConfig& config, int dim_k, int dim_v) {
  return {config.auto_bits + config.key_extra, config.auto_bits - config.key_extra * dim_k / dim_v};
}

std::shared_ptr<const LayerCodec> FitLayer(const KVCacheConfig& config, const MethodRow& method,
                                           int dim_k, int dim_v, SideBits bits,
                                           const LayerMoments& moments,
                                           const MemoryAccountPtr& account, int threads) {
  const int page_tokens = std::max(kBlockTokens, config.group_size);
  auto codec = std::make_shared<LayerCodec>();
  codec->units = moments.units;
  for (size_t u = 0; u < codec->units.size(); ++u) {
    codec->unit_of_head.insert(codec->unit_of_head.end(),
                               static_cast<size_t>(codec->units[u].last - codec->units[u].first),
                               static_cast<int>(u));
  }
  const bool one_side = config.only.layer >= 0;
  const std::vector<Moments> none;
  SideFit sides[] = {{config, method.keys, CodeOrder::kForScores, dim_k, moments, moments.k,
                      moments.q, bits.k, one_side && config.only.values},
                     {config, method.values, CodeOrder::kForSums, dim_v, moments, moments.v, none,
                      bits.v, one_side && !config.only.values}};
  ParallelFor(threads, 2 * static_cast<int64_t>(moments.groups.size()),
              [&](int64_t i) { sides[i % 2].FitGroup(static_cast<size_t>(i / 2)); });
  codec->k = sides[0].Make(page_tokens);
  for (size_t g = 0; g < moments.k_means.size(); ++g) {
    codec->k.groups[g].rotated_means = moments.k_means[g];
    codec->k.groups[g].mean.clear();
  }
  codec->v = sides[1].Make(page_tokens);
  std::vector<const PagePlan*> k_plans, v_plans;
  for (const int g : codec->k.group_of_unit) k_plans.push_back(&codec->k.groups[g].plan);
  for (const int g : codec->v.group_of_unit) v_plans.push_back(&codec->v.groups[g].plan);
  codec->layout = PageLayout::Make(std::move(k_plans), std::move(v_plans));
  int64_t bytes = sizeof(LayerCodec);
  for (const SideCodec* side : {&codec->k, &codec->v}) {
    for (const GroupCodec& g : side->groups) bytes += GroupBytes(g);
  }
  codec->charge = MemoryCharge(account, bytes);
  return codec;
}

WindowFormat::WindowFormat(int heads, int dim_k, int dim_v, Codec codec) {
  const uint8_t bits = codec == Codec::kF32 ? 32 : 16;
  k = PagePlan::Make(std::vector<uint8_t>(dim_k, bits), ScaleFormat::kMinMax, kBlockTokens);
  v = PagePlan::Make(std::vector<uint8_t>(dim_v, bits), ScaleFormat::kMinMax, kBlockTokens);
  layout = PageLayout::Make(std::vector<const PagePlan*>(heads, &k),
                            std::vector<const PagePlan*>(heads, &v));
}

}  // namespace palu
