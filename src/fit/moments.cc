#include "fit/moments.h"

#include <Eigen/Core>
#include <cmath>
#include <complex>

namespace palu {
namespace {

using Complex = std::complex<double>;
using RowMatrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Dims that turn together: (re, im). Unrotated dims are paired up too, with frequency 0; im = -1 is
// a missing partner.
struct Plane {
  int re, im;
  double frequency;
};

std::vector<Plane> Planes(int dim, const RopeParams& rope, int heads) {
  const int n = static_cast<int>(rope.inv_freq.size());
  std::vector<Plane> planes;
  for (int head = 0; head < heads; ++head) {
    const int first = head * dim / heads, end = (head + 1) * dim / heads;
    for (int i = 0; i < n; ++i) {
      if (rope.pairing == RopePairing::kInterleaved) {
        planes.push_back({first + 2 * i, first + 2 * i + 1, rope.inv_freq[i]});
      } else {
        planes.push_back({first + i, first + i + n, rope.inv_freq[i]});
      }
    }
    for (int d = first + 2 * n; d < end; d += 2) {
      planes.push_back({d, d + 1 < end ? d + 1 : -1, 0.0});
    }
  }
  return planes;
}

// (1 / n) * sum over p = 0 .. n-1 of exp(i angle p).
Complex MeanPhase(double angle, int64_t n) {
  const double half = std::remainder(angle, 2 * M_PI) / 2;
  if (std::abs(half) < 1e-12) return 1.0;
  const double count = static_cast<double>(n);
  return std::polar(std::sin(count * half) / (count * std::sin(half)), (count - 1) * half);
}

}  // namespace

void Moments::Add(const float* x, int64_t n, int64_t stride) {
  using Stride = Eigen::OuterStride<>;
  using FloatRows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const RowMatrix block =
      Eigen::Map<const FloatRows, 0, Stride>(x, n, dim, Stride(stride)).cast<double>();
  Eigen::Map<RowMatrix>(second.data(), dim, dim).noalias() += block.transpose() * block;
  Eigen::Map<Eigen::RowVectorXd>(sum.data(), dim) += block.colwise().sum();
  rows += static_cast<double>(n);
}

Moments Moments::Part(int first, int n) const {
  Moments part(n);
  part.rows = rows;
  for (int i = 0; i < n; ++i) {
    part.sum[i] = sum[first + i];
    for (int j = 0; j < n; ++j) {
      part.second[static_cast<size_t>(i) * n + j] =
          second[static_cast<size_t>(first + i) * dim + first + j];
    }
  }
  return part;
}

void Moments::Add(const Moments& other) {
  rows += other.rows;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += other.sum[i];
  for (size_t i = 0; i < second.size(); ++i) second[i] += other.second[i];
}

std::vector<double> Moments::Centre() {
  std::vector<double> mean = sum;
  const double n = rows > 0 ? rows : 1;
  for (double& m : mean) m /= n;
  for (int i = 0; i < dim; ++i) {
    for (int j = 0; j < dim; ++j) {
      second[static_cast<size_t>(i) * dim + j] -= n * mean[i] * mean[j];
    }
  }
  sum.assign(sum.size(), 0.0);
  return mean;
}

double Moments::Energy() const {
  double trace = 0;
  for (int d = 0; d < dim; ++d) trace += second[static_cast<size_t>(d) * dim + d];
  return trace;
}

void Unrotate(const RopeParams& rope, int64_t position, float* x, int64_t n, int64_t stride) {
  const int count = static_cast<int>(rope.inv_freq.size());
  const bool halves = rope.pairing == RopePairing::kHalves;
  for (int64_t i = 0; i < n; ++i) {
    float* row = x + i * stride;
    for (int j = 0; j < count; ++j) {
      const double angle = static_cast<double>(position + i) * rope.inv_freq[j];
      const float c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
      float& re = row[halves ? j : 2 * j];
      float& im = row[halves ? j + count : 2 * j + 1];
      const float a = re, b = im;
      re = a * c + b * s;
      im = b * c - a * s;
    }
  }
}

Moments AverageOverPositions(const Moments& m, const RopeParams& rope, int64_t positions,
                             int heads) {
  const std::vector<Plane> planes = Planes(m.dim, rope, heads);
  Moments out(m.dim);
  out.rows = m.rows;
  auto at = [&](int i, int j) {
    return i < 0 || j < 0 ? 0.0 : m.second[static_cast<size_t>(i) * m.dim + j];
  };
  auto put = [&](int i, int j, double value) {
    if (i >= 0 && j >= 0) out.second[static_cast<size_t>(i) * m.dim + j] = value;
  };
  for (const Plane& p : planes) {
    // With z = re + i im, rotation by an angle is multiplication by exp(i angle).
    const Complex mean =
        Complex(m.sum[p.re], p.im < 0 ? 0.0 : m.sum[p.im]) * MeanPhase(p.frequency, positions);
    out.sum[p.re] = mean.real();
    if (p.im >= 0) out.sum[p.im] = mean.imag();
    for (const Plane& q : planes) {
      const double rr = at(p.re, q.re), ri = at(p.re, q.im), ir = at(p.im, q.re),
                   ii = at(p.im, q.im);
      const Complex conj = Complex(rr + ii, ir - ri) *
                           MeanPhase(p.frequency - q.frequency, positions);  // E[z_p z_q*]
      const Complex plain = Complex(rr - ii, ir + ri) *
                            MeanPhase(p.frequency + q.frequency, positions);  // E[z_p z_q]
      put(p.re, q.re, (conj.real() + plain.real()) / 2);
      put(p.im, q.im, (conj.real() - plain.real()) / 2);
      put(p.im, q.re, (plain.imag() + conj.imag()) / 2);
      put(p.re, q.im, (plain.imag() - conj.imag()) / 2);
    }
  }
  return out;
}

}  // namespace palu
