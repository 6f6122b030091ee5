// File: decode-inl.h - one channel of one block as 32 floats.
#if defined(PALU_SRC_KERNELS_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PALU_SRC_KERNELS_DECODE_INL_H_
#undef PALU_SRC_KERNELS_DECODE_INL_H_
#else
#define PALU_SRC_KERNELS_DECODE_INL_H_
#endif

#include "base/fp16.h"
#include "hwy/highway.h"
#include "kernels/levels-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

// The levels (or raw values) of one channel, for ForBits.
struct LevelsOfChannel {
  const PagePlan& plan;
  const uint8_t* codes;
  float* out;

  template <int kBits>
  HWY_INLINE void Channels() {
    const VU8 table = LevelTable(plan, kBits);
    for (int part = 0; part < kParts; ++part) {
      VF level[kVecs];
      LoadLevels<kBits>(codes, part, table, level);
      for (int j = 0; j < kVecs; ++j) hn::StoreU(level[j], DF(), out + part * kPart + j * kLanes);
    }
  }
};

// a and z of one channel and token group.
HWY_INLINE void LoadScale(const PagePlan& plan, const uint8_t* page, int group, int c, float& a,
                          float& z) {
  const uint8_t* scales = page + plan.code_bytes();
  const int i = group * plan.rank + c;
  if (plan.scales == ScaleFormat::kMinMax) {
    const uint8_t* zeros = scales + 2 * plan.groups() * plan.rank;
    a = F16ToF32(LoadScalar<uint16_t>(scales + 2 * i));
    z = F16ToF32(LoadScalar<uint16_t>(zeros + 2 * i)) + 0.5f * a;
  } else {
    a = Log8Value(scales[i]) * plan.unit[c];
    z = a * plan.half[c];
  }
}

// out[t] = latent of channel c for the 32 tokens of a block. Any group size.
HWY_INLINE void DecodeChannel(const PagePlan& plan, const uint8_t* page, int block, int c,
                              float* out) {
  LevelsOfChannel levels{
      plan, page + static_cast<size_t>(block) * plan.block_bytes + plan.code_offset[c], out};
  ForBits(plan.bits[c], levels);
  if (plan.raw) return;
  const int per_group = plan.group_size < kBlockTokens ? plan.group_size : kBlockTokens;
  for (int t = 0; t < kBlockTokens; t += per_group) {
    float a, z;
    LoadScale(plan, page, (block * kBlockTokens + t) / plan.group_size, c, a, z);
    // Half vectors when a group is shorter than a vector (8 tokens, 16 lanes).
    const hn::CappedTag<float, 8> d;
    for (int i = t; i < t + per_group; i += static_cast<int>(hn::MaxLanes(d))) {
      hn::StoreU(hn::MulAdd(hn::LoadU(d, out + i), hn::Set(d, a), hn::Set(d, z)), d, out + i);
    }
  }
}

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#endif  // PALU_SRC_KERNELS_DECODE_INL_H_
