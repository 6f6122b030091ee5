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

// 32 tokens of one channel of a raw side.
HWY_INLINE void DecodeRaw(const PagePlan& plan, const uint8_t* page, int block, int c, float* out) {
  const DF df;
  const uint8_t* const from =
      page + static_cast<size_t>(block) * plan.block_bytes + plan.raw_offset(c);
  if (plan.bits[0] == 32) {
    std::memcpy(out, from, kBlockTokens * sizeof(float));
    return;
  }
  for (int t = 0; t < kBlockTokens; t += kLanes) {
    hn::StoreU(LoadF16(reinterpret_cast<const uint16_t*>(from) + t), df, out + t);
  }
}

void DecodeBlock(const PagePlan& plan, const uint8_t* page, int block, float* out) {
  for (int c = 0; c < plan.rank && plan.raw; ++c) {
    DecodeRaw(plan, page, block, c, out + c * kBlockTokens);
  }
  for (int quad = 0; quad < plan.slots / kQuad; ++quad) {
    alignas(64) float values[kQuadCodes];
    DecodeQuad(plan, page, block, quad, values);
    for (int l = 0; l < kQuad; ++l) {
      const int c = plan.channel[quad * kQuad + l];
      if (c < 0) continue;
      std::memcpy(out + c * kBlockTokens, values + l * kBlockTokens, kBlockTokens * sizeof(float));
    }
  }
}

// out[t * out_stride + channel of lane l] = values[t][l].
HWY_INLINE void ScatterTokens(const int16_t* channel, const float* values, float* out,
                              int64_t out_stride) {
  const int c = channel[0];
  if (channel[1] == c + 1 && channel[2] == c + 2 && channel[3] == c + 3) {
    for (int t = 0; t < kBlockTokens; ++t) {
      std::memcpy(out + t * out_stride + c, values + t * kQuad, kQuad * sizeof(float));
    }
    return;
  }
  for (int l = 0; l < kQuad; ++l) {
    for (int t = 0; t < kBlockTokens && channel[l] >= 0; ++t) {
      out[t * out_stride + channel[l]] = values[t * kQuad + l];
    }
  }
}

void DecodeBlockTokens(const PagePlan& plan, const uint8_t* page, int block, float* out,
                       int64_t out_stride) {
  alignas(64) float values[kQuadCodes];
  for (int c = 0; c < plan.rank && plan.raw; c += kQuad) {
    const int n = Least(kQuad, plan.rank - c);
    for (int l = 0; l < n; ++l) DecodeRaw(plan, page, block, c + l, values + l * kBlockTokens);
    for (int t = 0; t < kBlockTokens && n == kQuad; t += 4) {
      Transpose4x4(values + t, kBlockTokens, out + t * out_stride + c, out_stride);
    }
    for (int l = 0; l < n && n < kQuad; ++l) {
      for (int t = 0; t < kBlockTokens; ++t) {
        out[t * out_stride + c + l] = values[l * kBlockTokens + t];
      }
    }
  }
  for (int quad = 0; quad < plan.slots / kQuad; ++quad) {
    DecodeQuadTokens(plan, page, block, quad, values);
    ScatterTokens(&plan.channel[quad * kQuad], values, out, out_stride);
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
