// File: wave_plan.h - the waves of a rotation over a run of tokens, as tables that scores are made
// from.
//
// A query meets a rotated mean as a sum of waves over the planes of the rotation (rotated_mean.h),
//   score(t) = sum_i A_i cos(w_i t) + B_i sin(w_i t),
// t counted from the start of a run of up to 32 blocks of 32 tokens. From the middle of a block,
// t = 32 k + 15.5 + x with x = -15.5 .. 15.5,
//   score = sum_i a_i cos(w_i x) + b_i sin(w_i x)
//   a_i = A_i cos(w_i (32 k + 15.5)) + B_i sin(..),  b_i = B_i cos(..) - A_i sin(..)
// where cosines are even and sines odd in x: half the places give both halves. Fast waves are
// summed one by one; slow ones turn so little within a block that polynomials of three terms hold
// all of them,  cos(w x) ~ e0 + e1 y^2 + e2 y^4,  sin(w x) ~ y (o0 + o1 y^2 + o2 y^4),  y = x / 16.
#ifndef PALU_SRC_BASE_WAVE_PLAN_H_
#define PALU_SRC_BASE_WAVE_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace palu {

inline constexpr int kWaveBlock = 32;   // tokens
inline constexpr int kWaveBlocks = 32;  // of a run, at most
inline constexpr int kWaveHalf = kWaveBlock / 2;
inline constexpr int kWaveTerms = 3;

struct WavePlan {
  int planes = 0;
  std::vector<int> fast, slow;              // planes
  std::vector<float> cos_block, sin_block;  // [planes][32]: at the middle of block k
  std::vector<float> cos_near, sin_near;    // [fast][16]: at x = j + 0.5
  std::vector<float> even, odd;             // [slow][3]
};

}  // namespace palu

#endif  // PALU_SRC_BASE_WAVE_PLAN_H_
