// File: decode-inl.h - channels of one block as floats.
#if defined(PALU_SRC_KERNELS_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PALU_SRC_KERNELS_DECODE_INL_H_
#undef PALU_SRC_KERNELS_DECODE_INL_H_
#else
#define PALU_SRC_KERNELS_DECODE_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/levels-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

// A run of channels of kBits bits whose scales are known: out[channel * 32 + token].
struct DecodeTask {
  const PagePlan& plan;
  const uint8_t* codes;  // of the block
  const float* a;        // of channel c, [group of the block][kLanes]
  const float* z;
  int end;
  int c;
  float* out;  // of channel c

  // Within one group.
  HWY_INLINE void Scale(int tokens) const {
    const hn::CappedTag<float, 8> d;  // a group of 8 is half an AVX-512 vector
    for (int t = 0; t < kBlockTokens; t += static_cast<int>(hn::MaxLanes(d))) {
      const int group = t / tokens;
      const auto va = hn::Set(d, a[group * kLanes]), vz = hn::Set(d, z[group * kLanes]);
      hn::StoreU(hn::MulAdd(hn::LoadU(d, out + t), va, vz), d, out + t);
    }
  }

  template <int kBits>
  HWY_INLINE void Channels() {
    const DF df;
    const VU8 table = LevelTable(plan, kBits);
    const bool one_scale = plan.raw || plan.group_size >= kBlockTokens;
    for (; c < end && plan.bits[c] == kBits; ++c, ++a, ++z, out += kBlockTokens) {
      for (int part = 0; part < kParts; ++part) {
        VF value[kVecs];
        LoadLevels<kBits>(codes + plan.code_offset[c], part, table, value);
        for (int j = 0; j < kVecs; ++j) {
          if (kBits <= 8 && one_scale) {
            value[j] = hn::MulAdd(value[j], hn::Set(df, *a), hn::Set(df, *z));
          }
          hn::StoreU(value[j], df, out + part * kPart + j * kLanes);
        }
      }
      if (!one_scale) Scale(plan.group_size);
    }
  }
};

// out[channel][token] = a_token * out + z_token for the channels [c, end) of one block.
HWY_INLINE void ApplyTokenScales(const PagePlan& plan, const uint8_t* page, int block, int c,
                                 int end, float* out) {
  const DF df;
  for (int t = 0; t < kBlockTokens; t += kLanes) {
    VF a = hn::Zero(df), z = hn::Zero(df);
    for (int k = c; k < end; ++k) {
      if (k == c || k % kRunChannels == 0) {
        LoadTokenScales(plan, page, plan.channel_runs() > 1 ? k / kRunChannels : 0,
                        block * kBlockTokens + t, a, z);
      }
      float* const value = out + (k - c) * kBlockTokens + t;
      hn::StoreU(hn::MulAdd(hn::LoadU(df, value), a, z), df, value);
    }
  }
}

// Values of channels [c, end), at most kLanes of them, of one block: out[(channel - c) * 32 +
// token]. Any group size.
HWY_INLINE void DecodeChannels(const PagePlan& plan, const uint8_t* page, int block, int c, int end,
                               float* out) {
  constexpr int kMostGroups = kBlockTokens / 8;
  alignas(64) float a[kMostGroups * kLanes], z[kMostGroups * kLanes];
  const bool token_scaled = plan.token_scaled() && !plan.raw;
  if (token_scaled) {
    hn::Store(hn::Set(DF(), 1.0f), DF(), a);
    hn::Store(hn::Zero(DF()), DF(), z);
  } else if (!plan.raw) {
    const int groups = plan.group_size < kBlockTokens ? kBlockTokens / plan.group_size : 1;
    const int first = block * kBlockTokens / plan.group_size;
    for (int g = 0; g < groups; ++g) {
      VF va, vz;
      LoadScales(plan, page, first + g, c, va, vz);
      hn::Store(va, DF(), a + g * kLanes);
      hn::Store(vz, DF(), z + g * kLanes);
    }
  }
  DecodeTask task{plan, page + static_cast<size_t>(block) * plan.block_bytes, a, z, end, c, out};
  while (task.c < end) ForBits(plan.bits[task.c], task);
  if (token_scaled) ApplyTokenScales(plan, page, block, c, end, out);
}

HWY_INLINE int Least(int a, int b) { return a < b ? a : b; }

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#endif  // PALU_SRC_KERNELS_DECODE_INL_H_
