// File: samples.h - figures of repeated measurements.
#ifndef PALU_APPS_BENCH_SAMPLES_H_
#define PALU_APPS_BENCH_SAMPLES_H_

#include <algorithm>
#include <cstddef>
#include <vector>

namespace palu::app {

struct Spread {
  double median = 0, min = 0, max = 0;  // 0 of nothing
};

// The median of an even number is the mean of the two in the middle.
inline Spread SpreadOf(std::vector<double> samples) {
  if (samples.empty()) return {};
  std::sort(samples.begin(), samples.end());
  const size_t n = samples.size();
  return {(samples[(n - 1) / 2] + samples[n / 2]) / 2, samples.front(), samples.back()};
}

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_SAMPLES_H_
