// File: simd-inl.h - what the vector kernels share: tags, partial vectors, fp16.
#if defined(PALU_SRC_KERNELS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PALU_SRC_KERNELS_SIMD_INL_H_
#undef PALU_SRC_KERNELS_SIMD_INL_H_
#else
#define PALU_SRC_KERNELS_SIMD_INL_H_
#endif

#include <cstdint>
#include <cstring>
#include <type_traits>

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
// Products and weights whose largest is not above this count as zero, so that its inverse stays
// finite.
inline constexpr float kSmallest = 1e-30f;

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
#if HWY_TARGET == HWY_AVX2 || PALU_IS_AVX512(HWY_TARGET)
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

// f(n) with a constant that equals n, 1..kMost.
template <int kMost, typename F>
HWY_INLINE void ForRows(int n, const F& f) {
  if (n == kMost) {
    f(std::integral_constant<int, kMost>());
  } else if constexpr (kMost > 1) {
    ForRows<kMost - 1>(n, f);
  }
}

// f(n, first row) over all rows in passes of near equal size, at most kMost; n is a constant.
template <int kMost, typename F>
HWY_INLINE void ForPasses(int rows, const F& f) {
  const int passes = (rows + kMost - 1) / kMost;
  for (int pass = 0, row = 0; pass < passes; ++pass) {
    const int n = (rows - row) / (passes - pass);
    ForRows<kMost>(n, [&](auto constant) HWY_ATTR { f(constant, row); });
    row += n;
  }
}

HWY_INLINE int Least(int a, int b) { return a < b ? a : b; }

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

// Lane i of the result is the sum of the lanes of v[i]. The order of the additions is the same for
// every i.
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> SumsOfLanes(const VF v[4]) {
  const DF df;
  const hn::Repartition<double, DF> dd;
  // Lanes 0..3 of every 128-bit block: sums over pairs of v0, v1, v0, v1, then of v2, v3, v2, v3.
  const VF v01 = hn::Add(hn::InterleaveLower(df, v[0], v[1]), hn::InterleaveUpper(df, v[0], v[1]));
  const VF v23 = hn::Add(hn::InterleaveLower(df, v[2], v[3]), hn::InterleaveUpper(df, v[2], v[3]));
  const auto p01 = hn::BitCast(dd, v01), p23 = hn::BitCast(dd, v23);
  const VF lower = hn::BitCast(df, hn::InterleaveLower(dd, p01, p23));
  const VF upper = hn::BitCast(df, hn::InterleaveUpper(dd, p01, p23));
  return SumOfBlocks(df, hn::Add(lower, upper));
}

// Largest of the 128-bit blocks of a vector, lane by lane.
template <class D, class V>
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> MaxOfBlocks(D d, V v) {
  if constexpr (hn::MaxLanes(D()) > 4) {
    const hn::Half<D> dh;
    return MaxOfBlocks(dh, hn::Max(hn::LowerHalf(dh, v), hn::UpperHalf(dh, v)));
  } else {
    (void)d;
    return v;
  }
}

// Lane i of the result is the largest lane of v[i].
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> MaxesOfLanes(const VF v[4]) {
  const DF df;
  const hn::Repartition<double, DF> dd;
  const VF v01 = hn::Max(hn::InterleaveLower(df, v[0], v[1]), hn::InterleaveUpper(df, v[0], v[1]));
  const VF v23 = hn::Max(hn::InterleaveLower(df, v[2], v[3]), hn::InterleaveUpper(df, v[2], v[3]));
  const auto p01 = hn::BitCast(dd, v01), p23 = hn::BitCast(dd, v23);
  const VF lower = hn::BitCast(df, hn::InterleaveLower(dd, p01, p23));
  const VF upper = hn::BitCast(df, hn::InterleaveUpper(dd, p01, p23));
  return MaxOfBlocks(df, hn::Max(lower, upper));
}

// The nearest integers of values below 2^31 in magnitude, halves to even. (Highway's own also mends
// what lies beyond, at four times the cost.)
HWY_INLINE hn::Vec<hn::RebindToSigned<DF>> RoundToInt(VF v) {
  using VI = hn::Vec<hn::RebindToSigned<DF>>;
#if PALU_IS_AVX512(HWY_TARGET)
  return VI{_mm512_cvtps_epi32(v.raw)};
#elif HWY_TARGET == HWY_AVX2
  return VI{_mm256_cvtps_epi32(v.raw)};
#elif HWY_TARGET == HWY_SSE4
  return VI{_mm_cvtps_epi32(v.raw)};
#else
  return hn::NearestInt(v);
#endif
}

// The larger magnitude; so is `largest` not negative.
HWY_INLINE VF MaxAbs(VF largest, VF v) {
#if PALU_IS_AVX512(HWY_TARGET)
  return VF{_mm512_range_ps(largest.raw, v.raw, 11)};  // 3: by magnitude, 8: without its sign
#else
  return hn::Max(largest, hn::Abs(v));
#endif
}

// What four numbers whose largest magnitudes are `largest` are multiplied with to fit
// -range..range, and what an integer then stands for.
HWY_INLINE void IntegerUnits(hn::Vec<hn::CappedTag<float, 4>> largest, float range, float* inverse,
                             float* unit) {
  const hn::CappedTag<float, 4> d4;
  const auto inverses = hn::Div(hn::Set(d4, range), largest);
  hn::StoreU(hn::IfThenElseZero(hn::Gt(largest, hn::Set(d4, kSmallest)), inverses), d4, inverse);
  hn::StoreU(hn::Mul(largest, hn::Set(d4, 1.0f / range)), d4, unit);
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
