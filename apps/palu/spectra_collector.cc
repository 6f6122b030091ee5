#include "spectra_collector.h"

#include <utility>

namespace palu::app {

llama::KvObserver SpectraCollector::Observer() {
  return [this](int layer, const ConstTensor& k, const ConstTensor& v, int64_t position,
                const RopeParams& rope) { Add(layer, k, v, position, rope); };
}

void SpectraCollector::Add(int layer, const ConstTensor& k, const ConstTensor& v, int64_t position,
                           const RopeParams& rope) {
  auto found = layers_.find(layer);
  if (found == layers_.end()) {
    const auto heads = static_cast<int>(k.shape[1]);
    const auto key_dims = static_cast<int>(k.shape[3]), value_dims = static_cast<int>(v.shape[3]);
    found = layers_
                .emplace(layer, LayerMoments{heads, rope, MomentSum(heads, key_dims, groups_),
                                             MomentSum(heads, key_dims, groups_),
                                             MomentSum(heads, value_dims, groups_)})
                .first;
  }
  LayerMoments& moments = found->second;
  moments.keys.Add(k);
  moments.unrotated_keys.Add(k, position, &moments.rope);
  moments.values.Add(v);
}

std::vector<LayerSpectra> SpectraCollector::Spectra(int64_t context) const {
  std::vector<LayerSpectra> result;
  for (const auto& [layer, moments] : layers_) {
    const std::vector<Spectrum> cached = moments.keys.Spectra();
    const std::vector<Spectrum> averaged = moments.unrotated_keys.Spectra(context, &moments.rope);
    const std::vector<Spectrum> values = moments.values.Spectra();
    const std::vector<HeadRange> ranges = HeadGroups(moments.heads, groups_);
    LayerSpectra spectra;
    spectra.layer = layer;
    for (size_t g = 0; g < ranges.size(); ++g) {
      spectra.groups.push_back({ranges[g], {cached[g], averaged[g], values[g]}});
    }
    result.push_back(std::move(spectra));
  }
  return result;
}

}  // namespace palu::app
