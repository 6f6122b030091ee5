// File: integers-inl.h - integer vectors: products of 16 and 8 bits, and how their operands are
// packed.
#if defined(PALU_SRC_KERNELS_INTEGERS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PALU_SRC_KERNELS_INTEGERS_INL_H_
#undef PALU_SRC_KERNELS_INTEGERS_INL_H_
#else
#define PALU_SRC_KERNELS_INTEGERS_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

using DU8 = hn::ScalableTag<uint8_t>;
using DU16 = hn::Repartition<uint16_t, DU8>;
using DU32 = hn::Repartition<uint32_t, DU8>;
using DI16 = hn::RebindToSigned<DU16>;
using DI32 = hn::RebindToSigned<DU32>;
using VU8 = hn::Vec<DU8>;
using VI16 = hn::Vec<DI16>;
using VI32 = hn::Vec<DI32>;

// sum += a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] in every 32-bit lane i.
HWY_INLINE VI32 AddPairs(VI32 sum, VI16 a, VI16 b) {
#if HWY_TARGET == HWY_AVX3_DL
  // In assembly, as Highway has no name for it; it takes the place of two instructions.
  asm("vpdpwssd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
  return sum;
#else
  const DI32 di32;
#if HWY_TARGET == HWY_NEON
  // There the products of the upper half come apart and in no pairs.
  VI32 upper = hn::Zero(di32);
  const VI32 lower = hn::ReorderWidenMulAccumulate(di32, a, b, hn::Zero(di32), upper);
  return hn::Add(sum, hn::RearrangeToOddPlusEven(lower, upper));
#else
  VI32 unused = hn::Zero(di32);
  return hn::ReorderWidenMulAccumulate(di32, a, b, sum, unused);
#endif
#endif
}

// Whether this target has products of four bytes at a time.
inline constexpr bool kHasByteProducts = HWY_TARGET == HWY_AVX3_DL;

// sum += the products of four levels (unsigned) and four bytes (signed) in every 32-bit lane.
HWY_INLINE VI32 AddFours(VI32 sum, VU8 levels, VU8 bytes) {
#if HWY_TARGET == HWY_AVX3_DL
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(levels.raw), "v"(bytes.raw));
#else
  (void)levels;
  (void)bytes;
#endif
  return sum;
}

// Levels 0 and 2 of every 32-bit lane as 16-bit numbers, and levels 1 and 3.
HWY_INLINE VI16 EvenLevels(VU8 levels) {
  const DU16 du16;
  return hn::BitCast(DI16(), hn::And(hn::BitCast(du16, levels), hn::Set(du16, 0x00ff)));
}
HWY_INLINE VI16 OddLevels(VU8 levels) {
  return hn::BitCast(DI16(), hn::ShiftRight<8>(hn::BitCast(DU16(), levels)));
}

// Bytes of every 128-bit block of v in the order that sixteen byte indices say; 0x80 gives zero.
template <uint8_t... kFrom>
HWY_INLINE VI32 PickBytes(VI32 v) {
  static_assert(sizeof...(kFrom) == 16);
  const DU8 du8;
  alignas(16) static constexpr uint8_t kBytesFrom[16] = {kFrom...};
  const auto from = hn::LoadDup128(du8, kBytesFrom);
  return hn::BitCast(DI32(), hn::TableLookupBytesOr0(hn::BitCast(du8, v), from));
}

// Four integers v0..v3 per 128-bit block become (v0, v2), (v1, v3), 0, 0 in 16 bits each.
HWY_INLINE VI32 PairUp(VI32 v) {
  return PickBytes<0, 1, 8, 9, 4, 5, 12, 13, 128, 128, 128, 128, 128, 128, 128, 128>(v);
}

// Every lane becomes (v0, v2), or (v1, v3).
HWY_INLINE VI32 EvenPairs(VI32 v) {
  return PickBytes<0, 1, 8, 9, 0, 1, 8, 9, 0, 1, 8, 9, 0, 1, 8, 9>(v);
}
HWY_INLINE VI32 OddPairs(VI32 v) {
  return PickBytes<4, 5, 12, 13, 4, 5, 12, 13, 4, 5, 12, 13, 4, 5, 12, 13>(v);
}

// They become (v0, v1, v2, v3), 0, 0, 0 in 8 bits each.
HWY_INLINE VI32 FoursUp(VI32 v) {
  return PickBytes<0, 4, 8, 12, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128>(v);
}

// Every lane becomes (v0, v1, v2, v3).
HWY_INLINE VI32 AllFours(VI32 v) {
  return PickBytes<0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12>(v);
}

// Integers v + 128, |v| <= kMostSplit, become their upper bytes, rounded, then lower bytes, as in
// FoursUp, each signed: v = 256 upper + lower.
inline constexpr int kMostSplit = 127 * 256 + 127;
HWY_INLINE VI32 SplitUp(VI32 v_plus_128) {
  const VI32 bytes =
      PickBytes<1, 5, 9, 13, 0, 4, 8, 12, 128, 128, 128, 128, 128, 128, 128, 128>(v_plus_128);
  alignas(16) static constexpr uint32_t kLower[4] = {0, 0x80808080u, 0, 0};
  return hn::Xor(bytes, hn::BitCast(DI32(), hn::LoadDup128(DU32(), kLower)));
}

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#endif  // PALU_SRC_KERNELS_INTEGERS_INL_H_
