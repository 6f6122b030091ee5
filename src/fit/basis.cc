#include "fit/basis.h"

#include <Eigen/Cholesky>
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

namespace {

using RowMatrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::VectorXd Mean(const Moments& m) {
  return Eigen::Map<const Eigen::VectorXd>(m.sum.data(), m.dim) / std::max(m.rows, 1.0);
}

Eigen::MatrixXd Covariance(const Moments& m, const Eigen::VectorXd& mean) {
  const Eigen::Map<const RowMatrix> second(m.second.data(), m.dim, m.dim);
  return second / std::max(m.rows, 1.0) - mean * mean.transpose();
}

// Axis i of the result from eigenvector dim - 1 - i (Eigen sorts upwards).
PrincipalAxes Sorted(const Eigen::VectorXd& mean, const Eigen::VectorXd& values,
                     const Eigen::MatrixXd& vectors) {
  const auto dim = static_cast<int>(mean.size());
  PrincipalAxes axes;
  axes.mean.assign(mean.data(), mean.data() + dim);
  axes.variance.resize(dim);
  axes.vectors.resize(static_cast<size_t>(dim) * dim);
  for (int i = 0; i < dim; ++i) {
    const auto vector = vectors.col(dim - 1 - i);
    axes.variance[i] = std::max(0.0, values[dim - 1 - i]);
    Eigen::Index largest;
    vector.cwiseAbs().maxCoeff(&largest);
    const double sign = vector[largest] < 0 ? -1.0 : 1.0;
    for (int d = 0; d < dim; ++d) axes.vectors[static_cast<size_t>(i) * dim + d] = sign * vector[d];
  }
  return axes;
}

}  // namespace

PrincipalAxes FitPrincipalAxes(const Moments& moments) {
  const Eigen::VectorXd mean = Mean(moments);
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(Covariance(moments, mean));
  return Sorted(mean, solver.eigenvalues(), solver.eigenvectors());
}

PrincipalAxes FitWeightedAxes(const Moments& moments, const Moments& metric) {
  const int dim = moments.dim;
  const Eigen::VectorXd mean = Mean(moments);
  Eigen::MatrixXd weight = Eigen::Map<const RowMatrix>(metric.second.data(), dim, dim);
  const double size = weight.trace() / dim;
  if (!(size > 0)) return FitPrincipalAxes(moments);
  weight /= size;
  weight.diagonal().array() += 1e-3;
  // With metric = L L^T an error e weighs |L^T e|^2: principal axes of L^T x, taken back.
  const Eigen::MatrixXd root = weight.llt().matrixL();
  const Eigen::MatrixXd seen = root.transpose() * Covariance(moments, mean) * root;
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(seen);
  const Eigen::MatrixXd back =
      root.transpose().triangularView<Eigen::Upper>().solve(solver.eigenvectors());
  PrincipalAxes axes = Sorted(mean, solver.eigenvalues(), back);
  // The encoder of an axis is metric * axis: axes are orthonormal in the metric, whatever the sign.
  const Eigen::Map<const RowMatrix> rows(axes.vectors.data(), dim, dim);
  const RowMatrix encoders = rows * weight;
  axes.encoders.assign(encoders.data(), encoders.data() + encoders.size());
  return axes;
}

PrincipalAxes AxesAlong(std::vector<double> vectors, const Moments& moments) {
  const int dim = moments.dim;
  const Eigen::VectorXd mean = Mean(moments);
  const auto rank = static_cast<Eigen::Index>(vectors.size()) / dim;
  const Eigen::Map<const RowMatrix> rows(vectors.data(), rank, dim);
  const Eigen::VectorXd variance =
      (rows * Covariance(moments, mean)).cwiseProduct(rows).rowwise().sum();

  PrincipalAxes axes;
  axes.mean.assign(mean.data(), mean.data() + dim);
  for (const double v : variance) axes.variance.push_back(std::max(0.0, v));
  axes.vectors = std::move(vectors);
  return axes;
}

PrincipalAxes UnitAxes(std::vector<double> vectors, int dim) {
  PrincipalAxes axes;
  axes.variance.assign(vectors.size() / dim, 1.0);
  axes.vectors = std::move(vectors);
  return axes;
}

std::vector<double> IdentityRows(int dim) {
  std::vector<double> rows(static_cast<size_t>(dim) * dim, 0.0);
  for (int d = 0; d < dim; ++d) rows[static_cast<size_t>(d) * dim + d] = 1.0;
  return rows;
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
