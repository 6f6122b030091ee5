#include "eval_score.h"

#include <algorithm>
#include <cmath>

#include "palu/errors.h"

namespace palu::app {
namespace {

// log sum exp; also finds the largest.
double LogSum(std::span<const float> logits, int32_t& top) {
  top = static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
  const float max = logits[top];
  double sum = 0;
  for (const float x : logits) sum += std::exp(x - max);
  if (!std::isfinite(sum))
    throw InputError("a logit is NaN or infinite; the cache or the model is broken");
  return max + std::log(sum);
}

}  // namespace

Estimate MeanOverChunks(std::span<const double> means) {
  Estimate e;
  const double n = static_cast<double>(means.size());
  if (means.empty()) return e;
  for (const double m : means) e.mean += m / n;
  if (means.size() < 2) return e;
  double squares = 0;
  for (const double m : means) squares += (m - e.mean) * (m - e.mean);
  e.standard_error = std::sqrt(squares / (n - 1) / n);
  return e;
}

double Quantile(std::vector<float>& values, double q) {
  if (values.empty()) return 0;
  const auto at = static_cast<size_t>(std::llround(q * static_cast<double>(values.size() - 1)));
  std::nth_element(values.begin(), values.begin() + at, values.end());
  return values[at];
}

void ReferenceRow::Set(std::span<const float> logits) {
  const double log_sum = LogSum(logits, top);
  log_p.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) log_p[i] = static_cast<float>(logits[i] - log_sum);
}

PositionScore ScorePosition(const ReferenceRow& reference, std::span<const float> logits,
                            int32_t next) {
  PositionScore score;
  int32_t top;
  const double log_sum = LogSum(logits, top);
  double kl = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const float log_p = reference.log_p[i];
    if (log_p < -40) continue;  // below 1e-17 of the mass
    kl += std::exp(log_p) * (log_p - (logits[i] - log_sum));
  }
  score.kl = static_cast<float>(std::max(0.0, kl));
  score.nll = static_cast<float>(log_sum - logits[next]);
  score.same_top = top == reference.top;
  return score;
}

void ScoreSum::AddChunk(std::span<const PositionScore> scores) {
  double kl_sum = 0, nll_sum = 0;
  for (const PositionScore& s : scores) {
    kl.push_back(s.kl);
    kl_sum += s.kl;
    nll_sum += s.nll;
    same_top += s.same_top;
  }
  positions += static_cast<int64_t>(scores.size());
  nll += nll_sum;
  chunk_kl.push_back(kl_sum / static_cast<double>(scores.size()));
  chunk_nll.push_back(nll_sum / static_cast<double>(scores.size()));
}

}  // namespace palu::app
