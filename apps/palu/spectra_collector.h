// File: spectra_collector.h - sums the moments of K and V while a text is decoded.
#ifndef PALU_APPS_SPECTRA_COLLECTOR_H_
#define PALU_APPS_SPECTRA_COLLECTOR_H_

#include <cstdint>
#include <map>
#include <vector>

#include "llama/session.h"
#include "spectra.h"

namespace palu::app {

class SpectraCollector {
 public:
  // groups: head groups; at most the number of KV heads.
  explicit SpectraCollector(int groups) : groups_(groups) {}

  // For Session::SetObserver; must outlive the session's use of it.
  llama::KvObserver Observer();

  // In the order of the layers. context: positions that un-rotated keys are averaged over.
  std::vector<LayerSpectra> Spectra(int64_t context) const;

 private:
  struct LayerMoments {
    int heads;
    RopeParams rope;
    MomentSum keys, unrotated_keys, values;
  };
  void Add(int layer, const ConstTensor& k, const ConstTensor& v, int64_t position,
           const RopeParams& rope);

  int groups_;
  std::map<int, LayerMoments> layers_;
};

}  // namespace palu::app

#endif  // PALU_APPS_SPECTRA_COLLECTOR_H_
