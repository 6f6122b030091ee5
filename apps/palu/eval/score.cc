#include "eval/score.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "parallel.h"

namespace palu::app {

void ReferenceBlock::Add(const LogitView& logits, int threads) {
  if (logits.empty()) return;
  const size_t before = sums_.size();
  vocabulary_ = logits[0].size();
  sums_.resize(before + logits.size());
  const size_t needed = sums_.size() * vocabulary_;
  if (logits_.size() < needed) {
    logits_.resize(needed);
    p_.resize(needed);
  }
  ParallelFor(static_cast<int64_t>(logits.size()), threads, [&](int64_t i) {
    const size_t at = before + i;
    std::copy(logits[i].begin(), logits[i].end(), logits_.begin() + at * vocabulary_);
    sums_[at] = SumExp(logits[i]);
    if (sums_[at].finite) {
      Probabilities(logits[i], sums_[at], {p_.data() + at * vocabulary_, vocabulary_});
    }
  });
}

float ReferenceBlock::Nll(int64_t i, int32_t next) const {
  return static_cast<float>(sums_[i].log_sum() - logits_[i * vocabulary_ + next]);
}

std::vector<PositionScore> ReferenceBlock::Score(int64_t first, const LogitView& logits,
                                                 std::span<const int32_t> next, int threads) const {
  std::vector<PositionScore> scores(logits.size());
  ParallelFor(static_cast<int64_t>(logits.size()), threads, [&](int64_t i) {
    const SoftmaxSum& reference = sums_[first + i];
    const SoftmaxSum sum = SumExp(logits[i]);
    if (!reference.finite || !sum.finite) return;
    const size_t row = (first + i) * vocabulary_;
    // sum p (log p - log q), where log p - log q = (a - b) + (log sum of q - log sum of p).
    const double kl = WeightedDifference({p_.data() + row, vocabulary_},
                                         {logits_.data() + row, vocabulary_}, logits[i]) +
                      sum.log_sum() - reference.log_sum();
    PositionScore& score = scores[i];
    score.kl = static_cast<float>(std::max(0.0, kl));
    score.nll = static_cast<float>(sum.log_sum() - logits[i][next[i]]);
    score.same_top = sum.top == reference.top;
    score.finite = std::isfinite(kl) && std::isfinite(score.nll);
  });
  return scores;
}

Estimate MeanOverChunks(std::span<const double> means) {
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  const auto n = static_cast<double>(means.size());
  if (means.empty()) return {kUnknown, kUnknown};
  const double mean = std::accumulate(means.begin(), means.end(), 0.0) / n;
  if (means.size() == 1) return {mean, kUnknown};
  double squares = 0;
  for (const double m : means) squares += (m - mean) * (m - mean);
  return {mean, std::sqrt(squares / (n - 1) / n)};
}

double Quantile(std::vector<float>& values, double q) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  const auto at = static_cast<size_t>(std::llround(q * static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[at];
}

}  // namespace palu::app
