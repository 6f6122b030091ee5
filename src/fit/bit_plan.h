// File: bit_plan.h - how many bits each latent channel gets.
#ifndef PALU_SRC_FIT_BIT_PLAN_H_
#define PALU_SRC_FIT_BIT_PLAN_H_

#include <cstdint>
#include <vector>

#include "palu/config.h"

namespace palu {

// Mean squared error of a unit Gaussian channel at `bits` (0..8) under a scale format and token
// group; 0 bits: 1.
double Distortion(ScaleFormat scales, int group_size, int bits);

// Bits of scales (and zeros) per token of one channel.
double ScaleBits(ScaleFormat scales, int group_size);

// The reference's plan: n_hi = max(1, floor(rank * hi_fraction)) channels of hi_bit, the others
// lo_bit.
std::vector<uint8_t> MixedBits(int rank, double hi_fraction, int hi_bit, int lo_bit);

// SVDq's schedule (arXiv 2502.15304 as the reference ships it): the rank is cut into 8 runs, the
// first rank mod 8 of them one longer, with 8, 4, 2, 1, 1, 0, 0, 0 bits. Below rank 32 the zeros
// become 1 bit; `explicit_rank` makes that a ConfigError.
std::vector<uint8_t> ScheduleBits(int rank, bool explicit_rank);

// Channels that get their bits together.
inline constexpr int kChannelsPerStep = 4;

// One head group, as the allocation sees it.
struct ChannelGroup {
  std::vector<double> variance;  // [rank], any order
  int heads = 1;                 // a channel costs its bits once per head
  int head_dim = 0;              // elements that the budget counts
  bool may_drop = true;          // channels may get 0 bits
};

// Reverse water-filling over the channels of all groups: minimises sum heads * variance *
// Distortion(bits) with bits in {0, 1, .., 8} and codes + scales of at most `budget` bits per
// element. Channels get their bits four at a time, in order of variance, as pages pack them
// (page_plan.h). Returns bits per group and channel; a group whose channels would all be dropped
// keeps its first four at 2 bits.
std::vector<std::vector<uint8_t>> WaterFill(const std::vector<ChannelGroup>& groups,
                                            ScaleFormat scales, int group_size, double budget);

}  // namespace palu

#endif  // PALU_SRC_FIT_BIT_PLAN_H_
