// File: simd-inl.h - what the vector kernels share: tags, partial vectors, fp16.
#if defined(PALU_SRC_KERNELS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PALU_SRC_KERNELS_SIMD_INL_H_
#undef PALU_SRC_KERNELS_SIMD_INL_H_
#else
#define PALU_SRC_KERNELS_SIMD_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/targets.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;
inline constexpr int kLanes = hn::MaxLanes(DF());

template <typename T>
HWY_INLINE T LoadScalar(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

// The first n (1..kLanes) of a vector; the rest is zero and not read.
HWY_INLINE VF LoadFirst(const float* from, int64_t n) {
  const DF df;
  if (n >= kLanes) return hn::LoadU(df, from);
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3
  return hn::MaskedLoad(hn::FirstN(df, static_cast<size_t>(n)), df, from);
#else  // elsewhere a masked load is a full load and a select
  alignas(64) float lanes[kLanes] = {};
  std::memcpy(lanes, from, static_cast<size_t>(n) * sizeof(float));
  return hn::Load(df, lanes);
#endif
}

// Writes the first n (1..kLanes) lanes, nothing else.
HWY_INLINE void StoreFirst(VF v, float* to, int64_t n) {
  const DF df;
  if (n >= kLanes) {
    hn::StoreU(v, df, to);
    return;
  }
  alignas(64) float lanes[kLanes];
  hn::Store(v, df, lanes);
  std::memcpy(to, lanes, static_cast<size_t>(n) * sizeof(float));
}

// Sum of the 128-bit blocks of a vector, halves first.
template <class D, class V>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> SumOfBlocks(D d, V v) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> dh;
    return SumOfBlocks(dh, hn::Add(hn::LowerHalf(dh, v), hn::UpperHalf(dh, v)));
  } else {
    (void)d;
    return v;
  }
}

// fp16 -> f32, exact. Highway's own SSE4 version does not know Inf and NaN.
HWY_INLINE VF LoadF16(const uint16_t* from) {
  const DF df;
#if HWY_TARGET == HWY_SSE4
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<uint16_t, DF> dh;
  const auto h = hn::PromoteTo(du, hn::LoadU(dh, from));
  // Exponent and mantissa in place, then times 2^112 for the difference of the biases: subnormals
  // come out right.
  const auto magnitude = hn::ShiftLeft<13>(hn::And(h, hn::Set(du, 0x7fff)));
  auto bits = hn::BitCast(du, hn::Mul(hn::BitCast(df, magnitude), hn::Set(df, 0x1p112f)));
  const auto special = hn::Gt(h & hn::Set(du, 0x7fff), hn::Set(du, 0x7bff));
  bits = hn::Or(bits, hn::IfThenElseZero(special, hn::Set(du, 0x7f800000)));
  return hn::BitCast(df, hn::Or(bits, hn::ShiftLeft<16>(hn::And(h, hn::Set(du, 0x8000)))));
#else
  const hn::Rebind<hwy::float16_t, DF> dh;
  const hn::Rebind<uint16_t, DF> du;
  return hn::PromoteTo(df, hn::BitCast(dh, hn::LoadU(du, from)));
#endif
}

// f32 -> fp16, round to nearest even; beyond 65504 becomes infinity. Highway's own SSE4 version
// truncates.
HWY_INLINE void StoreF16(VF v, uint16_t* to) {
  const hn::Rebind<uint16_t, DF> dh;
#if HWY_TARGET == HWY_SSE4
  const DF df;
  const hn::RebindToUnsigned<DF> du;
  const hn::RebindToSigned<DF> di;
  const auto bits = hn::BitCast(du, v);
  const auto magnitude = hn::And(bits, hn::Set(du, 0x7fffffff));
  // Subnormal halves: adding 0.5 puts their last bit at the last bit of the mantissa, so the
  // addition rounds.
  const auto half = hn::Set(df, 0.5f);
  const auto small =
      hn::Sub(hn::BitCast(du, hn::Add(hn::BitCast(df, magnitude), half)), hn::BitCast(du, half));
  const auto odd = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(du, 1));
  const auto rebiased = hn::Add(hn::Sub(magnitude, hn::Set(du, 0x38000000)), hn::Set(du, 0xfff));
  const auto normal = hn::ShiftRight<13>(hn::Add(rebiased, odd));
  auto h = hn::IfThenElse(hn::Lt(magnitude, hn::Set(du, 0x38800000)), small, normal);
  h = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x477fefff)), hn::Set(du, 0x7c00), h);
  h = hn::IfThenElse(hn::Gt(magnitude, hn::Set(du, 0x7f800000)), hn::Set(du, 0x7e00), h);
  h = hn::Or(h, hn::ShiftRight<16>(hn::And(bits, hn::Set(du, 0x80000000))));
  hn::StoreU(hn::DemoteTo(dh, hn::BitCast(di, h)), dh, to);
#else
  const hn::Rebind<hwy::float16_t, DF> df16;
  hn::StoreU(hn::BitCast(dh, hn::DemoteTo(df16, v)), dh, to);
#endif
}

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#endif  // PALU_SRC_KERNELS_SIMD_INL_H_
