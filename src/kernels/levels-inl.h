// File: levels-inl.h - from packed codes to vectors of levels, and from stored scales to vectors of
// a and z.
//
// A quad of channels is 128 codes per block; they are unpacked a vector of bytes at a time, which
// is one load, one shift and one mask per plane, as page_plan.h puts code j next to code j + 16 p.
// What a code means is looked up by a byte shuffle, or is the code itself.
#if defined(PALU_SRC_KERNELS_LEVELS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PALU_SRC_KERNELS_LEVELS_INL_H_
#undef PALU_SRC_KERNELS_LEVELS_INL_H_
#else
#define PALU_SRC_KERNELS_LEVELS_INL_H_
#endif

#include "codec/page_plan.h"
#include "hwy/cache_control.h"
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

inline constexpr int kBytes = static_cast<int>(hn::MaxLanes(DU8()));  // codes of a vector: 16..64
inline constexpr int kParts = kQuadCodes / kBytes;                    // vectors of a quad

#if HWY_TARGET != HWY_SSE4 && HWY_TARGET != HWY_NEON
// Right shifts of the 128-bit blocks of a vector, [plane of 1, 2, 4 bits][part][lane].
struct Shifts {
  uint32_t of[3][kParts][kBytes / 4];
};
constexpr Shifts MakeShifts() {
  Shifts shifts = {};
  for (int i = 0; i < 3; ++i) {
    const int width = 1 << i;
    for (int j = 0; j < kQuadCodes / 4; ++j) {
      shifts.of[i][j / (kBytes / 4)][j % (kBytes / 4)] =
          static_cast<uint32_t>(width * (4 * j / (16 * width)));
    }
  }
  return shifts;
}
alignas(64) inline constexpr Shifts kShifts = MakeShifts();
#endif

// The bytes of a plane of kWidth bits that hold the codes of a part, lane by lane.
template <int kWidth>
HWY_INLINE hn::Vec<DU32> LoadPlane(const uint8_t* plane, int part) {
  const DU8 du8;
  const DU32 du32;
  constexpr int kPlane = 16 * kWidth;
  if constexpr (kPlane >= kBytes) {
    return hn::BitCast(du32, hn::LoadU(du8, plane + part * kBytes % kPlane));
  } else if constexpr (kPlane == 16) {
    return hn::BitCast(du32, hn::LoadDup128(du8, plane));
  } else {
#if PALU_IS_AVX512(HWY_TARGET)
    return hn::Vec<DU32>{
        _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)))};
#else
    const hn::Half<DU8> half;
    const auto bytes = hn::LoadU(half, plane);
    return hn::BitCast(du32, hn::Combine(du8, bytes, bytes));
#endif
  }
}

// Codes of one plane for a part of the quad, kUp bits up.
template <int kWidth, int kUp>
HWY_INLINE hn::Vec<DU32> UnpackPlane(const uint8_t* plane, int part) {
  const DU32 du32;
  const auto bytes = LoadPlane<kWidth>(plane, part);
  if constexpr (kWidth == 8) {
    return bytes;
  } else {
    const auto mask = hn::Set(du32, (((1u << kWidth) - 1) << kUp) * 0x01010101u);
#if PALU_IS_AVX512(HWY_TARGET)
    if (kWidth == 4) return hn::And(part == 0 ? bytes : hn::ShiftRight<4>(bytes), mask);
    const auto shifts = hn::Load(du32, kShifts.of[kWidth / 2][part]);
    if (kUp == 0) return hn::And(hn::Shr(bytes, shifts), mask);
    // Rotating by the difference moves a code down and up at once.
    const auto rotations = hn::Sub(shifts, hn::Set(du32, kUp));
    return hn::And(hn::Vec<DU32>{_mm512_rorv_epi32(bytes.raw, rotations.raw)}, mask);
#elif HWY_TARGET == HWY_SSE4 || HWY_TARGET == HWY_NEON
    const auto codes = hn::ShiftRightSame(bytes, kWidth * (part * kBytes / (16 * kWidth)));
    return hn::And(hn::ShiftLeft<kUp>(codes), mask);
#else
    const auto codes = hn::Shr(bytes, hn::Load(du32, kShifts.of[kWidth / 2][part]));
    return hn::And(hn::ShiftLeft<kUp>(codes), mask);
#endif
  }
}

// The codes of a part of a quad of kBits bits.
template <int kBits>
HWY_INLINE VU8 UnpackCodes(const uint8_t* quad, int part) {
  const DU8 du8;
  if constexpr (kBits == 8) {
    return hn::BitCast(du8, UnpackPlane<8, 0>(quad, part));
  } else {
    constexpr int kBelow2 = kBits & 4, kBelow1 = kBits & 6;  // bits in planes of 4, and of 4 and 2
    auto code = hn::Zero(DU32());
    if constexpr ((kBits & 4) != 0) code = UnpackPlane<4, 0>(quad, part);
    if constexpr ((kBits & 2) != 0) {
      code = hn::Or(code, UnpackPlane<2, kBelow2>(quad + 16 * kBelow2, part));
    }
    if constexpr ((kBits & 1) != 0) {
      code = hn::Or(code, UnpackPlane<1, kBelow1>(quad + 16 * kBelow1, part));
    }
    return hn::BitCast(du8, code);
  }
}

// How codes become levels.
enum class LevelKind { kLloydMax, kUniform };

HWY_INLINE LevelKind LevelsOf(const PagePlan& plan, int bits) {
  return plan.scales == ScaleFormat::kLog8 && bits <= 4 ? LevelKind::kLloydMax
                                                        : LevelKind::kUniform;
}

// The level (0..255) of every code of kBits bits; unused for uniform levels.
template <int kBits, LevelKind kKind>
HWY_INLINE VU8 LevelTable() {
  const DU8 du8;
  if constexpr (kKind == LevelKind::kUniform || kBits > 4) {
    return hn::Zero(du8);
  } else {
    const auto& levels = LloydMaxLevels(kBits);
    const hn::Repartition<int8_t, DU8> di8;
    const auto table = hn::LoadDup128(di8, levels.data());
    return hn::BitCast(du8, hn::Sub(table, hn::Set(di8, levels[0])));
  }
}

// Levels of a part of a quad.
template <int kBits, LevelKind kKind>
HWY_INLINE VU8 LoadLevels(const uint8_t* quad, int part, VU8 table) {
  const VU8 codes = UnpackCodes<kBits>(quad, part);
  if constexpr (kKind == LevelKind::kUniform || kBits > 4) {
    (void)table;
    return codes;
  } else {
    return hn::TableLookupBytes(table, codes);
  }
}

// Calls task.Quads<bits, kind>(run) for a run of quads.
template <class Task>
HWY_INLINE void ForBits(const PagePlan& plan, const QuadRun& run, Task& task) {
  constexpr LevelKind kLloydMax = LevelKind::kLloydMax, kUniform = LevelKind::kUniform;
  const bool lloyd_max = LevelsOf(plan, run.bits) == kLloydMax;
  switch (run.bits) {
    case 1:
      return lloyd_max ? task.template Quads<1, kLloydMax>(run)
                       : task.template Quads<1, kUniform>(run);
    case 2:
      return lloyd_max ? task.template Quads<2, kLloydMax>(run)
                       : task.template Quads<2, kUniform>(run);
    case 3:
      return lloyd_max ? task.template Quads<3, kLloydMax>(run)
                       : task.template Quads<3, kUniform>(run);
    case 4:
      return lloyd_max ? task.template Quads<4, kLloydMax>(run)
                       : task.template Quads<4, kUniform>(run);
    case 5:
      return task.template Quads<5, kUniform>(run);
    case 6:
      return task.template Quads<6, kUniform>(run);
    case 7:
      return task.template Quads<7, kUniform>(run);
    default:
      return task.template Quads<8, kUniform>(run);
  }
}

// --- integer products ---

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

// Four integers per 128-bit block as pairs of 16 bits: lane 0 becomes (v0, v2), lane 1 (v1, v3).
HWY_INLINE VI32 PairUp(VI32 v) {
  const DI32 di32;
  const VI32 low = hn::And(v, hn::Set(di32, 0xffff));
  return hn::Or(low, hn::ShiftLeft<16>(hn::Shuffle1032(v)));
}

// Four integers per 128-bit block as bytes: lane 0 becomes (v0, v1, v2, v3).
HWY_INLINE VI32 FoursUp(VI32 v) {
  const DI32 di32;
  const VI32 byte = hn::And(v, hn::Set(di32, 0xff));
  const VI32 even_odd = hn::Or(byte, hn::ShiftLeft<16>(hn::Shuffle1032(byte)));
  return hn::Or(even_odd, hn::ShiftLeft<8>(hn::Shuffle2301(even_odd)));
}

// a and z (value = a * (level - mid) + z) of slots [s, s + kLanes) in one token group. Lanes past
// the last slot hold finite or non-finite rubbish.
HWY_INLINE void LoadScales(const PagePlan& plan, const uint8_t* page, int group, int s, VF& a,
                           VF& z) {
  const DF df;
  const uint8_t* scales = page + plan.code_bytes();
  const int i = group * plan.slots + s;
  if (plan.scales == ScaleFormat::kMinMax) {
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(scales);
    a = LoadF16(halves + i);
    z = hn::MulAdd(a, hn::Set(df, 0.5f), LoadF16(halves + plan.groups() * plan.slots + i));
  } else {
    // See Log8Value.
    const hn::RebindToUnsigned<DF> du;
    const hn::Rebind<uint8_t, DF> db;
    const auto e = hn::PromoteTo(du, hn::LoadU(db, scales + i));
    const auto bits = hn::ShiftLeft<20>(hn::Add(e, hn::Set(du, (127 - kLog8Bias) * 8)));
    a = hn::Mul(hn::BitCast(df, bits), hn::LoadU(df, plan.unit.data() + s));
    z = hn::Mul(a, hn::LoadU(df, plan.half.data() + s));
  }
}

HWY_INLINE void FetchScales(const PagePlan& plan, const uint8_t* page) {
  const uint8_t* const scales = page + plan.code_bytes();
  for (uint32_t i = 0; i < plan.scale_bytes; i += 64) hwy::Prefetch(scales + i);
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

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#endif  // PALU_SRC_KERNELS_LEVELS_INL_H_
