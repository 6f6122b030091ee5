#include "fit/rotated_mean.h"

#include <cmath>
#include <complex>

namespace palu {
namespace {

using Complex = std::complex<double>;

Complex Phase(float frequency, int64_t position) {
  return std::polar(1.0, static_cast<double>(frequency) * static_cast<double>(position));
}

}  // namespace

void RotatedMean::Add(int64_t position, int64_t n, float factor, float* out, int64_t stride) const {
  for (int i = 0; i < planes(); ++i) {
    const int re = Re(i), im = Im(i);
    const Complex step = Phase(rope_.inv_freq[i], 1);
    Complex value = Complex(mean_[re], mean_[im]) * Phase(rope_.inv_freq[i], position);
    for (int64_t t = 0; t < n; ++t, value *= step) {
      out[t * stride + re] += factor * static_cast<float>(value.real());
      out[t * stride + im] += factor * static_cast<float>(value.imag());
    }
  }
  for (size_t d = 2 * static_cast<size_t>(planes()); d < mean_.size(); ++d) {
    for (int64_t t = 0; t < n; ++t) out[t * stride + static_cast<int64_t>(d)] += factor * mean_[d];
  }
}

float RotatedMean::Coefficients(const float* q, float* out) const {
  for (int i = 0; i < planes(); ++i) {
    const float q_re = q[Re(i)], q_im = q[Im(i)], re = mean_[Re(i)], im = mean_[Im(i)];
    out[i] = q_re * re + q_im * im;
    out[planes() + i] = q_im * re - q_re * im;
  }
  float rest = 0;
  for (size_t d = 2 * static_cast<size_t>(planes()); d < mean_.size(); ++d) rest += q[d] * mean_[d];
  return rest;
}

namespace {

// Waves that turn by more than this over half a block are fast. Up to here the polynomials below
// are off by at most 2^-17.
constexpr double kSlowTurn = 0.75;
constexpr int kKnownStarts = 251;  // a prime: runs start a power of two of tokens apart

// Coefficients of the polynomial in y^2 that equals f(y) at the three Chebyshev nodes of y^2 in
// [0, 1].
template <typename F>
void FitTerms(const F& f, std::vector<float>& out) {
  double z[kWaveTerms], g[kWaveTerms];
  for (int i = 0; i < kWaveTerms; ++i) {
    z[i] = 0.5 + 0.5 * std::cos(M_PI * (i + 0.5) / kWaveTerms);
    g[i] = f(std::sqrt(z[i]));
  }
  // Newton's divided differences, then powers.
  const double d01 = (g[1] - g[0]) / (z[1] - z[0]), d12 = (g[2] - g[1]) / (z[2] - z[1]);
  const double d012 = (d12 - d01) / (z[2] - z[0]);
  out.push_back(static_cast<float>(g[0] - d01 * z[0] + d012 * z[0] * z[1]));
  out.push_back(static_cast<float>(d01 - d012 * (z[0] + z[1])));
  out.push_back(static_cast<float>(d012));
}

void AddPlane(double w, WavePlan& plan) {
  const int i = plan.planes++;
  for (int k = 0; k < kWaveBlocks; ++k) {
    const double phase = w * (k * kWaveBlock + 0.5 * (kWaveBlock - 1));
    plan.cos_block.push_back(static_cast<float>(std::cos(phase)));
    plan.sin_block.push_back(static_cast<float>(std::sin(phase)));
  }
  const double turn = w * kWaveHalf;
  if (std::fabs(turn) <= kSlowTurn) {
    plan.slow.push_back(i);
    FitTerms([=](double y) { return std::cos(turn * y); }, plan.even);
    FitTerms([=](double y) { return std::sin(turn * y) / y; }, plan.odd);
    return;
  }
  plan.fast.push_back(i);
  for (int j = 0; j < kWaveHalf; ++j) {
    plan.cos_near.push_back(static_cast<float>(std::cos(w * (j + 0.5))));
    plan.sin_near.push_back(static_cast<float>(std::sin(w * (j + 0.5))));
  }
}

}  // namespace

void Waves::Prepare(const std::vector<float>& inv_freq) {
  if (inv_freq_ == inv_freq) return;
  inv_freq_ = inv_freq;
  plan_ = {};
  for (const float w : inv_freq) AddPlane(w, plan_);
  starts_.assign(kKnownStarts, {});
}

const float* Waves::Phases(int64_t position) {
  Start& start = starts_[static_cast<size_t>(position / kWaveBlock) % kKnownStarts];
  if (start.position == position) return start.phases.data();
  const size_t n = inv_freq_.size();
  start.phases.resize(2 * n);
  for (size_t i = 0; i < n; ++i) {
    const Complex phase = Phase(inv_freq_[i], position);
    start.phases[i] = static_cast<float>(phase.real());
    start.phases[n + i] = static_cast<float>(phase.imag());
  }
  start.position = position;
  return start.phases.data();
}

}  // namespace palu
