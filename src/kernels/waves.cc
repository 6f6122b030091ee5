// Scores of a rotated mean: sums of waves over the tokens of a run. See wave_plan.h.
//
// A vector holds kLanes blocks while their coefficients are made, then half a block of tokens (or a
// part of it).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/waves.cc"
// clang-format off
#include "kernels/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

constexpr int kMostPlanes = 512;  // heads have at most 1024 channels

// Coefficients of kLanes blocks: a and b of the fast waves, and of the polynomials of the slow
// ones.
struct BlockCoefficients {
  alignas(64) float even[kWaveTerms][kLanes], odd[kWaveTerms][kLanes];
  alignas(64) float a[kMostPlanes][kLanes], b[kMostPlanes][kLanes];

  // A and B of plane i at the middle of the blocks.
  HWY_INLINE static void Turn(const WavePlan& plan, const float* q, int i, int block, VF& a,
                              VF& b) {
    const DF df;
    const VF c = hn::LoadU(df, &plan.cos_block[static_cast<size_t>(i * kWaveBlocks + block)]);
    const VF s = hn::LoadU(df, &plan.sin_block[static_cast<size_t>(i * kWaveBlocks + block)]);
    const VF re = hn::Set(df, q[i]), im = hn::Set(df, q[plan.planes + i]);
    a = hn::MulAdd(im, s, hn::Mul(re, c));
    b = hn::NegMulAdd(re, s, hn::Mul(im, c));
  }

  HWY_INLINE void Make(const WavePlan& plan, const float* q, int block) {
    const DF df;
    VF va, vb, e[kWaveTerms], o[kWaveTerms];
    for (int m = 0; m < kWaveTerms; ++m) e[m] = o[m] = hn::Zero(df);
    for (size_t j = 0; j < plan.slow.size(); ++j) {
      Turn(plan, q, plan.slow[j], block, va, vb);
      for (size_t m = 0; m < kWaveTerms; ++m) {
        e[m] = hn::MulAdd(va, hn::Set(df, plan.even[j * kWaveTerms + m]), e[m]);
        o[m] = hn::MulAdd(vb, hn::Set(df, plan.odd[j * kWaveTerms + m]), o[m]);
      }
    }
    for (int m = 0; m < kWaveTerms; ++m) {
      hn::Store(e[m], df, even[m]);
      hn::Store(o[m], df, odd[m]);
    }
    for (size_t j = 0; j < plan.fast.size(); ++j) {
      Turn(plan, q, plan.fast[j], block, va, vb);
      hn::Store(va, df, a[j]);
      hn::Store(vb, df, b[j]);
    }
  }
};

// out[t] += score(t) for the 32 tokens of the block in lane `lane`.
HWY_INLINE void AddBlock(const WavePlan& plan, const BlockCoefficients& c, int lane, float* out) {
  const DF df;
  for (int j = 0; j < kWaveHalf; j += kLanes) {
    const VF x = hn::Add(hn::Iota(df, static_cast<float>(j)), hn::Set(df, 0.5f));
    const VF y = hn::Mul(x, hn::Set(df, 1.0f / kWaveHalf)), y2 = hn::Mul(y, y);
    const auto polynomial = [&](const float(*terms)[kLanes]) HWY_ATTR {
      const VF last = hn::MulAdd(hn::Set(df, terms[2][lane]), y2, hn::Set(df, terms[1][lane]));
      return hn::MulAdd(last, y2, hn::Set(df, terms[0][lane]));
    };
    VF even = polynomial(c.even), odd = hn::Mul(y, polynomial(c.odd));
    for (size_t f = 0; f < plan.fast.size(); ++f) {
      const float* const cosines = &plan.cos_near[f * kWaveHalf + static_cast<size_t>(j)];
      const float* const sines = &plan.sin_near[f * kWaveHalf + static_cast<size_t>(j)];
      even = hn::MulAdd(hn::Set(df, c.a[f][lane]), hn::LoadU(df, cosines), even);
      odd = hn::MulAdd(hn::Set(df, c.b[f][lane]), hn::LoadU(df, sines), odd);
    }
    float* const right = out + kWaveHalf + j;
    float* const left = out + kWaveHalf - j - kLanes;
    hn::StoreU(hn::Add(hn::LoadU(df, right), hn::Add(even, odd)), df, right);
    const VF mirrored = hn::Reverse(df, hn::Sub(even, odd));
    hn::StoreU(hn::Add(hn::LoadU(df, left), mirrored), df, left);
  }
}

void WaveScores(const WaveArgs& args) {
  const WavePlan& plan = *args.plan;
  BlockCoefficients coefficients;
  for (int i = 0; i < args.rows; ++i) {
    const float* const q = args.q + static_cast<int64_t>(i) * 2 * plan.planes;
    for (int first = 0; first < args.n_blocks; first += kLanes) {
      coefficients.Make(plan, q, first);
      for (int lane = 0; lane < kLanes && first + lane < args.n_blocks; ++lane) {
        AddBlock(plan, coefficients, lane,
                 args.out + i * args.out_stride + (first + lane) * kWaveBlock);
      }
    }
  }
}

void AddWavesTarget(KernelTable& table) { table.wave_scores = WaveScores; }

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace palu {
PALU_EXPORT_KERNELS(AddWaves)
}  // namespace palu
#endif
