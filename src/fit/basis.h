// File: basis.h - the low-rank basis of one head group: moments -> mean, eigenvectors, spectrum.
#ifndef PALU_SRC_FIT_BASIS_H_
#define PALU_SRC_FIT_BASIS_H_

#include <vector>

#include "fit/moments.h"
#include "palu/config.h"

namespace palu {

// Axes that latents are taken along, with the variance of the centred rows along each.
struct PrincipalAxes {
  std::vector<double> mean;      // [D], or empty for zero
  std::vector<double> variance;  // [rank], >= 0
  std::vector<double> vectors;   // [rank][D], row i = axis i; x ~ mean + sum of latent * axis
  std::vector<double> encoders;  // [rank][D], latent = encoder . (x - mean); empty = the axes

  int dim() const { return static_cast<int>(vectors.size() / variance.size()); }
  std::vector<double> Sigma(
      double rows) const;  // singular values of the centred rows: sqrt(variance * rows)
};

// The eigenvectors of the covariance. Deterministic: eigenvalues descend, the largest entry of each
// vector is positive. Cost: one D x D symmetric eigenproblem in double (D = 128: about 2 ms).
PrincipalAxes FitPrincipalAxes(const Moments& moments);
// The same for errors weighed with `metric`, a second moment of vectors that x is multiplied with:
// axes that are orthogonal in the metric, with the variances that the products see. The metric is
// scaled to mean 1 and gets 0.1 % of the identity, so that no axis explodes. Source: KQ-SVD, arXiv
// 2512.05916.
PrincipalAxes FitWeightedAxes(const Moments& moments, const Moments& metric);
// Given axes: [rank][D] vectors, with the mean and the variances of the data.
PrincipalAxes AxesAlong(std::vector<double> vectors, const Moments& moments);
// Given axes for data of which nothing is known: no mean, variances 1.
PrincipalAxes UnitAxes(std::vector<double> vectors, int dim);
// The coordinates themselves, [dim][dim].
std::vector<double> IdentityRows(int dim);
// Rows of a Walsh-Hadamard matrix times random signs (a fixed seed), for the next power of two of
// `dim`, cut to `dim` columns: [padded][dim] with orthonormal columns.
std::vector<double> RandomHadamard(int dim);

// Smallest r with sum of f(sigma[0..r)) >= threshold * total, f(s) = s or s^2; 1 when the total is
// below 1e-12.
int EnergyRank(const std::vector<double>& sigma, double threshold, EnergyRule rule);

// The rank that each group uses, from the groups' own.
std::vector<int> AgreeOnRanks(std::vector<int> ranks, RankPolicy policy);

}  // namespace palu

#endif  // PALU_SRC_FIT_BASIS_H_
