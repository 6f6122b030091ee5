#include "sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <unordered_set>

#include "palu/errors.h"

namespace palu::app {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

void Require(bool ok, const char* option, double value, const char* allowed) {
  if (!ok) throw ConfigError(fmt::format("{} {}: allowed is {}", option, value, allowed));
}

// As in CTRL (arXiv 1909.05858): divides positive logits, multiplies negative ones.
void Penalise(const std::deque<int32_t>& recent, float penalty, std::vector<float>& logits) {
  const std::unordered_set<int32_t> tokens(recent.begin(), recent.end());
  for (const int32_t token : tokens) {
    float& logit = logits[token];
    logit = logit > 0 ? logit / penalty : logit * penalty;
  }
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options) : options_(options), random_(options.seed) {
  const SamplerOptions& o = options_;
  Require(o.temperature >= 0 && o.temperature <= 10, "--temp", o.temperature, "0..10");
  Require(o.top_k >= 0, "--top-k", o.top_k, "0 (all) or more");
  Require(o.top_p > 0 && o.top_p <= 1, "--top-p", o.top_p, "(0, 1]");
  Require(o.repeat_penalty > 0 && o.repeat_penalty <= 10, "--repeat-penalty", o.repeat_penalty,
          "(0, 10]");
}

void Sampler::Accept(int32_t token) {
  recent_.push_back(token);
  if (static_cast<int>(recent_.size()) > options_.repeat_last) recent_.pop_front();
}

int32_t Sampler::Sample(std::span<const float> logits) {
  logits_.assign(logits.begin(), logits.end());
  if (options_.repeat_penalty != 1) Penalise(recent_, options_.repeat_penalty, logits_);
  for (const int32_t token : banned_) logits_[token] = kNever;
  candidates_.clear();
  int32_t best = -1;
  for (int32_t i = 0; i < static_cast<int32_t>(logits_.size()); ++i) {
    if (!std::isfinite(logits_[i])) continue;
    candidates_.push_back(i);
    if (best < 0 || logits_[i] > logits_[best]) best = i;
  }
  if (best < 0) throw InputError("the model gave no finite logit, so there is no next token");
  return options_.temperature == 0 ? best : Draw();
}

int32_t Sampler::Draw() {
  const auto likelier = [this](int32_t a, int32_t b) {
    return logits_[a] != logits_[b] ? logits_[a] > logits_[b] : a < b;
  };
  size_t kept = candidates_.size();
  if (options_.top_k > 0) kept = std::min<size_t>(kept, options_.top_k);
  std::partial_sort(candidates_.begin(), candidates_.begin() + kept, candidates_.end(), likelier);

  const double top = logits_[candidates_[0]];
  if (options_.top_p < 1) {
    double total = 0, sum = 0;
    for (size_t i = 0; i < kept; ++i) total += std::exp(logits_[candidates_[i]] - top);
    size_t n = 0;
    while (n < kept && sum < options_.top_p * total) {
      sum += std::exp(logits_[candidates_[n++]] - top);
    }
    kept = n;
  }

  std::vector<double> weights(kept);
  double total = 0;
  for (size_t i = 0; i < kept; ++i) {
    weights[i] = std::exp((logits_[candidates_[i]] - top) / options_.temperature);
    total += weights[i];
  }
  // 53 random bits: uniform in [0, 1).
  double left = static_cast<double>(random_() >> 11) * 0x1.0p-53 * total;
  for (size_t i = 0; i < kept; ++i) {
    left -= weights[i];
    if (left < 0) return candidates_[i];
  }
  return candidates_[kept - 1];  // rounding left a crumb
}

}  // namespace palu::app
