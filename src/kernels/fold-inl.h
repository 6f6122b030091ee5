// File: fold-inl.h - scales of pages folded into queries, which become integers: see score.cc.
#if defined(PALU_SRC_KERNELS_FOLD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PALU_SRC_KERNELS_FOLD_INL_H_
#undef PALU_SRC_KERNELS_FOLD_INL_H_
#else
#define PALU_SRC_KERNELS_FOLD_INL_H_
#endif

#include "hwy/highway.h"
#include "kernels/levels-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

// How the integers of a query meet levels.
enum class Form {
  kPairs,       // 16 bits, two products at a time
  kSplitBytes,  // 16 bits as upper and lower bytes, four products at a time: levels stay bytes
  kBytes,       // the fast form: 8 bits, four products at a time
};
constexpr Form kAccurate = kHasByteProducts ? Form::kSplitBytes : Form::kPairs;

// Four integers per 128-bit block as scores want them. kSplitBytes: 128 more than they are.
template <Form kForm>
HWY_INLINE VI32 Words(VI32 v) {
  if constexpr (kForm == Form::kPairs) return PairUp(v);
  return kForm == Form::kBytes ? FoursUp(v) : SplitUp(v);
}

// Four mids (0..128) per 128-bit block as they meet Words.
template <Form kForm>
HWY_INLINE VI32 MidWords(VI32 v) {
  if constexpr (kForm == Form::kPairs) return PairUp(v);
  const VI32 bytes = FoursUp(v);
  return kForm == Form::kBytes ? bytes : hn::Broadcast<0>(bytes);
}

// Folds scales into queries, for some pages at once: what is done to one page is a long chain of
// dependent operations, so every step is done to all of them before the next.
template <int kRows, Form kForm>
struct Fold {
  static constexpr int kPadded = (kFusedBlocks * kRows + 3) / 4 * 4;
  const PagePlan& plan;
  const int64_t stride;              // of slots
  const float* const q;              // [rows][stride] in slots
  const int32_t* const mids;         // [stride]: MidWords
  int32_t* const words;              // [page][rows][stride]; products meanwhile
  float* const base;                 // [page][rows], kPadded
  float* const unit;                 // as large
  VF most[kPadded], bases[kPadded];  // by page and row, set by Run

  Fold(const PagePlan& p, int64_t n, const float* queries, const int32_t* mid_words,
       int32_t* to_words, float* to_base, float* to_unit)
      : plan(p),
        stride(n),
        q(queries),
        mids(mid_words),
        words(to_words),
        base(to_base),
        unit(to_unit) {}

  // Products with the scales of a page, the largest of them, and the share of z. first: row of it.
  HWY_INLINE void Multiply(const uint8_t* page, bool has_centres, int first) {
    const DF df;
    const ChannelScales scales(plan, page, 0);
    const int slots = plan.slots;
    const int64_t n = stride;
    const float* from = q;
    float* to = reinterpret_cast<float*>(words + first * n);
    VF largest[kRows], sum[kRows];
    for (int i = 0; i < kRows; ++i) largest[i] = sum[i] = hn::Zero(df);
    for (int s = 0; s < slots; s += kLanes, from += kLanes, to += kLanes) {
      const bool partial = slots - s < kLanes;  // zeros of q would not stop what lies beyond
      const auto valid = hn::FirstN(df, static_cast<size_t>(slots - s));
      VF a = scales.a(s);
      if (partial) a = hn::IfThenElseZero(valid, a);
      for (int i = 0; i < kRows; ++i) {
        const VF product = hn::Mul(hn::LoadU(df, from + i * n), a);
        hn::StoreU(product, df, to + i * n);
        largest[i] = MaxAbs(largest[i], product);
      }
      if (!has_centres) continue;
      VF z = scales.z(s, a);
      if (partial) z = hn::IfThenElseZero(valid, z);
      for (int i = 0; i < kRows; ++i) sum[i] = hn::MulAdd(hn::LoadU(df, from + i * n), z, sum[i]);
    }
    for (int i = 0; i < kRows; ++i) most[first + i] = largest[i], bases[first + i] = sum[i];
  }

  // Products of one row and page as integers, and what the mids make of them taken from its base.
  HWY_INLINE void Round(int j, VF inverse, VF unit_of_row) {
    const DF df;
    const DI32 di32;
    const int slots = plan.slots;
    const int32_t* const mid_words = mids;
    int32_t* const to = words + j * stride;
    const VF more = hn::Set(df, kForm == Form::kSplitBytes ? 128.0f : 0.0f);
    VI32 sum = hn::Zero(di32);
    for (int s = 0; s < slots; s += kLanes) {
      const VF product = hn::LoadU(df, reinterpret_cast<const float*>(to) + s);
      const VI32 word = Words<kForm>(RoundToInt(hn::MulAdd(product, inverse, more)));
      const VI32 mid = hn::LoadU(di32, mid_words + s);
      if constexpr (kForm == Form::kPairs) {
        sum = AddPairs(sum, hn::BitCast(DI16(), word), hn::BitCast(DI16(), mid));
      } else {
        sum = AddFours(sum, hn::BitCast(DU8(), mid), hn::BitCast(DU8(), word));
      }
      hn::StoreU(word, di32, to + s);
    }
    alignas(16) static constexpr float kSplit[4] = {256, 1, 0, 0};
    const VF scale =
        kForm == Form::kSplitBytes ? hn::Mul(unit_of_row, hn::LoadDup128(df, kSplit)) : unit_of_row;
    bases[j] = hn::NegMulAdd(hn::ConvertTo(df, sum), scale, bases[j]);
  }

  void Run(const uint8_t* const* pages, int n_pages) {
    const DF df;
    const hn::CappedTag<float, 4> d4;
    const bool has_centres = HasCentres(plan);
    const int n = n_pages * kRows;
    float inverse[kPadded];
    for (int p = 0; p < n_pages; ++p) Multiply(pages[p], has_centres, p * kRows);
    for (int j = n; j < kPadded && j < n + 3; ++j) most[j] = bases[j] = hn::Zero(df);
    const float range = kForm == Form::kBytes ? 127.0f
                        : kForm == Form::kSplitBytes
                            ? static_cast<float>(Least(plan.most_query, kMostSplit))
                            : static_cast<float>(plan.most_query);
    for (int j = 0; j < n; j += 4) {
      IntegerUnits(MaxesOfLanes(most + j), range, inverse + j, unit + j);
    }
    for (int j = 0; j < n; ++j) Round(j, hn::Set(df, inverse[j]), hn::Set(df, unit[j]));
    for (int j = 0; j < n; j += 4) hn::StoreU(SumsOfLanes(bases + j), d4, base + j);
  }
};

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#endif  // PALU_SRC_KERNELS_FOLD_INL_H_
