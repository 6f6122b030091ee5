#include "methods/layer_codec.h"

#include <algorithm>

#include "base/fp16.h"
#include "fit/basis.h"
#include "fit/bit_plan.h"

namespace palu {
namespace {

// One side: axes of every group, then ranks, then bits over all groups together, then plans.
class SideFit {
 public:
  SideFit(const KVCacheConfig& config, const std::vector<HeadRange>& ranges,
          const std::vector<Moments>& moments)
      : config_(config), ranges_(ranges) {
    for (const Moments& m : moments) axes_.push_back(FitPrincipalAxes(m));
    std::vector<int> ranks;
    for (size_t g = 0; g < axes_.size(); ++g) ranks.push_back(OwnRank(axes_[g], moments[g].rows));
    ranks_ = AgreeOnRanks(std::move(ranks), config.rank_policy);
  }

  // raw_latents: fp16 latents instead of codes.
  SideCodec Make(bool raw_latents, int page_tokens) const {
    const std::vector<std::vector<uint8_t>> bits = raw_latents ? RawBits() : CodeBits();
    SideCodec side;
    for (size_t g = 0; g < ranges_.size(); ++g) {
      side.groups.push_back(MakeGroup(g, bits[g], page_tokens));
      for (int h = ranges_[g].first; h < ranges_[g].last; ++h)
        side.group_of_head.push_back(static_cast<int>(g));
    }
    return side;
  }

 private:
  int OwnRank(const PrincipalAxes& axes, double rows) const {
    if (config_.rank) return *config_.rank;
    return EnergyRank(axes.Sigma(rows), config_.energy_threshold, config_.energy_rule);
  }

  std::vector<std::vector<uint8_t>> RawBits() const {
    std::vector<std::vector<uint8_t>> bits;
    for (const int rank : ranks_) bits.emplace_back(rank, uint8_t{16});
    return bits;
  }

  std::vector<std::vector<uint8_t>> CodeBits() const {
    std::vector<std::vector<uint8_t>> bits;
    if (config_.bit_plan == BitPlan::kMixed) {
      for (const int rank : ranks_) {
        bits.push_back(MixedBits(rank, config_.hi_fraction, config_.hi_bit, config_.lo_bit));
      }
      return bits;
    }
    std::vector<ChannelGroup> groups;
    for (size_t g = 0; g < axes_.size(); ++g) {
      const auto& variance = axes_[g].variance;
      groups.push_back({{variance.begin(), variance.begin() + ranks_[g]},
                        ranges_[g].last - ranges_[g].first,
                        static_cast<int>(variance.size())});
    }
    return WaterFill(groups, config_.scales, config_.group_size, config_.auto_bits);
  }

  // Channels of 0 bits are dropped from the basis.
  GroupCodec MakeGroup(size_t g, const std::vector<uint8_t>& bits, int page_tokens) const {
    const PrincipalAxes& axes = axes_[g];
    GroupCodec group;
    group.heads = ranges_[g];
    group.dim = static_cast<int>(axes.mean.size());
    group.mean.assign(axes.mean.begin(), axes.mean.end());
    std::vector<uint8_t> kept;
    for (size_t c = 0; c < bits.size(); ++c) {
      if (bits[c] == 0) continue;
      kept.push_back(bits[c]);
      const double* axis = axes.vectors.data() + c * group.dim;
      for (int d = 0; d < group.dim; ++d)
        group.basis.push_back(F32ToF16(static_cast<float>(axis[d])));
    }
    group.plan = PagePlan::Make(std::move(kept), config_.scales, config_.group_size, page_tokens);
    return group;
  }

  const KVCacheConfig& config_;
  const std::vector<HeadRange>& ranges_;
  std::vector<PrincipalAxes> axes_;
  std::vector<int> ranks_;
};

int64_t GroupBytes(const GroupCodec& g) {
  return static_cast<int64_t>(sizeof(GroupCodec) + g.mean.size() * sizeof(float) +
                              g.basis.size() * sizeof(uint16_t) +
                              g.plan.bits.size() * (1 + sizeof(uint32_t) + 2 * sizeof(float)));
}

double BitsPerElement(const SideCodec& side, bool with_scales) {
  double bits = 0, elements = 0;
  for (const GroupCodec& g : side.groups) {
    const int heads = g.heads.last - g.heads.first;
    bits += heads * (with_scales ? g.plan.stored_bits_per_token() : g.plan.code_bits_per_token());
    elements += static_cast<double>(heads) * g.dim;
  }
  return bits / elements;
}

}  // namespace

int SideCodec::max_rank() const {
  int rank = 0;
  for (const GroupCodec& g : groups) rank = std::max(rank, g.rank());
  return rank;
}

double SideCodec::CodeBits() const { return BitsPerElement(*this, false); }
double SideCodec::StoredBits() const { return BitsPerElement(*this, true); }

std::shared_ptr<const LayerCodec> FitLayer(const KVCacheConfig& config, const LayerMoments& moments,
                                           const MemoryAccountPtr& account) {
  const int page_tokens = std::max(kBlockTokens, config.group_size);
  auto codec = std::make_shared<LayerCodec>();
  codec->k = SideFit(config, moments.groups, moments.k).Make(false, page_tokens);
  codec->v = SideFit(config, moments.groups, moments.v).Make(!config.quantize_values, page_tokens);
  std::vector<const PagePlan*> k_plans, v_plans;
  for (const int g : codec->k.group_of_head) k_plans.push_back(&codec->k.groups[g].plan);
  for (const int g : codec->v.group_of_head) v_plans.push_back(&codec->v.groups[g].plan);
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
