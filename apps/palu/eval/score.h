// File: score.h - how far the predictions of one cache are from those of the reference cache.
#ifndef PALU_APPS_EVAL_SCORE_H_
#define PALU_APPS_EVAL_SCORE_H_

#include <cstdint>
#include <span>
#include <vector>

#include "eval/softmax.h"

namespace palu::app {

// Logits of some positions, [position][vocabulary]; the rows lie wherever the session has them.
using LogitView = std::vector<std::span<const float>>;

// What one position says about a cache.
struct PositionScore {
  float kl = 0;   // KL(reference || cache), nats, clamped at 0 from below
  float nll = 0;  // -log probability of the token that follows in the text
  bool same_top = false;
  bool finite = false;  // false: a logit is NaN or +infinity, or -infinity where the reference
                        // sees a probability; the other fields mean nothing then
};

// The reference's distributions at some positions in a row, made once and compared with those of
// every cache. Cost: 8 bytes per position and vocabulary entry.
class ReferenceBlock {
 public:
  void Clear() { sums_.clear(); }
  // Appends positions; logits are copied. Positions are shared among `threads` threads.
  void Add(const LogitView& logits, int threads);
  // Whether the reference's own logits at position i are numbers.
  bool finite(int64_t i) const { return sums_[i].finite; }
  // -log probability of `next` at position i.
  float Nll(int64_t i, int32_t next) const;

  // Scores logits of positions first, first + 1, ...; next[i] follows the i-th of them in the text.
  // Absolute error of kl: about 1e-7.
  std::vector<PositionScore> Score(int64_t first, const LogitView& logits,
                                   std::span<const int32_t> next, int threads) const;

 private:
  size_t vocabulary_ = 0;
  std::vector<SoftmaxSum> sums_;
  std::vector<float> logits_, p_;  // [position][vocabulary]
};

// Mean and its standard error over chunks (positions of one chunk depend on each other, chunks
// hardly). What is not known is NaN: the mean of none, the error of one.
struct Estimate {
  double mean = 0, standard_error = 0;
};
Estimate MeanOverChunks(std::span<const double> chunk_means);

// The q-quantile, 0 <= q <= 1, of values that are reordered; NaN when empty.
double Quantile(std::vector<float>& values, double q);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_SCORE_H_
