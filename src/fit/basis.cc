#include "fit/basis.h"

#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>

namespace palu {

std::vector<double> PrincipalAxes::Sigma(double rows) const {
  std::vector<double> sigma(variance.size());
  for (size_t i = 0; i < sigma.size(); ++i) sigma[i] = std::sqrt(variance[i] * rows);
  return sigma;
}

PrincipalAxes FitPrincipalAxes(const Moments& moments) {
  const int dim = moments.dim;
  const double rows = std::max(moments.rows, 1.0);
  using RowMatrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::VectorXd mean = Eigen::Map<const Eigen::VectorXd>(moments.sum.data(), dim) / rows;
  Eigen::MatrixXd covariance = Eigen::Map<const RowMatrix>(moments.second.data(), dim, dim) / rows;
  covariance -= mean * mean.transpose();
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(covariance);

  PrincipalAxes axes;
  axes.mean.assign(mean.data(), mean.data() + dim);
  axes.variance.resize(dim);
  axes.vectors.resize(static_cast<size_t>(dim) * dim);
  for (int i = 0; i < dim; ++i) {
    const auto vector = solver.eigenvectors().col(dim - 1 - i);  // Eigen sorts upwards
    axes.variance[i] = std::max(0.0, solver.eigenvalues()[dim - 1 - i]);
    Eigen::Index largest;
    vector.cwiseAbs().maxCoeff(&largest);
    const double sign = vector[largest] < 0 ? -1.0 : 1.0;
    for (int d = 0; d < dim; ++d) axes.vectors[static_cast<size_t>(i) * dim + d] = sign * vector[d];
  }
  return axes;
}

int EnergyRank(const std::vector<double>& sigma, double threshold, EnergyRule rule) {
  auto energy = [rule](double s) { return rule == EnergyRule::kSum ? s : s * s; };
  double total = 0;
  for (const double s : sigma) total += energy(s);
  if (total < 1e-12) return 1;
  double kept = 0;
  for (size_t r = 0; r < sigma.size(); ++r) {
    kept += energy(sigma[r]);
    if (kept >= threshold * total) return static_cast<int>(r) + 1;
  }
  return static_cast<int>(sigma.size());
}

std::vector<int> AgreeOnRanks(std::vector<int> ranks, RankPolicy policy) {
  if (policy == RankPolicy::kPerGroup || ranks.empty()) return ranks;
  const auto [low, high] = std::minmax_element(ranks.begin(), ranks.end());
  const int rank = policy == RankPolicy::kMin ? *low : *high;
  ranks.assign(ranks.size(), rank);
  return ranks;
}

}  // namespace palu
