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

void RotatedMean::Waves::MakeWithin(const std::vector<float>& inv_freq) {
  if (inv_freq_ == inv_freq) return;
  inv_freq_ = inv_freq;
  const size_t n = inv_freq.size();
  within.resize(2 * n * kMeanBlock);
  for (size_t i = 0; i < n; ++i) {
    const Complex step = Phase(inv_freq[i], 1);
    Complex value = 1.0;
    for (size_t t = 0; t < kMeanBlock; ++t, value *= step) {
      within[i * kMeanBlock + t] = static_cast<float>(value.real());
      within[(n + i) * kMeanBlock + t] = static_cast<float>(value.imag());
    }
  }
}

void RotatedMean::Waves::Make(const RotatedMean& mean, int64_t position, int64_t blocks) {
  const std::vector<float>& inv_freq = mean.rope_.inv_freq;
  MakeWithin(inv_freq);
  const size_t n = inv_freq.size();
  starts.resize(static_cast<size_t>(blocks) * 2 * n);
  for (size_t i = 0; i < n; ++i) {
    const Complex block = Phase(inv_freq[i], kMeanBlock);
    Complex value = Phase(inv_freq[i], position);
    for (int64_t b = 0; b < blocks; ++b, value *= block) {
      starts[static_cast<size_t>(b) * 2 * n + i] = static_cast<float>(value.real());
      starts[static_cast<size_t>(b) * 2 * n + n + i] = static_cast<float>(value.imag());
    }
  }
}

}  // namespace palu
