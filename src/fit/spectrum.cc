#include "palu/spectrum.h"

#include <algorithm>
#include <string>

#include "base/tensor_io.h"
#include "fit/basis.h"
#include "fit/moments.h"
#include "palu/errors.h"

namespace palu {

std::vector<HeadRange> HeadGroups(int heads, int groups) {
  groups = std::clamp(groups, 1, std::max(heads, 1));
  std::vector<HeadRange> ranges;
  int first = 0;
  for (int g = 0; g < groups; ++g) {
    const int size = heads / groups + (g < heads % groups ? 1 : 0);
    ranges.push_back({first, first + size});
    first += size;
  }
  return ranges;
}

int Spectrum::RankFor(double threshold, EnergyRule rule) const {
  return EnergyRank(sigma, threshold, rule);
}

struct MomentSum::Impl {
  int heads, dim;
  std::vector<HeadRange> ranges;
  std::vector<Moments> moments;  // one per group
};

MomentSum::MomentSum(int heads, int head_dim, int groups) {
  if (heads < 1 || head_dim < 1 || head_dim > 1024 || groups < 1) {
    throw InputError("MomentSum: heads=" + std::to_string(heads) + ", head_dim=" +
                     std::to_string(head_dim) + ", groups=" + std::to_string(groups) +
                     "; allowed are heads >= 1, head_dim 1..1024, groups >= 1");
  }
  impl_ = std::make_unique<Impl>(Impl{heads, head_dim, HeadGroups(heads, groups), {}});
  impl_->moments.assign(impl_->ranges.size(), Moments(head_dim));
}

MomentSum::~MomentSum() = default;
MomentSum::MomentSum(MomentSum&&) noexcept = default;

void MomentSum::Add(const ConstTensor& x, int64_t position, const RopeParams* rope) {
  CheckTensor(x, "x", {1, impl_->heads, -1, impl_->dim});
  const int64_t n = x.shape[2];
  std::vector<float> rows(static_cast<size_t>(n) * impl_->dim);
  for (size_t g = 0; g < impl_->ranges.size(); ++g) {
    for (int h = impl_->ranges[g].first; h < impl_->ranges[g].last; ++h) {
      for (int64_t t = 0; t < n; ++t) ReadRow(x, 0, h, t, rows.data() + t * impl_->dim);
      if (rope) Unrotate(*rope, position, rows.data(), n, impl_->dim);
      impl_->moments[g].Add(rows.data(), n, impl_->dim);
    }
  }
}

std::vector<Spectrum> MomentSum::Spectra(int64_t context, const RopeParams* rope) const {
  std::vector<Spectrum> spectra;
  for (const Moments& raw : impl_->moments) {
    const Moments moments = rope && context > 0 ? AverageOverPositions(raw, *rope, context) : raw;
    const PrincipalAxes axes = FitPrincipalAxes(moments);
    Spectrum spectrum;
    spectrum.sigma = axes.Sigma(moments.rows);
    spectrum.rows = static_cast<int64_t>(moments.rows);
    double mean_energy = 0;
    for (const double m : axes.mean) mean_energy += m * m * moments.rows;
    const double energy = moments.Energy();
    spectrum.mean_energy = energy > 0 ? mean_energy / energy : 0;
    spectra.push_back(std::move(spectrum));
  }
  return spectra;
}

}  // namespace palu
