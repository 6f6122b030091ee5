// File: encode_scalar.h - packing one value at a time: what the reference and the token-scaled
// formats share.
#ifndef PALU_SRC_KERNELS_ENCODE_SCALAR_H_
#define PALU_SRC_KERNELS_ENCODE_SCALAR_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/fp16.h"
#include "codec/page_plan.h"

namespace palu {

template <typename T>
void StoreScalar(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}

// Latents reach sqrt(head_dim) times the fp16 range of K and V; what is stored of them stays
// finite.
inline uint16_t SaturatedF16(float x) { return F32ToF16(std::clamp(x, -kMaxF16, kMaxF16)); }

// The log8 scales that a group of values may get: first .. last. The encoder takes the one of least
// squared error, of equals the smallest.
struct Log8Candidates {
  int first, last;
};

// Up to 2 bits the best scale follows the root mean square. From 3 bits on it follows the largest
// magnitude, as a value clipped costs more than the coarser steps that reach it; only at 3 bits
// does clipping a little still pay. For Gaussian, Laplacian and Student-t (4) values in groups of
// 32, these ranges are within 1 % of the error of the best of all 256 scales; in groups of 16 to
// 128 within 4 %.
inline bool Log8FollowsRms(int bits) { return bits <= 2; }

// anchor: the root mean square or the largest magnitude, as Log8FollowsRms says. bits: 1..8.
inline Log8Candidates CandidatesAround(int bits, float anchor) {
  constexpr int kFirst[9] = {0, -2, -2, -4, -2, -1, 0, 0, 0};
  constexpr int kLast[9] = {0, 1, 4, 1, 3, 3, 3, 3, 3};
  if (!Log8FollowsRms(bits)) {  // the scale whose outermost level is the anchor
    const float outermost = bits <= 4 ? static_cast<float>(LloydMaxLevels(bits)[(1 << bits) - 1])
                                      : 0.5f * static_cast<float>((1 << bits) - 1);
    anchor /= outermost * Log8Unit(bits);
  }
  const int middle = Log8FromFloat(anchor);
  return {std::max(middle + kFirst[bits], 0), std::min(middle + kLast[bits], 255)};
}

// Widths of the planes of a quad of `bits` bits, in storage order; returns their number.
inline int PlaneWidths(int bits, int widths[4]) {
  int n = 0;
  for (int width = 8; width > 0; width /= 2) {
    if (bits & width) widths[n++] = width;
  }
  return n;
}

// First byte of the quad of a channel, in the block of token t of a page (0..page_tokens - 1).
inline size_t QuadAt(const PagePlan& plan, int channel, int t) {
  return static_cast<size_t>(t / kBlockTokens) * plan.block_bytes +
         plan.quad_offset(plan.slot[channel] / kQuad);
}

// ORs one code into its quad, which starts as zeros.
inline void WriteCode(const PagePlan& plan, uint8_t* page, int channel, int t, int code) {
  uint8_t* plane = page + QuadAt(plan, channel, t);
  const int j = plan.CodePlace(plan.slot[channel] % kQuad, t % kBlockTokens);
  int widths[4];
  const int n = PlaneWidths(plan.bits[channel], widths);
  for (int i = 0; i < n; ++i) {
    const int p = widths[i];
    plane[j % (16 * p)] |= static_cast<uint8_t>((code & ((1 << p) - 1)) << (p * (j / (16 * p))));
    code >>= p;
    plane += 16 * p;
  }
}

// Packs one page whose scales belong to tokens; arguments as KernelTable::encode_page. One
// implementation for all targets: tokens are encoded once, and these formats are for comparison.
void EncodeTokenScaled(const PagePlan& plan, const float* x, int64_t x_stride, uint8_t* page);

}  // namespace palu

#endif  // PALU_SRC_KERNELS_ENCODE_SCALAR_H_
