// Scores: out[i][t] = q[i] . latent_t, from packed pages.
//
// With value = a * level + z, a page's scores are sum_c (q_c a_c) level_ct + sum_c q_c z_c: the
// scales are folded into the query once per page, and the loop over codes is unpack, convert,
// multiply-add.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score.cc"
// clang-format off
#include "kernels/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#include "hwy/cache_control.h"
#include "kernels/decode-inl.h"
#include "kernels/levels-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

// Rows whose sums fit the registers, at kVecs vectors each.
constexpr int kScoreRows = HWY_TARGET == HWY_AVX3 ? 8 : 3;

// One block and the rows to be scored against it.
struct ScoreInput {
  const PagePlan& plan;
  const uint8_t* codes;
  const uint8_t* next;  // the same block of the next page, which is fetched meanwhile
  const float* q;       // [rows][q_stride], scales folded in
  int64_t q_stride;
  const float* base;  // [rows]
  float* out;         // [rows][out_stride]
  int64_t out_stride;
};

// The scores of kRows rows for the tokens of one part of a block.
template <int kRows>
struct ScoreTile {
  const ScoreInput& in;
  int part;
  int c = 0;
  VF sums[kRows * kVecs];

  // Adds the run of channels with kBits bits that starts at c, and moves c past it.
  template <int kBits>
  HWY_INLINE void Channels() {
    const DF df;
    const PagePlan& plan = in.plan;
    const VU8 table = LevelTable(plan, kBits);
    VF sum[kRows * kVecs];
    for (int j = 0; j < kRows * kVecs; ++j) sum[j] = sums[j];
    const float* q = in.q + c;
    const uint8_t* codes = in.codes + plan.code_offset[c];
    const uint8_t* next = in.next + plan.code_offset[c];
    for (; c < plan.rank && plan.bits[c] == kBits; ++c, ++q, codes += 4 * kBits) {
      VF level[kVecs];
      hwy::Prefetch(next);
      next += 4 * kBits;
      LoadLevels<kBits>(codes, part, table, level);
      for (int i = 0; i < kRows; ++i) {
        const VF weight = hn::Set(df, q[i * in.q_stride]);
        for (int j = 0; j < kVecs; ++j) {
          sum[i * kVecs + j] = hn::MulAdd(weight, level[j], sum[i * kVecs + j]);
        }
      }
    }
    for (int j = 0; j < kRows * kVecs; ++j) sums[j] = sum[j];
  }
};

template <int kRows>
void ScoreBlock(const ScoreInput& in) {
  const DF df;
  for (int part = 0; part < kParts; ++part) {
    ScoreTile<kRows> tile{in, part, 0, {}};
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVecs; ++j) tile.sums[i * kVecs + j] = hn::Set(df, in.base[i]);
    }
    while (tile.c < in.plan.rank) ForBits(in.plan.bits[tile.c], tile);
    for (int i = 0; i < kRows; ++i) {
      float* out = in.out + i * in.out_stride + part * kPart;
      for (int j = 0; j < kVecs; ++j) {
        hn::StoreU(tile.sums[i * kVecs + j], df, out + j * kLanes);
      }
    }
  }
}

// ScoreBlock<rows>, rows <= kMost.
template <int kMost>
HWY_INLINE void ScoreBlockOf(int rows, const ScoreInput& in) {
  if (rows == kMost) {
    ScoreBlock<kMost>(in);
  } else if constexpr (kMost > 1) {
    ScoreBlockOf<kMost - 1>(rows, in);
  }
}

// All rows of one block, in passes of near equal size.
void ScoreRows(ScoreInput in, int rows) {
  const int passes = (rows + kScoreRows - 1) / kScoreRows;
  for (int pass = 0; pass < passes; ++pass) {
    const int n = rows / (passes - pass);
    ScoreBlockOf<kScoreRows>(n, in);
    rows -= n;
    in.q += n * in.q_stride;
    in.base += n;
    in.out += n * in.out_stride;
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

// Scales change within a block (groups of 8 and 16 tokens, scales per token): channels are decoded
// first.
void ScoreDecoded(const ScoreArgs& args, const uint8_t* page, int block, float* out) {
  const DF df;
  const PagePlan& plan = *args.run.plan;
  alignas(64) float values[kLanes * kBlockTokens];
  for (int i = 0; i < args.rows; ++i) {
    for (int t = 0; t < kBlockTokens; ++t) out[i * args.out_stride + t] = 0.0f;
  }
  for (int c = 0; c < plan.rank; c += kLanes) {
    const int n = Least(kLanes, plan.rank - c);
    DecodeChannels(plan, page, block, c, c + n, values);
    for (int i = 0; i < args.rows; ++i) {
      const float* q = args.q + i * args.q_stride + c;
      float* to = out + i * args.out_stride;
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        VF sum = hn::LoadU(df, to + t);
        for (int k = 0; k < n; ++k) {
          sum = hn::MulAdd(hn::Set(df, q[k]), hn::Load(df, values + k * kBlockTokens + t), sum);
        }
        hn::StoreU(sum, df, to + t);
      }
    }
  }
}

void Score(const ScoreArgs& args) {
  const PagePlan& plan = *args.run.plan;
  for (int p = 0; p < args.run.n_pages; ++p) {
    const uint8_t* page = args.run.pages[p];
    float* out = args.out + static_cast<int64_t>(p) * plan.page_tokens;
    if (!plan.raw && (plan.groups() > 1 || plan.token_scaled())) {
      for (int block = 0; block < plan.blocks(); ++block) {
        ScoreDecoded(args, page, block, out + block * kBlockTokens);
      }
      continue;
    }
    const uint8_t* next = p + 1 < args.run.n_pages ? args.run.pages[p + 1] : page;
    float base[kMaxFusedRows] = {};
    ScoreInput in{plan, page, next, args.q, args.q_stride, base, out, args.out_stride};
    if (!plan.raw) {
      in.q = args.scratch;
      in.q_stride = plan.rank + kChannelPadding;
      FoldScales(plan, page, args, args.scratch, in.q_stride, base);
    }
    for (int block = 0; block < plan.blocks(); ++block) {
      ScoreRows(in, args.rows);
      in.codes += plan.block_bytes;
      in.next += plan.block_bytes;
      in.out += kBlockTokens;
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
