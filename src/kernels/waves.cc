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

// Blocks whose sums are made side by side: they share the loads of the tables, and their chains of
// additions overlap.
constexpr int kTogether = 4;

// out[t] += score(t) for the 32 tokens of each of the n (1..kTogether) blocks from lane `lane` on.
HWY_INLINE void AddBlocks(const WavePlan& plan, const BlockCoefficients& c, int lane, int n,
                          float* out) {
  const DF df;
  const size_t n_fast = plan.fast.size();
  for (int j = 0; j < kWaveHalf; j += kLanes) {
    const VF x = hn::Add(hn::Iota(df, static_cast<float>(j)), hn::Set(df, 0.5f));
    const VF y = hn::Mul(x, hn::Set(df, 1.0f / kWaveHalf)), y2 = hn::Mul(y, y);
    VF even[kTogether], odd[kTogether];
    for (int l = 0; l < kTogether; ++l) {
      const auto polynomial = [&](const float(*terms)[kLanes]) HWY_ATTR {
        const float* const of_block = terms[0] + lane + l;
        const VF last =
            hn::MulAdd(hn::Set(df, of_block[2 * kLanes]), y2, hn::Set(df, of_block[kLanes]));
        return hn::MulAdd(last, y2, hn::Set(df, of_block[0]));
      };
      even[l] = polynomial(c.even);
      odd[l] = hn::Mul(y, polynomial(c.odd));
    }
    const float* cosines = plan.cos_near.data() + j;
    const float* sines = plan.sin_near.data() + j;
    for (size_t f = 0; f < n_fast; ++f, cosines += kWaveHalf, sines += kWaveHalf) {
      const VF cosine = hn::LoadU(df, cosines), sine = hn::LoadU(df, sines);
      for (int l = 0; l < kTogether; ++l) {
        even[l] = hn::MulAdd(cosine, hn::Set(df, c.a[f][lane + l]), even[l]);
        odd[l] = hn::MulAdd(sine, hn::Set(df, c.b[f][lane + l]), odd[l]);
      }
    }
    for (int l = 0; l < kTogether; ++l) {
      if (l >= n) break;
      float* const right = out + l * kWaveBlock + kWaveHalf + j;
      float* const left = out + l * kWaveBlock + kWaveHalf - j - kLanes;
      hn::StoreU(hn::Add(hn::LoadU(df, right), hn::Add(even[l], odd[l])), df, right);
      const VF mirrored = hn::Reverse(df, hn::Sub(even[l], odd[l]));
      hn::StoreU(hn::Add(hn::LoadU(df, left), mirrored), df, left);
    }
  }
}

void WaveScores(const WaveArgs& args) {
  const WavePlan& plan = *args.plan;
  BlockCoefficients coefficients;
  for (int i = 0; i < args.rows; ++i) {
    const float* const q = args.q + static_cast<int64_t>(i) * 2 * plan.planes;
    for (int first = 0; first < args.n_blocks; first += kLanes) {
      coefficients.Make(plan, q, first);
      const int left = args.n_blocks - first;
      for (int lane = 0; lane < kLanes && lane < left; lane += kTogether) {
        AddBlocks(plan, coefficients, lane, left - lane < kTogether ? left - lane : kTogether,
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
