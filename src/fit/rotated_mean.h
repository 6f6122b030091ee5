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

#include "palu/rope.h"

namespace palu {

inline constexpr int kMeanBlock = 32;  // tokens whose scores are made at once

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

  // The waves of the planes over tokens position .. position + blocks * kMeanBlock - 1, in two
  // factors: block starts and places within a block.
  struct Waves {
    std::vector<float> starts;  // [blocks][2 planes]: cos, then sin, at the start of a block
    std::vector<float> within;  // [2 planes][kMeanBlock]: cos rows, then sin rows
    // `within` is kept from call to call while the frequencies stay the same.
    void Make(const RotatedMean& mean, int64_t position, int64_t blocks);

   private:
    void MakeWithin(const std::vector<float>& inv_freq);

    std::vector<float> inv_freq_;  // of `within`
  };

 private:
  int Re(int plane) const { return rope_.pairing == RopePairing::kHalves ? plane : 2 * plane; }
  int Im(int plane) const {
    return rope_.pairing == RopePairing::kHalves ? plane + planes() : 2 * plane + 1;
  }

  RopeParams rope_;
  std::vector<float> mean_;
};

}  // namespace palu

#endif  // PALU_SRC_FIT_ROTATED_MEAN_H_
