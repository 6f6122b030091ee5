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
#include "kernels/integers-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

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

// Whether levels are looked up by the low six bits of a byte (AVX-512 VBMI). Then the table
// repeats, and codes need no mask: what lies above their last bit does not matter.
inline constexpr bool kHasLongTables = HWY_TARGET == HWY_AVX3_DL;
template <int kBits, LevelKind kKind>
inline constexpr bool kLooksUp = kBits <= 4 && (kHasLongTables || kKind == LevelKind::kLloydMax);

// The level (0..255) of every code, over and over.
struct Levels {
  uint8_t of[64];
};
constexpr Levels MakeLevels(int bits, LevelKind kind) {
  Levels levels = {};
  for (int i = 0; i < 64; ++i) {
    const int code = i % (1 << bits);
    const auto& from = kLloydMaxLevels[bits];
    levels.of[i] = static_cast<uint8_t>(
        kind == LevelKind::kUniform ? code : from[static_cast<size_t>(code)] - from[0]);
  }
  return levels;
}
template <int kBits, LevelKind kKind>
alignas(64) inline constexpr Levels kLevels = MakeLevels(kBits, kKind);

// Levels by code, for LoadLevels; unused for levels that are their codes.
template <int kBits, LevelKind kKind>
HWY_INLINE VU8 LevelTable() {
  const DU8 du8;
  if constexpr (kLooksUp<kBits, kKind>) {
    return hn::Load(du8, kLevels<kBits, kKind>.of);
  } else {
    return hn::Zero(du8);
  }
}

#if HWY_TARGET == HWY_AVX3_DL
// The codes of a part of a quad of 1..4 bits, with other bits above them.
template <int kBits>
HWY_INLINE VU8 LooseCodes(const uint8_t* quad, int part) {
  const DU8 du8;
  const DU32 du32;
  constexpr int kWidth = kBits == 3 ? 2 : kBits;
  const auto bytes = LoadPlane<kWidth>(quad, part);
  if constexpr (kWidth == 4) {
    return hn::BitCast(du8, part == 0 ? bytes : hn::ShiftRight<4>(bytes));
  } else {
    const auto codes = hn::Shr(bytes, hn::Load(du32, kShifts.of[kWidth / 2][part]));
    if constexpr (kBits != 3) return hn::BitCast(du8, codes);
    // Rotating by the difference moves the third bit down and up at once.
    const auto rotations = hn::Sub(hn::Load(du32, kShifts.of[0][part]), hn::Set(du32, 2));
    const auto third = LoadPlane<1>(quad + 32, part);
    const hn::Vec<DU32> above{_mm512_rorv_epi32(third.raw, rotations.raw)};
    const auto low = hn::Set(du32, 0x03030303u);
    return hn::BitCast(du8, hn::Or(hn::And(low, codes), hn::AndNot(low, above)));
  }
}
#endif

// Levels of a part of a quad.
template <int kBits, LevelKind kKind>
HWY_INLINE VU8 LoadLevels(const uint8_t* quad, int part, VU8 table) {
  if constexpr (!kLooksUp<kBits, kKind>) {
    (void)table;
    return UnpackCodes<kBits>(quad, part);
  } else {
#if HWY_TARGET == HWY_AVX3_DL
    return VU8{_mm512_permutexvar_epi8(LooseCodes<kBits>(quad, part).raw, table.raw)};
#else
    return hn::TableLookupBytes(table, UnpackCodes<kBits>(quad, part));
#endif
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

// Scales of one token group of a page that belong to channels: value = a * (level - mid) + z. What
// it points to is at hand in loops whose stores a compiler takes for changes of the plan.
struct ChannelScales {
  const bool min_max;
  const uint8_t* const scales;
  const uint8_t* const zeros;
  const float* const unit;
  const float* const half;

  ChannelScales(const PagePlan& plan, const uint8_t* page, int group)
      : min_max(plan.scales == ScaleFormat::kMinMax),
        scales(page + plan.code_bytes() + group * plan.slots * (min_max ? 2 : 1)),
        zeros(scales + plan.groups() * plan.slots * 2),
        unit(plan.unit.data()),
        half(plan.half.data()) {}

  // a of slots [s, s + kLanes). Lanes past the last slot hold finite or non-finite rubbish.
  HWY_INLINE VF a(int s) const {
    const DF df;
    if (min_max) return LoadF16(reinterpret_cast<const uint16_t*>(scales) + s);
    // See Log8Value.
    const hn::RebindToUnsigned<DF> du;
    const hn::Rebind<uint8_t, DF> db;
    const auto e = hn::PromoteTo(du, hn::LoadU(db, scales + s));
    const auto bits = hn::ShiftLeft<20>(hn::Add(e, hn::Set(du, (127 - kLog8Bias) * 8)));
    return hn::Mul(hn::BitCast(df, bits), hn::LoadU(df, unit + s));
  }

  // z of the same slots, whose a is given.
  HWY_INLINE VF z(int s, VF a) const {
    const DF df;
    if (!min_max) return hn::Mul(a, hn::LoadU(df, half + s));
    const VF zero = LoadF16(reinterpret_cast<const uint16_t*>(zeros) + s);
    return hn::MulAdd(a, hn::Set(df, 0.5f), zero);
  }
};

// Whether z can be other than 0: uniform levels lie between codes.
HWY_INLINE bool HasCentres(const PagePlan& plan) {
  return !plan.runs.empty() && LevelsOf(plan, plan.runs[0].bits) == LevelKind::kUniform;
}

HWY_INLINE void LoadScales(const PagePlan& plan, const uint8_t* page, int group, int s, VF& a,
                           VF& z) {
  const ChannelScales scales(plan, page, group);
  a = scales.a(s);
  z = scales.z(s, a);
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
