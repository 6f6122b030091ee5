// File: decode-inl.h - one quad of channels of one block as floats.
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

using D4 = hn::CappedTag<float, 4>;

// to[i * to_stride + j] = from[j * from_stride + i] for i, j < 4.
HWY_INLINE void Transpose4x4(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  const D4 d;
  const auto r0 = hn::LoadU(d, from), r1 = hn::LoadU(d, from + from_stride);
  const auto r2 = hn::LoadU(d, from + 2 * from_stride), r3 = hn::LoadU(d, from + 3 * from_stride);
  const auto low02 = hn::InterleaveLower(d, r0, r2), high02 = hn::InterleaveUpper(d, r0, r2);
  const auto low13 = hn::InterleaveLower(d, r1, r3), high13 = hn::InterleaveUpper(d, r1, r3);
  hn::StoreU(hn::InterleaveLower(d, low02, low13), d, to);
  hn::StoreU(hn::InterleaveUpper(d, low02, low13), d, to + to_stride);
  hn::StoreU(hn::InterleaveLower(d, high02, high13), d, to + 2 * to_stride);
  hn::StoreU(hn::InterleaveUpper(d, high02, high13), d, to + 3 * to_stride);
}

// Levels less mid of one quad and block as floats: [lane][token] for scores, [token][lane] for
// sums.
struct LevelTask {
  const PagePlan& plan;
  const uint8_t* codes;  // of the block
  int quad;
  float* out;

  // Byte kByte of every 32-bit lane of a part.
  template <int kByte>
  HWY_INLINE void Store(hn::Vec<DU32> levels, int part, VF mid) const {
    const DF df;
    const auto byte = hn::And(hn::ShiftRight<8 * kByte>(levels), hn::Set(DU32(), 0xff));
    const VF level = hn::Sub(hn::ConvertTo(df, hn::BitCast(DI32(), byte)), mid);
    if (plan.order == CodeOrder::kForScores) {
      hn::Store(level, df, out + kByte * kBlockTokens + part * kLanes);
      return;
    }
    // 128-bit block i of a part is tokens 4 (part * blocks + i) .. + 3; this is token kByte of
    // them.
    alignas(64) float lanes[kLanes];
    hn::Store(level, df, lanes);
    for (int i = 0; i < kLanes / 4; ++i) {
      const int token = 4 * (part * (kLanes / 4) + i) + kByte;
      std::memcpy(out + token * kQuad, lanes + 4 * i, 4 * sizeof(float));
    }
  }

  template <int kBits, LevelKind kKind>
  HWY_INLINE void Quads(const QuadRun& run) {
    const VU8 table = LevelTable<kBits, kKind>();
    const uint8_t* const from =
        codes + run.offset + static_cast<size_t>(quad - run.first) * 16 * kBits;
    const VF mid = hn::Set(DF(), plan.mid[static_cast<size_t>(run.first * kQuad)]);
    for (int part = 0; part < kParts; ++part) {
      const auto levels = hn::BitCast(DU32(), LoadLevels<kBits, kKind>(from, part, table));
      Store<0>(levels, part, mid);
      Store<1>(levels, part, mid);
      Store<2>(levels, part, mid);
      Store<3>(levels, part, mid);
    }
  }
};

// Out of line, as are the scales: all bits of all kinds are long to compile, and a call is little
// beside 128 values.
HWY_NOINLINE HWY_MAYBE_UNUSED void QuadLevels(const PagePlan& plan, const uint8_t* page, int block,
                                              int quad, float* out) {
  LevelTask task{plan, page + static_cast<size_t>(block) * plan.block_bytes, quad, out};
  ForBits(plan, plan.run_of(quad * kQuad), task);
}

// x[lane][token] = a * x + z for one quad of a block, whatever the scales belong to.
HWY_NOINLINE HWY_MAYBE_UNUSED void ApplyScales(const PagePlan& plan, const uint8_t* page, int block,
                                               int quad, float* x) {
  const hn::CappedTag<float, 8> d;  // a group of 8 is half an AVX-512 vector
  const DF df;
  alignas(64) float a[kBlockTokens], z[kBlockTokens];
  for (int l = 0; l < kQuad; ++l, x += kBlockTokens) {
    const int c = plan.channel[quad * kQuad + l];
    if (c < 0) continue;
    if (plan.token_scaled()) {
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        VF va, vz;
        LoadTokenScales(plan, page, plan.channel_runs() > 1 ? c / kRunChannels : 0,
                        block * kBlockTokens + t, va, vz);
        hn::Store(hn::MulAdd(hn::Load(df, x + t), va, vz), df, x + t);
      }
      continue;
    }
    for (int t = 0; t < kBlockTokens;) {
      const int group = (block * kBlockTokens + t) / plan.group_size;
      VF va, vz;
      LoadScales(plan, page, group, quad * kQuad, va, vz);
      hn::Store(va, df, a);
      hn::Store(vz, df, z);
      const auto scale = hn::Set(d, a[l]), zero = hn::Set(d, z[l]);
      const int end = t + plan.group_size < kBlockTokens ? t + plan.group_size : kBlockTokens;
      for (; t < end; t += static_cast<int>(hn::MaxLanes(d))) {
        hn::StoreU(hn::MulAdd(hn::LoadU(d, x + t), scale, zero), d, x + t);
      }
    }
  }
}

// Values of one quad and block, [lane][token]; empty slots hold rubbish. out: on a cache line.
HWY_INLINE void DecodeQuad(const PagePlan& plan, const uint8_t* page, int block, int quad,
                           float* out) {
  if (plan.order == CodeOrder::kForScores) {
    QuadLevels(plan, page, block, quad, out);
  } else {
    alignas(64) float tokens[kQuadCodes];
    QuadLevels(plan, page, block, quad, tokens);
    for (int t = 0; t < kBlockTokens; t += 4) {
      Transpose4x4(tokens + t * kQuad, kQuad, out + t, kBlockTokens);
    }
  }
  ApplyScales(plan, page, block, quad, out);
}

// The same as [token][lane].
HWY_INLINE void DecodeQuadTokens(const PagePlan& plan, const uint8_t* page, int block, int quad,
                                 float* out) {
  if (plan.order == CodeOrder::kForSums && !plan.token_scaled() &&
      plan.group_size >= kBlockTokens) {
    const DF df;
    VF a, z;
    alignas(64) float scale[kLanes], zero[kLanes];
    LoadScales(plan, page, block * kBlockTokens / plan.group_size, quad * kQuad, a, z);
    hn::Store(a, df, scale);
    hn::Store(z, df, zero);
    a = hn::LoadDup128(df, scale), z = hn::LoadDup128(df, zero);
    QuadLevels(plan, page, block, quad, out);
    for (int i = 0; i < kQuadCodes; i += kLanes) {
      hn::Store(hn::MulAdd(hn::Load(df, out + i), a, z), df, out + i);
    }
    return;
  }
  alignas(64) float channels[kQuadCodes];
  DecodeQuad(plan, page, block, quad, channels);
  for (int t = 0; t < kBlockTokens; t += 4) {
    Transpose4x4(channels + t, kBlockTokens, out + t * kQuad, kQuad);
  }
}

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#endif  // PALU_SRC_KERNELS_DECODE_INL_H_
