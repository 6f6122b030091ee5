// File: softmax.h - probabilities of one row of logits, fast enough for vocabularies of 262,144.
//
// Plain loops that compilers turn into vector code: exp is a polynomial in float (relative error
// below 2e-7), sums run in 64 float lanes over 2,048 elements and in double from there.
// Threads: all functions are safe. Cost of each: one or two passes over the row.
#ifndef PALU_APPS_EVAL_SOFTMAX_H_
#define PALU_APPS_EVAL_SOFTMAX_H_

#include <cstdint>
#include <span>

namespace palu::app {

// The denominator of a softmax.
struct SoftmaxSum {
  float max = 0;
  int32_t top = 0;      // index of the largest logit, the first of equals
  double sum = 0;       // of exp(logit - max)
  bool finite = false;  // no NaN and no +infinity among the logits; -infinity is probability 0
  double log_sum() const;
};

// logits: at least one.
SoftmaxSum SumExp(std::span<const float> logits);

// p[i] = exp(logits[i]) / sum over all. sum: of the same logits; p: as long as logits.
void Probabilities(std::span<const float> logits, const SoftmaxSum& sum, std::span<float> p);

// Sum of p[i] (a[i] - b[i]) over the i whose p is at least 1e-17, so that a = b = -infinity where
// p is 0 adds nothing. All of one length.
double WeightedDifference(std::span<const float> p, std::span<const float> a,
                          std::span<const float> b);

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_SOFTMAX_H_
