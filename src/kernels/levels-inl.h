// File: levels-inl.h - from packed codes to vectors of levels, and from stored scales to vectors of
// a and z.
//
// Codes are unpacked as bytes, kPart tokens at a time: a plane is loaded so that every 32-bit lane
// holds the bytes of its four tokens, one variable shift moves their codes down, and a mask cuts
// them out. That is why page_plan.h puts tokens 4 p apart into one byte. A byte shuffle then looks
// the level up.
#if defined(PALU_SRC_KERNELS_LEVELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PALU_SRC_KERNELS_LEVELS_INL_H_
#undef PALU_SRC_KERNELS_LEVELS_INL_H_
#else
#define PALU_SRC_KERNELS_LEVELS_INL_H_
#endif

#include "codec/page_plan.h"
#include "hwy/highway.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

using DU8 = hn::CappedTag<uint8_t, kBlockTokens>;
using DI8 = hn::RebindToSigned<DU8>;
using DU32 = hn::Repartition<uint32_t, DU8>;
using VU8 = hn::Vec<DU8>;

inline constexpr int kPart =
    static_cast<int>(hn::MaxLanes(DU8()));  // tokens per byte vector: 16 or 32
inline constexpr int kParts = kBlockTokens / kPart;
inline constexpr int kVecs = kPart / kLanes;  // float vectors per part

// Right shift of 32-bit lane i (tokens 4 i .. 4 i + 3) of a plane of 1, 2 and 4 bits.
alignas(32) inline constexpr uint32_t kShifts[3][8] = {
    {0, 1, 2, 3, 4, 5, 6, 7}, {0, 0, 2, 2, 4, 4, 6, 6}, {0, 0, 0, 0, 4, 4, 4, 4}};

// Codes of one plane of kWidth bits for the tokens of a part.
template <int kWidth>
HWY_INLINE hn::Vec<DU32> UnpackPlane(const uint8_t* plane, int part) {
  const DU8 du8;
  const DU32 du32;
  const hn::Repartition<uint64_t, DU8> du64;
  hn::Vec<DU32> bytes;
  if constexpr (kWidth == 8) {
    return hn::BitCast(du32, hn::LoadU(du8, plane + part * kPart));
  } else if constexpr (kWidth == 4) {
    bytes = hn::BitCast(du32, hn::LoadDup128(du8, plane));
  } else if constexpr (kWidth == 2) {
    bytes = hn::BitCast(du32, hn::Set(du64, LoadScalar<uint64_t>(plane)));
  } else {
    bytes = hn::Set(du32, LoadScalar<uint32_t>(plane));
  }
  constexpr uint32_t kMask = ((1u << kWidth) - 1) * 0x01010101u;
  const auto shifts = hn::Load(du32, kShifts[kWidth / 2] + part * (kPart / 4));
  return hn::And(hn::Shr(bytes, shifts), hn::Set(du32, kMask));
}

// The codes of one channel of kBits bits for the tokens of a part.
template <int kBits>
HWY_INLINE VU8 UnpackCodes(const uint8_t* codes, int part) {
  const DU8 du8;
  const DU32 du32;
  if constexpr (kBits == 8) return hn::BitCast(du8, UnpackPlane<8>(codes, part));
  constexpr int kBelow2 = kBits & 4, kBelow1 = kBits & 6;  // bits in planes of 4, and of 4 and 2
  auto code = hn::Zero(du32);
  if constexpr ((kBits & 4) != 0) code = UnpackPlane<4>(codes, part);
  if constexpr ((kBits & 2) != 0) {
    const auto plane = UnpackPlane<2>(codes + 4 * kBelow2, part);
    code = hn::Or(code, hn::ShiftLeft<kBelow2>(plane));
  }
  if constexpr ((kBits & 1) != 0) {
    const auto plane = UnpackPlane<1>(codes + 4 * kBelow1, part);
    code = hn::Or(code, hn::ShiftLeft<kBelow1>(plane));
  }
  return hn::BitCast(du8, code);
}

// Widens signed bytes to floats, in order.
template <class D, class V>
HWY_INLINE void ToFloats(D, V levels, VF* out) {
  constexpr int kCount = static_cast<int>(hn::MaxLanes(D()));
  if constexpr (kCount == kLanes) {
    const DF df;
    const hn::RebindToSigned<DF> di;
    out[0] = hn::ConvertTo(df, hn::PromoteTo(di, levels));
  } else {
    const hn::Half<D> dh;
    ToFloats(dh, hn::LowerHalf(dh, levels), out);
    ToFloats(dh, hn::UpperHalf(dh, levels), out + kCount / kLanes / 2);
  }
}

// The level of every code of up to 4 bits; unused for more.
HWY_INLINE VU8 LevelTable(const PagePlan& plan, int bits) {
  const DU8 du8;
  if (bits > 4) return hn::Zero(du8);
  const auto& levels =
      plan.scales == ScaleFormat::kLog8 ? LloydMaxLevels(bits) : UniformLevels(bits);
  return hn::LoadDup128(du8, reinterpret_cast<const uint8_t*>(levels.data()));
}

// Levels of one channel for the tokens of a part; for 16 and 32 bits the values themselves.
template <int kBits>
HWY_INLINE void LoadLevels(const uint8_t* codes, int part, VU8 table, VF* out) {
  const DU8 du8;
  const DF df;
  if constexpr (kBits == 32) {
    const float* from = reinterpret_cast<const float*>(codes) + part * kPart;
    for (int j = 0; j < kVecs; ++j) out[j] = hn::LoadU(df, from + j * kLanes);
  } else if constexpr (kBits == 16) {
    const uint16_t* from = reinterpret_cast<const uint16_t*>(codes) + part * kPart;
    for (int j = 0; j < kVecs; ++j) out[j] = LoadF16(from + j * kLanes);
  } else {
    VU8 levels = UnpackCodes<kBits>(codes, part);
    if constexpr (kBits <= 4) {
      levels = hn::TableLookupBytes(table, levels);
    } else {
      levels = hn::Sub(levels, hn::Set(du8, 1 << (kBits - 1)));
    }
    ToFloats(DI8(), hn::BitCast(DI8(), levels), out);
  }
}

// a and z (value = a * level + z) of channels [c, c + kLanes) in one token group. Lanes past the
// last channel hold finite or non-finite rubbish.
HWY_INLINE void LoadScales(const PagePlan& plan, const uint8_t* page, int group, int c, VF& a,
                           VF& z) {
  const DF df;
  const uint8_t* scales = page + plan.code_bytes();
  const int i = group * plan.rank + c;
  if (plan.scales == ScaleFormat::kMinMax) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(scales);
    a = LoadF16(halves + i);
    z = hn::MulAdd(a, hn::Set(df, 0.5f), LoadF16(halves + plan.groups() * plan.rank + i));
  } else {
    // See Log8Value.
    const hn::RebindToUnsigned<DF> du;
    const hn::Rebind<uint8_t, DF> db;
    const auto e = hn::PromoteTo(du, hn::LoadU(db, scales + i));
    const auto bits = hn::ShiftLeft<20>(hn::Add(e, hn::Set(du, (127 - kLog8Bias) * 8)));
    a = hn::Mul(hn::BitCast(df, bits), hn::LoadU(df, plan.unit.data() + c));
    z = hn::Mul(a, hn::LoadU(df, plan.half.data() + c));
  }
}

// a and z of kLanes tokens from token t of the page on, for a format whose scales belong to tokens.
HWY_INLINE void LoadTokenScales(const PagePlan& plan, const uint8_t* page, int run, int t, VF& a,
                                VF& z) {
  const DF df;
  const VF half = hn::Set(df, 0.5f);
  const uint8_t* scales = page + plan.code_bytes();
  if (plan.scales == ScaleFormat::kTokenMinMax) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(scales);
    const int i = run * plan.page_tokens + t;
    a = LoadF16(halves + i);
    z = hn::MulAdd(a, half, LoadF16(halves + plan.channel_runs() * plan.page_tokens + i));
  } else if (plan.scales == ScaleFormat::kTokenAbsMax) {
    a = LoadF16(reinterpret_cast<const uint16_t*>(scales) + run * plan.page_tokens + t);
    z = hn::Zero(df);
  } else {
    const float* factors = reinterpret_cast<const float*>(scales);
    a = hn::Mul(hn::LoadU(df, factors + t), hn::LoadU(df, factors + plan.page_tokens + t));
    z = hn::Mul(a, half);
  }
}

// Calls task.Channels<bits>() for bits known only at run time.
template <class Task>
HWY_INLINE void ForBits(int bits, Task& task) {
  switch (bits) {
    case 1:
      return task.template Channels<1>();
    case 2:
      return task.template Channels<2>();
    case 3:
      return task.template Channels<3>();
    case 4:
      return task.template Channels<4>();
    case 5:
      return task.template Channels<5>();
    case 6:
      return task.template Channels<6>();
    case 7:
      return task.template Channels<7>();
    case 8:
      return task.template Channels<8>();
    case 16:
      return task.template Channels<16>();
    default:
      return task.template Channels<32>();
  }
}

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#endif  // PALU_SRC_KERNELS_LEVELS_INL_H_
