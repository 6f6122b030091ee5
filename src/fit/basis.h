// File: basis.h - the low-rank basis of one head group: moments -> mean, eigenvectors, spectrum.
#ifndef PALU_SRC_FIT_BASIS_H_
#define PALU_SRC_FIT_BASIS_H_

#include <vector>

#include "fit/moments.h"
#include "palu/config.h"

namespace palu {

// Principal axes of the centred rows. Deterministic: eigenvalues descend, the largest entry of each
// vector is positive.
struct PrincipalAxes {
  std::vector<double> mean;      // [D]
  std::vector<double> variance;  // [D], eigenvalues of the covariance, >= 0
  std::vector<double> vectors;   // [D][D], row i = axis i

  std::vector<double> Sigma(
      double rows) const;  // singular values of the centred rows: sqrt(variance * rows)
};

// Cost: one D x D symmetric eigenproblem in double (D = 128: about 2 ms).
PrincipalAxes FitPrincipalAxes(const Moments& moments);

// Smallest r with sum of f(sigma[0..r)) >= threshold * total, f(s) = s or s^2; 1 when the total is
// below 1e-12.
int EnergyRank(const std::vector<double>& sigma, double threshold, EnergyRule rule);

// The rank that each group uses, from the groups' own.
std::vector<int> AgreeOnRanks(std::vector<int> ranks, RankPolicy policy);

}  // namespace palu

#endif  // PALU_SRC_FIT_BASIS_H_
