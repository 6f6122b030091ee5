// File: rotated_mean.h - the mean of keys before RoPE, turned to the position of each key.
//
// Most of a key's energy is the mean of its head. After RoPE that mean moves with the position and
// looks like variance; taken away at its position it costs no bits. A query meets it as
//   q . R_p mu = sum_i A_i cos(w_i p) + B_i sin(w_i p)
// over the planes i of the rotation, with A and B made once per query.
#ifndef PALU_SRC_FIT_ROTATED_MEAN_H_
#define PALU_SRC_FIT_ROTATED_MEAN_H_

#include <cstdint>
#include <vector>

#include "base/wave_plan.h"
#include "palu/rope.h"

namespace palu {

class RotatedMean {
 public:
  RotatedMean() = default;
  // mean: [D], un-rotated.
  RotatedMean(RopeParams rope, std::vector<float> mean)
      : rope_(std::move(rope)), mean_(std::move(mean)) {}

  bool empty() const { return mean_.empty(); }
  int planes() const { return static_cast<int>(rope_.inv_freq.size()); }
  // Bytes that it holds beside the object itself.
  int64_t nbytes() const {
    return static_cast<int64_t>((mean_.size() + rope_.inv_freq.size()) * sizeof(float));
  }

  // out[i][d] += factor * (R_p mu)[d] for p = position + i, i < n; rows are `stride` apart.
  void Add(int64_t position, int64_t n, float factor, float* out, int64_t stride) const;
  // A, then B, of one query: [2 planes]. Returns the part of q . mu that does not rotate.
  float Coefficients(const float* q, float* out) const;

  const std::vector<float>& inv_freq() const { return rope_.inv_freq; }

 private:
  int Re(int plane) const { return rope_.pairing == RopePairing::kHalves ? plane : 2 * plane; }
  int Im(int plane) const {
    return rope_.pairing == RopePairing::kHalves ? plane + planes() : 2 * plane + 1;
  }

  RopeParams rope_;
  std::vector<float> mean_;
};

// Waves of a rotation over runs of tokens: the tables of wave_plan.h, and the phases at the starts
// of runs. Both are kept from call to call while the frequencies stay the same. Threads: one at a
// time.
class Waves {
 public:
  const WavePlan& plan() const { return plan_; }
  void Prepare(const std::vector<float>& inv_freq);
  // cos(w_i position), then sin: [2 planes]. Valid until the next call.
  const float* Phases(int64_t position);

 private:
  struct Start {
    int64_t position = -1;
    std::vector<float> phases;
  };

  std::vector<float> inv_freq_;
  WavePlan plan_;
  std::vector<Start> starts_;  // the latest of every kind of position
};

}  // namespace palu

#endif  // PALU_SRC_FIT_ROTATED_MEAN_H_
