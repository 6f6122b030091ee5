#include "eval/softmax.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace palu::app {
namespace {

// One copy of a function for each vector width; the loader takes the widest that the CPU has. Not
// under sanitizers: the loader would run instrumented code before the sanitizer is set up.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define PALU_VECTOR_WIDTHS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PALU_VECTOR_WIDTHS
#endif

constexpr size_t kLanes = 64;    // independent sums, so that no order of additions is prescribed
constexpr size_t kBlock = 2048;  // elements that are added up in float
constexpr float kLeastP = 1e-17f;

// exp for x <= 0. Below -87, where exp leaves the normal floats, as for -87. NaN stays NaN.
// exp(x) = 2^n e^r with n = round(x / ln 2), |r| <= ln(2) / 2; e^r by its Taylor polynomial of
// degree 7, whose remainder is below 2^-27.
[[gnu::always_inline]] inline float Exp(float x) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // their sum is ln 2
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: a sum with it has no fraction bits
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * kLog2E + kRound;
  const float n = shifted - kRound;
  const float r = (x - n * kLn2High) - n * kLn2Low;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // n as an integer stands in the low bits of `shifted`.
  const uint32_t exponent =
      std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound) + 127u;
  return p * std::bit_cast<float>(exponent << 23);
}

[[gnu::always_inline]] inline double Total(const float* lanes) {
  double sum = 0;
  for (size_t l = 0; l < kLanes; ++l) sum += lanes[l];
  return sum;
}

// NaN is never larger.
PALU_VECTOR_WIDTHS float LargestOf(const float* x, size_t n) {
  float lanes[kLanes];
  std::fill_n(lanes, kLanes, -INFINITY);
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t l = 0; l < kLanes; ++l) lanes[l] = x[i + l] > lanes[l] ? x[i + l] : lanes[l];
  }
  for (; i < n; ++i) lanes[0] = std::max(lanes[0], x[i]);
  return *std::max_element(lanes, lanes + kLanes);
}

PALU_VECTOR_WIDTHS double SumOfExp(const float* x, size_t n, float max) {
  double sum = 0;
  size_t i = 0;
  while (i + kLanes <= n) {
    float lanes[kLanes] = {};
    const size_t end = std::min(n, i + kBlock);
    for (; i + kLanes <= end; i += kLanes) {
      for (size_t l = 0; l < kLanes; ++l) lanes[l] += Exp(x[i + l] - max);
    }
    sum += Total(lanes);
  }
  for (; i < n; ++i) sum += Exp(x[i] - max);
  return sum;
}

PALU_VECTOR_WIDTHS void ScaledExp(const float* x, size_t n, float max, float scale, float* out) {
  for (size_t i = 0; i < n; ++i) out[i] = Exp(x[i] - max) * scale;
}

PALU_VECTOR_WIDTHS double SumOfDifferences(const float* p, const float* a, const float* b,
                                           size_t n) {
  double sum = 0;
  size_t i = 0;
  while (i + kLanes <= n) {
    float lanes[kLanes] = {};
    const size_t end = std::min(n, i + kBlock);
    for (; i + kLanes <= end; i += kLanes) {
      for (size_t l = 0; l < kLanes; ++l) {
        const float term = p[i + l] * (a[i + l] - b[i + l]);
        lanes[l] += p[i + l] < kLeastP ? 0.0f : term;
      }
    }
    sum += Total(lanes);
  }
  for (; i < n; ++i) sum += p[i] < kLeastP ? 0.0f : p[i] * (a[i] - b[i]);
  return sum;
}

// The first index that holds the value.
int32_t IndexOf(std::span<const float> x, float value) {
  return static_cast<int32_t>(std::find(x.begin(), x.end(), value) - x.begin());
}

}  // namespace

double SoftmaxSum::log_sum() const { return max + std::log(sum); }

SoftmaxSum SumExp(std::span<const float> logits) {
  SoftmaxSum result;
  // By blocks, so that the index is looked for in one of them only.
  constexpr size_t kSearch = 4096;
  size_t best = 0;
  result.max = -INFINITY;
  for (size_t i = 0; i < logits.size(); i += kSearch) {
    const float max = LargestOf(logits.data() + i, std::min(kSearch, logits.size() - i));
    if (max > result.max) {
      result.max = max;
      best = i;
    }
  }
  if (!std::isfinite(result.max)) return result;
  const size_t length = std::min(kSearch, logits.size() - best);
  result.top = static_cast<int32_t>(best) + IndexOf(logits.subspan(best, length), result.max);
  result.sum = SumOfExp(logits.data(), logits.size(), result.max);
  result.finite = std::isfinite(result.sum);
  return result;
}

void Probabilities(std::span<const float> logits, const SoftmaxSum& sum, std::span<float> p) {
  ScaledExp(logits.data(), logits.size(), sum.max, static_cast<float>(1 / sum.sum), p.data());
}

double WeightedDifference(std::span<const float> p, std::span<const float> a,
                          std::span<const float> b) {
  return SumOfDifferences(p.data(), a.data(), b.data(), p.size());
}

}  // namespace palu::app
