// Packs latents into a page: scale per (channel, token group), nearest codes, bit planes.
//
// All targets write the same bytes as the reference: the few float operations that decide them (max
// - min, divisions, the partial sums of squares) are done in the same order and precision
// everywhere, and none of them is a rounded product followed by a sum that a compiler could fuse.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/encode.cc"
// clang-format off
#include "kernels/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/fp16.h"
#include "kernels/encode_scalar.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

using D8F = hn::CappedTag<float, 8>;  // group sizes are multiples of 8
constexpr int kLanes8 = static_cast<int>(hn::MaxLanes(D8F()));

HWY_INLINE void MinMax(const float* x, int n, float& min, float& max) {
  const D8F d;
  auto low = hn::LoadU(d, x), high = low;
  for (int i = kLanes8; i < n; i += kLanes8) {
    const auto v = hn::LoadU(d, x + i);
    low = hn::Min(low, v);
    high = hn::Max(high, v);
  }
  min = hn::GetLane(hn::MinOfLanes(d, low));
  max = hn::GetLane(hn::MaxOfLanes(d, high));
}

// Eight partial sums of the squares of map(x[i]), in double: the products are exact.
template <class Map>
HWY_INLINE void SumSquares(const float* x, int n, const Map& map, double* partial) {
  const hn::CappedTag<double, 8> dd;
  const hn::Rebind<float, decltype(dd)> df;
  constexpr int kDoubles = static_cast<int>(hn::MaxLanes(dd));
  for (int j = 0; j < 8; j += kDoubles) {
    auto sum = hn::Zero(dd);
    for (int i = j; i < n; i += 8) {
      const auto v = hn::PromoteTo(dd, map(df, hn::LoadU(df, x + i)));
      sum = hn::MulAdd(v, v, sum);
    }
    hn::Store(sum, dd, partial + j);
  }
}

HWY_INLINE float RootMeanSquare(const float* x, int n) {
  alignas(64) double partial[8];
  SumSquares(
      x, n, [](auto, auto v) { return v; }, partial);
  double sum = 0;
  for (const double s : partial) sum += s;
  return static_cast<float>(std::sqrt(sum / n));
}

// Lloyd-Max levels of some bits as floats, and what lies halfway between them: a value above
// between[i] has a code above i.
struct Levels {
  float level[16], between[15];

  explicit Levels(int bits) {
    const auto& levels = LloydMaxLevels(bits);
    const int last = (1 << bits) - 1;
    for (int i = 0; i <= last; ++i) level[i] = levels[i];
    for (int i = 0; i < last; ++i) between[i] = 0.5f * (level[i] + level[i + 1]);
  }
};

// Sum of the squared errors of n values under log8 with level unit a; see the reference. lloyd_max:
// up to 4 bits.
template <int kBits>
HWY_INLINE double SquaredError(const Levels* lloyd_max, float a, const float* x, int n) {
  constexpr int kHalf = 1 << (kBits - 1);
  const auto error = [=](auto d, auto v) HWY_ATTR {
    const auto y = hn::Div(hn::Abs(v), hn::Set(d, a));
    if constexpr (kBits > 4) {
      const auto below = hn::Floor(hn::Min(y, hn::Set(d, static_cast<float>(kHalf - 1))));
      return hn::Sub(y, hn::Add(below, hn::Set(d, 0.5f)));
    } else {
      auto level = hn::Set(d, lloyd_max->level[kHalf]);
      for (int i = kHalf; i + 1 < 2 * kHalf; ++i) {
        const auto above = hn::Gt(y, hn::Set(d, lloyd_max->between[i]));
        level = hn::IfThenElse(above, hn::Set(d, lloyd_max->level[i + 1]), level);
      }
      return hn::Sub(y, level);
    }
  };
  alignas(64) double partial[8];
  SumSquares(x, n, error, partial);
  const double sum = ((partial[0] + partial[4]) + (partial[2] + partial[6])) +
                     ((partial[1] + partial[5]) + (partial[3] + partial[7]));
  return static_cast<double>(a) * a * sum;
}

// The log8 scale of least squared error among the candidates; see the reference.
template <int kBits>
HWY_INLINE uint8_t BestLog8(const Levels* lloyd_max, const float* x, int n) {
  float anchor;
  if (Log8FollowsRms(kBits)) {
    anchor = RootMeanSquare(x, n);
  } else {
    float min, max;
    MinMax(x, n, min, max);
    anchor = std::max(-min, max);
  }
  const auto [first, last] = CandidatesAround(kBits, anchor);
  int best = first;
  double least = std::numeric_limits<double>::infinity();
  for (int e = first; e <= last; ++e) {
    const float a = Log8Value(static_cast<uint8_t>(e)) * Log8Unit(kBits);
    const double error = SquaredError<kBits>(lloyd_max, a, x, n);
    best = error < least ? e : best;
    least = error < least ? error : least;
  }
  return static_cast<uint8_t>(best);
}

HWY_NOINLINE uint8_t BestLog8(int bits, const Levels* lloyd_max, const float* x, int n) {
  constexpr decltype(&BestLog8<1>) kBest[9] = {nullptr,     BestLog8<1>, BestLog8<2>,
                                               BestLog8<3>, BestLog8<4>, BestLog8<5>,
                                               BestLog8<6>, BestLog8<7>, BestLog8<8>};
  return kBest[bits](lloyd_max, x, n);
}

// value = step * (code as a level) + offset, as the stored scale gives it.
struct Step {
  float step, offset;
};

HWY_INLINE Step WriteScale(const PagePlan& plan, const Levels* lloyd_max, const float* x, int group,
                           int channel, uint8_t* page) {
  uint8_t* scales = page + plan.code_bytes();
  const int slot = plan.slot[channel];
  const int i = group * plan.slots + slot, n = plan.group_size;
  if (plan.scales == ScaleFormat::kMinMax) {
    float min, max;
    MinMax(x, n, min, max);
    const float steps = static_cast<float>((1 << plan.bits[channel]) - 1);
    const uint16_t scale = SaturatedF16((max - min) / steps);
    const uint16_t zero = SaturatedF16((min * 0.5f + max * 0.5f) + 0.0f);  // never -0
    std::memcpy(scales + 2 * i, &scale, 2);
    std::memcpy(scales + 2 * (plan.groups() * plan.slots + i), &zero, 2);
    return {F16ToF32(scale), F16ToF32(zero)};
  }
  scales[i] = BestLog8(plan.bits[channel], lloyd_max, x, n);
  return {Log8Value(scales[i]) * plan.unit[slot], 0.0f};
}

// codes[t] = nearest code of x[t], n a multiple of 8. lloyd_max: null for uniform levels.
HWY_INLINE void NearestCodes(int bits, const Levels* lloyd_max, Step step, const float* x, int n,
                             uint8_t* codes) {
  const D8F df;
  const hn::RebindToSigned<D8F> di;
  const hn::Rebind<uint8_t, D8F> db;
  const int last = (1 << bits) - 1;
  const auto offset = hn::Set(df, step.offset);
  // A group without range (step 0) gets the middle code everywhere.
  const auto divisor =
      hn::Set(df, step.step == 0 ? std::numeric_limits<float>::infinity() : step.step);
  const auto middle = hn::Set(df, 0.5f * static_cast<float>(last));
  const auto highest = hn::Set(df, static_cast<float>(last));
  for (int t = 0; t < n; t += kLanes8) {
    const auto y = hn::Div(hn::Sub(hn::LoadU(df, x + t), offset), divisor);
    auto code = hn::Zero(di);
    if (lloyd_max != nullptr) {
      for (int i = 0; i < last; ++i) {
        const auto above = hn::Gt(y, hn::Set(df, lloyd_max->between[i]));
        code = hn::Sub(code, hn::BitCast(di, hn::VecFromMask(df, above)));
      }
    } else {
      const auto clamped = hn::Min(hn::Max(hn::Add(y, middle), hn::Zero(df)), highest);
      code = hn::NearestInt(clamped);
    }
    hn::StoreU(hn::DemoteTo(db, code), db, codes + t);
  }
}

// Cuts the 128 codes of a quad into planes; the inverse of UnpackCodes. Bytes of a 64-bit word are
// eight codes in order.
HWY_INLINE void PackCodes(const uint8_t* codes, int bits, uint8_t* to) {
  constexpr int kWords = kQuadCodes / 8;
  uint64_t w[kWords];
  std::memcpy(w, codes, sizeof(w));
  for (int width = 8; width > 0; width /= 2) {
    if ((bits & width) == 0) continue;
    const int plane_words = 2 * width;
    const uint64_t mask = ((1ull << width) - 1) * 0x0101010101010101;
    uint64_t plane[kWords] = {};
    for (int i = 0; i < kWords; ++i) {
      plane[i % plane_words] |= (w[i] & mask) << (width * (i / plane_words));
      // The mask of the next plane cuts off what comes in from the byte above.
      w[i] >>= width;
    }
    std::memcpy(to, plane, static_cast<size_t>(plane_words) * 8);
    to += plane_words * 8;
  }
}

HWY_INLINE void EncodeRaw(const float* x, int bits, uint8_t* to) {
  if (bits == 32) {
    std::memcpy(to, x, kBlockTokens * sizeof(float));
    return;
  }
  const DF df;
  const VF limit = hn::Set(df, kMaxF16);
  for (int t = 0; t < kBlockTokens; t += kLanes) {
    const VF v = hn::Clamp(hn::LoadU(df, x + t), hn::Neg(limit), limit);
    StoreF16(v, reinterpret_cast<uint16_t*>(to) + t);
  }
}

// Codes of one quad and block in order. codes: [lane][token].
HWY_INLINE void PackQuad(const PagePlan& plan, const uint8_t* codes, int bits, uint8_t* to) {
  alignas(64) uint8_t ordered[kQuadCodes];
  for (int l = 0; l < kQuad; ++l) {
    for (int t = 0; t < kBlockTokens; ++t) {
      ordered[plan.CodePlace(l, t)] = codes[l * kBlockTokens + t];
    }
  }
  PackCodes(ordered, bits, to);
}

// One quad of all blocks of a page.
HWY_INLINE void EncodeQuad(const PagePlan& plan, const QuadRun& run, int quad,
                           const Levels* lloyd_max, const float* x, int64_t x_stride,
                           uint8_t* page) {
  constexpr int kMostBlocks = 4;
  const int per_step = plan.group_size < kBlockTokens ? plan.group_size : kBlockTokens;
  alignas(64) uint8_t codes[kMostBlocks * kQuadCodes] = {};
  for (int l = 0; l < kQuad; ++l) {
    const int c = plan.channel[quad * kQuad + l];
    if (c < 0) continue;
    Step step{};
    for (int t = 0; t < plan.page_tokens; t += per_step) {
      const float* const values = x + c * x_stride + t;
      if (t % plan.group_size == 0) {
        step = WriteScale(plan, lloyd_max, values, t / plan.group_size, c, page);
      }
      NearestCodes(run.bits, lloyd_max, step, values, per_step,
                   codes + t / kBlockTokens * kQuadCodes + l * kBlockTokens + t % kBlockTokens);
    }
  }
  uint8_t* to = page + run.offset + static_cast<size_t>(quad - run.first) * 16 * run.bits;
  for (int block = 0; block < plan.blocks(); ++block, to += plan.block_bytes) {
    PackQuad(plan, codes + block * kQuadCodes, run.bits, to);
  }
}

void EncodePage(const PagePlan& plan, const float* x, int64_t x_stride, uint8_t* page) {
  if (plan.raw) {
    for (int c = 0; c < plan.rank; ++c) {
      uint8_t* to = page + plan.raw_offset(c);
      for (int t = 0; t < plan.page_tokens; t += kBlockTokens, to += plan.block_bytes) {
        EncodeRaw(x + c * x_stride + t, plan.bits[0], to);
      }
    }
    return;
  }
  if (plan.token_scaled()) return EncodeTokenScaled(plan, x, x_stride, page);
  std::memset(page + plan.code_bytes(), 0, plan.scale_bytes);  // scales of empty slots
  const Levels all_levels[4] = {Levels(1), Levels(2), Levels(3), Levels(4)};
  for (const QuadRun& run : plan.runs) {
    const Levels* const lloyd_max =
        plan.scales == ScaleFormat::kLog8 && run.bits <= 4 ? &all_levels[run.bits - 1] : nullptr;
    for (int quad = run.first; quad < run.first + run.count; ++quad) {
      EncodeQuad(plan, run, quad, lloyd_max, x, x_stride, page);
    }
  }
}

void AddEncodeTarget(KernelTable& table) { table.encode_page = EncodePage; }

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace palu {
PALU_EXPORT_KERNELS(AddEncode)
}  // namespace palu
#endif
