// A block of 32 tokens as floats, channel major (a channel is contiguous) or token major (a latent
// is contiguous).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/decode.cc"
// clang-format off
#include "kernels/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#include "kernels/decode-inl.h"
#include "kernels/levels-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

void DecodeBlock(const PagePlan& plan, const uint8_t* page, int block, float* out) {
  for (int c = 0; c < plan.rank; c += kLanes) {
    DecodeChannels(plan, page, block, c, Least(c + kLanes, plan.rank), out + c * kBlockTokens);
  }
}

using D4 = hn::CappedTag<float, 4>;

// to[i * to_stride + j] = from[j * 32 + i] for i, j < 4.
HWY_INLINE void Transpose4x4(const float* from, float* to, int64_t to_stride) {
  const D4 d;
  const auto r0 = hn::LoadU(d, from), r1 = hn::LoadU(d, from + kBlockTokens);
  const auto r2 = hn::LoadU(d, from + 2 * kBlockTokens);
  const auto r3 = hn::LoadU(d, from + 3 * kBlockTokens);
  const auto low02 = hn::InterleaveLower(d, r0, r2), high02 = hn::InterleaveUpper(d, r0, r2);
  const auto low13 = hn::InterleaveLower(d, r1, r3), high13 = hn::InterleaveUpper(d, r1, r3);
  hn::StoreU(hn::InterleaveLower(d, low02, low13), d, to);
  hn::StoreU(hn::InterleaveUpper(d, low02, low13), d, to + to_stride);
  hn::StoreU(hn::InterleaveLower(d, high02, high13), d, to + 2 * to_stride);
  hn::StoreU(hn::InterleaveUpper(d, high02, high13), d, to + 3 * to_stride);
}

void DecodeBlockTokens(const PagePlan& plan, const uint8_t* page, int block, float* out,
                       int64_t out_stride) {
  alignas(64) float channels[kLanes * kBlockTokens];
  for (int c = 0; c < plan.rank; c += kLanes) {
    const int n = Least(kLanes, plan.rank - c);
    DecodeChannels(plan, page, block, c, c + n, channels);
    int j = 0;
    for (; j + 4 <= n; j += 4) {
      for (int t = 0; t < kBlockTokens; t += 4) {
        Transpose4x4(channels + j * kBlockTokens + t, out + t * out_stride + c + j, out_stride);
      }
    }
    for (; j < n; ++j) {
      for (int t = 0; t < kBlockTokens; ++t) {
        out[t * out_stride + c + j] = channels[j * kBlockTokens + t];
      }
    }
  }
}

void AddDecodeTarget(KernelTable& table) {
  table.decode_block = DecodeBlock;
  table.decode_block_tokens = DecodeBlockTokens;
}

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace palu {
PALU_EXPORT_KERNELS(AddDecode)
}  // namespace palu
#endif
