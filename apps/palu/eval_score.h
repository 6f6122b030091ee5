// File: eval_score.h - how far the predictions of one cache are from those of the reference cache.
#ifndef PALU_APPS_EVAL_SCORE_H_
#define PALU_APPS_EVAL_SCORE_H_

#include <cstdint>
#include <span>
#include <vector>

namespace palu::app {

// Mean and its standard error over chunks (tokens of one chunk depend on each other, chunks
// hardly).
struct Estimate {
  double mean = 0, standard_error = 0;
};
Estimate MeanOverChunks(std::span<const double> chunk_means);

// The q-quantile, 0 <= q <= 1, of values that are reordered; 0 when empty.
double Quantile(std::vector<float>& values, double q);

// Log-probabilities of one position of the reference.
struct ReferenceRow {
  std::vector<float> log_p;
  int32_t top = 0;
  void Set(std::span<const float> logits);  // throws InputError on NaN
};

// What one position adds.
struct PositionScore {
  float kl = 0;   // KL(reference || cache), nats, clamped at 0 from below
  float nll = 0;  // of the next token
  bool same_top = false;
};
// Throws InputError on NaN.
PositionScore ScorePosition(const ReferenceRow& reference, std::span<const float> logits,
                            int32_t next);

// All positions of one cache.
struct ScoreSum {
  std::vector<float> kl;  // every scored position
  std::vector<double> chunk_kl, chunk_nll;
  int64_t same_top = 0, positions = 0;
  double nll = 0;

  void AddChunk(std::span<const PositionScore> positions);
};

}  // namespace palu::app

#endif  // PALU_APPS_EVAL_SCORE_H_
