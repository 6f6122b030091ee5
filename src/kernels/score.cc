// Scores: out[i][t] = q[i] . latent_t, from packed pages.
//
// With value = a * level + z, a page's scores are sum_c (q_c a_c) level_ct + sum_c q_c z_c: the
// scales are folded into the query once per page, and the loop over codes is unpack, convert,
// multiply-add.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score.cc"
// clang-format off: the order matters
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/decode-inl.h"
#include "kernels/levels-inl.h"
#include "kernels/simd-inl.h"
#include "kernels/targets.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

// Rows whose sums fit the registers, at kVecs vectors each.
constexpr int kScoreRows = HWY_TARGET == HWY_AVX3 ? 4 : 3;

// The scores of kRows rows for the tokens of one part of a block.
template <int kRows>
struct ScoreTile {
  const PagePlan& plan;
  const float* q;  // [kRows][q_stride], scales folded in
  int64_t q_stride;
  const uint8_t* codes;  // of channel c
  int part;
  int c = 0;
  VF sums[kRows * kVecs];

  // Adds the run of channels with kBits bits that starts at c, and moves c and codes past it.
  template <int kBits>
  HWY_INLINE void Channels() {
    const DF df;
    const VU8 table = LevelTable(plan, kBits);
    VF sum[kRows * kVecs];
    for (int j = 0; j < kRows * kVecs; ++j) sum[j] = sums[j];
    const float* qc = q + c;
    const uint8_t* from = codes;
    const int first = c;
    for (; c < plan.rank && plan.bits[c] == kBits; ++c, ++qc, from += 4 * kBits) {
      VF level[kVecs];
      LoadLevels<kBits>(from, part, table, level);
      for (int i = 0; i < kRows; ++i) {
        const VF weight = hn::Set(df, qc[i * q_stride]);
        for (int j = 0; j < kVecs; ++j) {
          sum[i * kVecs + j] = hn::MulAdd(weight, level[j], sum[i * kVecs + j]);
        }
      }
    }
    codes += 4 * kBits * (c - first);
    for (int j = 0; j < kRows * kVecs; ++j) sums[j] = sum[j];
  }
};

template <int kRows>
void ScoreBlock(const PagePlan& plan, const uint8_t* codes, const float* q, int64_t q_stride,
                const float* base, float* out, int64_t out_stride) {
  const DF df;
  for (int part = 0; part < kParts; ++part) {
    ScoreTile<kRows> tile{plan, q, q_stride, codes, part, 0, {}};
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVecs; ++j) tile.sums[i * kVecs + j] = hn::Set(df, base[i]);
    }
    while (tile.c < plan.rank) ForBits(plan.bits[tile.c], tile);
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVecs; ++j) {
        hn::StoreU(tile.sums[i * kVecs + j], df, out + i * out_stride + part * kPart + j * kLanes);
      }
    }
  }
}

// qa[i][c] = q[i][c] * a[c], base[i] = sum_c q[i][c] * z[c] for one page (of one token group).
void FoldScales(const PagePlan& plan, const uint8_t* page, const ScoreArgs& args, float* qa,
                int64_t qa_stride, float* base) {
  const DF df;
  VF sums[kMaxFusedRows];
  for (VF& sum : sums) sum = hn::Zero(df);
  for (int c = 0; c < plan.rank; c += kLanes) {
    const int64_t left = plan.rank - c;
    VF a, z;
    LoadScales(plan, page, 0, c, a, z);
    // Beyond the last channel z may be NaN, which the zeros of q would not stop.
    if (left < kLanes) z = hn::IfThenElseZero(hn::FirstN(df, static_cast<size_t>(left)), z);
    for (int i = 0; i < args.rows; ++i) {
      const VF q = LoadFirst(args.q + i * args.q_stride + c, left);
      hn::StoreU(hn::Mul(q, a), df, qa + i * qa_stride + c);
      sums[i] = hn::MulAdd(q, z, sums[i]);
    }
  }
  for (int i = 0; i < args.rows; ++i) base[i] = hn::GetLane(hn::SumOfLanes(df, sums[i]));
}

// All rows of one block, in passes of near equal size.
void ScoreRows(const PagePlan& plan, const uint8_t* codes, const float* q, int64_t q_stride,
               const float* base, int rows, float* out, int64_t out_stride) {
  const int passes = (rows + kScoreRows - 1) / kScoreRows;
  for (int pass = 0, row = 0; pass < passes; ++pass) {
    const int n = (rows - row) / (passes - pass);
    const float* from = q + row * q_stride;
    float* to = out + row * out_stride;
    switch (n) {
      case 1:
        ScoreBlock<1>(plan, codes, from, q_stride, base + row, to, out_stride);
        break;
      case 2:
        ScoreBlock<2>(plan, codes, from, q_stride, base + row, to, out_stride);
        break;
      case 3:
        ScoreBlock<3>(plan, codes, from, q_stride, base + row, to, out_stride);
        break;
      default:
        ScoreBlock<kScoreRows>(plan, codes, from, q_stride, base + row, to, out_stride);
        break;
    }
    row += n;
  }
}

// Groups of 8 and 16 tokens: the scales change within a block, so channels are decoded first.
void ScoreSmallGroups(const ScoreArgs& args, const uint8_t* page, float* out) {
  const DF df;
  const PagePlan& plan = *args.run.plan;
  alignas(64) float values[kBlockTokens];
  for (int i = 0; i < args.rows; ++i) {
    for (int t = 0; t < kBlockTokens; ++t) out[i * args.out_stride + t] = 0.0f;
  }
  for (int c = 0; c < plan.rank; ++c) {
    DecodeChannel(plan, page, 0, c, values);
    for (int i = 0; i < args.rows; ++i) {
      const VF q = hn::Set(df, args.q[i * args.q_stride + c]);
      float* to = out + i * args.out_stride;
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        hn::StoreU(hn::MulAdd(q, hn::Load(df, values + t), hn::LoadU(df, to + t)), df, to + t);
      }
    }
  }
}

void Score(const ScoreArgs& args) {
  const PagePlan& plan = *args.run.plan;
  const int64_t qa_stride = plan.rank + kChannelPadding;
  for (int p = 0; p < args.run.n_pages; ++p) {
    const uint8_t* page = args.run.pages[p];
    float* out = args.out + static_cast<int64_t>(p) * plan.page_tokens;
    if (!plan.raw && plan.groups() > 1) {
      ScoreSmallGroups(args, page, out);
      continue;
    }
    float base[kMaxFusedRows] = {};
    const float* q = args.q;
    int64_t q_stride = args.q_stride;
    if (!plan.raw) {
      FoldScales(plan, page, args, args.scratch, qa_stride, base);
      q = args.scratch;
      q_stride = qa_stride;
    }
    for (int block = 0; block < plan.blocks(); ++block) {
      ScoreRows(plan, page + static_cast<size_t>(block) * plan.block_bytes, q, q_stride, base,
                args.rows, out + block * kBlockTokens, args.out_stride);
    }
  }
}

void AddScoreTarget(KernelTable& table) { table.score = Score; }

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace palu {
PALU_EXPORT_KERNELS(AddScore)
}  // namespace palu
#endif
