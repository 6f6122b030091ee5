// File: spectrum.h - the spectrum of K or V of one head group, for `palu inspect` and for choosing
// ranks.
#ifndef PALU_SPECTRUM_H_
#define PALU_SPECTRUM_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "palu/config.h"
#include "palu/rope.h"
#include "palu/tensor.h"

namespace palu {

struct Spectrum {
  std::vector<double> sigma;  // singular values of X - mu, descending, [D]
  double mean_energy = 0;     // share of sum |x|^2 that the mean alone holds
  int64_t rows = 0;           // heads * tokens behind it

  // Smallest r whose share of energy reaches `threshold`, in [1, D]; 1 when there is no energy at
  // all.
  int RankFor(double threshold, EnergyRule rule) const;
};

// Heads [first, last) of group g of `groups` over `heads`: contiguous, the first heads mod groups
// take one more.
struct HeadRange {
  int first = 0, last = 0;
};
std::vector<HeadRange> HeadGroups(int heads, int groups);

// Sums moments of K or V block by block, so the tokens are never held. One object per (layer,
// side). Threads: not safe. Cost per token and head: D^2 multiply-adds in double; memory groups *
// D^2 doubles.
class MomentSum {
 public:
  MomentSum(int heads, int head_dim, int groups);
  ~MomentSum();
  MomentSum(MomentSum&&) noexcept;

  // x: [1, H, n, D], any dtype. rope != null: keys are un-rotated from `position` on. Throws
  // InputError.
  void Add(const ConstTensor& x, int64_t position = 0, const RopeParams* rope = nullptr);
  // One spectrum per head group. context > 0 with rope: moments are averaged over positions [0,
  // context).
  std::vector<Spectrum> Spectra(int64_t context = 0, const RopeParams* rope = nullptr) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace palu

#endif  // PALU_SPECTRUM_H_
