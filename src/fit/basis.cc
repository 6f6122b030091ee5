#include "fit/basis.h"

#include <Eigen/Eigenvalues>
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>

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

PrincipalAxes AxesAlong(std::vector<double> vectors, const Moments& moments) {
  const int dim = moments.dim;
  const double rows = std::max(moments.rows, 1.0);
  using RowMatrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::VectorXd mean = Eigen::Map<const Eigen::VectorXd>(moments.sum.data(), dim) / rows;
  Eigen::MatrixXd covariance = Eigen::Map<const RowMatrix>(moments.second.data(), dim, dim) / rows;
  covariance -= mean * mean.transpose();
  const auto rank = static_cast<Eigen::Index>(vectors.size()) / dim;
  const Eigen::Map<const RowMatrix> axes_of(vectors.data(), rank, dim);
  const Eigen::VectorXd variance = (axes_of * covariance).cwiseProduct(axes_of).rowwise().sum();

  PrincipalAxes axes;
  axes.mean.assign(mean.data(), mean.data() + dim);
  for (const double v : variance) axes.variance.push_back(std::max(0.0, v));
  axes.vectors = std::move(vectors);
  return axes;
}

PrincipalAxes IdentityAxes(int dim) {
  PrincipalAxes axes;
  axes.variance.assign(dim, 1.0);
  axes.vectors.assign(static_cast<size_t>(dim) * dim, 0.0);
  for (int d = 0; d < dim; ++d) axes.vectors[static_cast<size_t>(d) * dim + d] = 1.0;
  return axes;
}

namespace {

// SplitMix64: the n-th of a fixed sequence of random words.
uint64_t RandomWord(uint64_t n) {
  uint64_t z = (n + 1) * 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}

}  // namespace

std::vector<double> RandomHadamard(int dim) {
  const unsigned padded = std::bit_ceil(static_cast<unsigned>(dim));
  const double size = 1.0 / std::sqrt(static_cast<double>(padded));
  std::vector<double> rows;
  rows.reserve(static_cast<size_t>(padded) * dim);
  for (unsigned i = 0; i < padded; ++i) {
    for (unsigned j = 0; j < static_cast<unsigned>(dim); ++j) {
      const bool flip = RandomWord(j) & 1;
      rows.push_back((std::popcount(i & j) % 2 != 0) != flip ? -size : size);
    }
  }
  return rows;
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
