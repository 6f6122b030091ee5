// Scores: out[i][t] = q[i] . latent_t, from packed pages.
//
// With value = a * (level - mid) + z a page's scores are
//     sum_c (q_c a_c) (level_ct - mid_c) + sum_c q_c z_c.
// The scales are folded into the query once per page, and q_c a_c is rounded to 16 bits (8 in the
// fast form) of the largest of them: the loop over codes is unpack, multiply and add integers. The
// rounding of a product is at most half a unit, so a score is off by at most
//     max_c |q_c a_c| / 65534 * sum_c |level_c - mid_c|   (/ 254 in the fast form).
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
#include "kernels/raw-inl.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

// Rows, and vectors of tokens, whose sums fit the registers.
constexpr int kScoreRows = PALU_IS_AVX512(HWY_TARGET) ? 8 : 4;
constexpr int kScoreParts = 2;
constexpr int kAheadPages = 4;  // whose scales are fetched before they are needed

// Some blocks and the queries that meet them, scales folded in.
struct FoldedBlocks {
  const PagePlan& plan;
  int64_t stride;  // of slots
  int n_blocks = 0;
  const uint8_t* codes[kFusedBlocks];
  const uint8_t* next[kFusedBlocks];   // what is fetched meanwhile
  const int32_t* words[kFusedBlocks];  // [rows][stride], four per quad: see PairUp and FoursUp
  const float* base[kFusedBlocks];     // [rows]
  const float* unit[kFusedBlocks];
};

// The scores of kRows rows for kScoreParts vectors of tokens of every block.
template <int kRows, bool kFast>
struct ScoreTile {
  // Even and odd levels get sums of their own where that shortens the chain of additions.
  static constexpr int kChains = !kFast && kRows * 2 <= kScoreRows ? 2 : 1;
  static constexpr int kSums = kRows * kScoreParts * kChains;
  const FoldedBlocks& in;
  const int row, part;
  VI32 sums[kFusedBlocks][kSums];  // set by Run

  ScoreTile(const FoldedBlocks& blocks, int first_row, int first_part)
      : in(blocks), row(first_row), part(kParts == kScoreParts ? 0 : first_part) {}

  // Adds a run of quads with kBits bits.
  template <int kBits, LevelKind kKind>
  HWY_INLINE void Quads(const QuadRun& run) {
    const VU8 table = LevelTable<kBits, kKind>();
    for (int block = 0; block < in.n_blocks; ++block) {
      AddQuads<kBits, kKind>(run.count, table, in.codes[block] + run.offset,
                             in.next[block] + run.offset,
                             in.words[block] + row * in.stride + run.first * kQuad, sums[block]);
    }
  }

  template <int kBits, LevelKind kKind>
  HWY_INLINE void AddQuads(int n, VU8 table, const uint8_t* codes, const uint8_t* next,
                           const int32_t* words, VI32* sums_of_block) const {
    const DI32 di32;
    const int64_t stride = in.stride;
    const int first_part = kParts == kScoreParts ? 0 : part;
    VI32 sum[kSums];
    for (int j = 0; j < kSums; ++j) sum[j] = sums_of_block[j];
    for (int q = 0; q < n; ++q, codes += 16 * kBits, next += 16 * kBits, words += kQuad) {
      VU8 level[kScoreParts];
      hwy::Prefetch(next);
      for (int j = 0; j < kScoreParts; ++j) {
        level[j] = LoadLevels<kBits, kKind>(codes, first_part + j, table);
      }
      for (int i = 0; i < kRows; ++i) {
        const VI32 first = hn::Set(di32, words[i * stride]);
        VI32* const of_row = sum + i * kScoreParts * kChains;
        if constexpr (kFast) {
          for (int j = 0; j < kScoreParts; ++j) {
            of_row[j] = AddFours(of_row[j], level[j], hn::BitCast(DU8(), first));
          }
        } else {
          const VI16 even = hn::BitCast(DI16(), first);
          const VI16 odd = hn::BitCast(DI16(), hn::Set(di32, words[i * stride + 1]));
          for (int j = 0; j < kScoreParts; ++j) {
            VI32* const chains = of_row + j * kChains;
            chains[0] = AddPairs(chains[0], EvenLevels(level[j]), even);
            chains[kChains - 1] = AddPairs(chains[kChains - 1], OddLevels(level[j]), odd);
          }
        }
      }
    }
    for (int j = 0; j < kSums; ++j) sums_of_block[j] = sum[j];
  }

  // out: of the first row and block.
  void Run(float* out, int64_t out_stride) {
    const DF df;
    for (int block = 0; block < in.n_blocks; ++block) {
      for (VI32& sum : sums[block]) sum = hn::Zero(DI32());
    }
    for (const QuadRun& run : in.plan.runs) ForBits(in.plan, run, *this);
    for (int block = 0; block < in.n_blocks; ++block, out += kBlockTokens) {
      for (int i = 0; i < kRows; ++i) {
        const VF base = hn::Set(df, in.base[block][row + i]);
        const VF unit = hn::Set(df, in.unit[block][row + i]);
        for (int j = 0; j < kScoreParts; ++j) {
          const VI32* const chains = sums[block] + (i * kScoreParts + j) * kChains;
          const VI32 sum = kChains > 1 ? hn::Add(chains[0], chains[kChains - 1]) : chains[0];
          hn::StoreU(hn::MulAdd(hn::ConvertTo(df, sum), unit, base), df,
                     out + i * out_stride + (part + j) * kLanes);
        }
      }
    }
  }
};

template <int kRows, bool kFast>
void ScoreBlocks(const FoldedBlocks& in, int row, float* out, int64_t out_stride) {
  for (int part = 0; part < kParts; part += kScoreParts) {
    ScoreTile<kRows, kFast>(in, row, part).Run(out, out_stride);
  }
}

// ScoreBlocks<rows>, rows <= kMost.
template <int kMost, bool kFast>
HWY_INLINE void ScoreBlocksOf(int rows, const FoldedBlocks& in, int row, float* out,
                              int64_t out_stride) {
  if (rows == kMost) {
    ScoreBlocks<kMost, kFast>(in, row, out, out_stride);
  } else if constexpr (kMost > 1) {
    ScoreBlocksOf<kMost - 1, kFast>(rows, in, row, out, out_stride);
  }
}

// All rows, in passes of near equal size.
void ScoreRows(const FoldedBlocks& in, int rows, bool fast, float* out, int64_t out_stride) {
  const int passes = (rows + kScoreRows - 1) / kScoreRows;
  for (int pass = 0, row = 0; pass < passes; ++pass) {
    const int n = (rows - row) / (passes - pass);
    if (kHasByteProducts && fast) {
      ScoreBlocksOf<kScoreRows, kHasByteProducts>(n, in, row, out + row * out_stride, out_stride);
    } else {
      ScoreBlocksOf<kScoreRows, false>(n, in, row, out + row * out_stride, out_stride);
    }
    row += n;
  }
}

// Queries with their channels in slots: [rows][stride], zeros in empty slots and after the last.
void GatherQueries(const ScoreArgs& args, int64_t stride, float* slots) {
  const PagePlan& plan = *args.run.plan;
  for (int i = 0; i < args.rows; ++i) {
    const float* const q = args.q + i * args.q_stride;
    float* const to = slots + i * stride;
    for (int s = 0; s < plan.slots; ++s) to[s] = plan.channel[s] < 0 ? 0.0f : q[plan.channel[s]];
    for (int64_t s = plan.slots; s < stride; ++s) to[s] = 0.0f;
  }
}

// What queries become for one page (of one token group).
struct FoldTask {
  const PagePlan& plan;
  int64_t stride;   // of slots
  const float* q;   // [rows][stride] in slots
  float* products;  // as large, overwritten
  int32_t* words;   // as large
  float* base;      // [kMaxFusedRows]
  float* unit;      // [kMaxFusedRows]
};

template <int kRows, bool kFast>
void FoldScales(const FoldTask& task, const uint8_t* page) {
  const DF df;
  const hn::CappedTag<float, 4> d4;
  const PagePlan& plan = task.plan;
  const int64_t stride = task.stride;
  constexpr int kPadded = (kRows + 3) / 4 * 4;
  VF base[kPadded], most[kPadded];
  for (int i = 0; i < kPadded; ++i) base[i] = most[i] = hn::Zero(df);
  for (int s = 0; s < plan.slots; s += kLanes) {
    VF a, z;
    LoadScales(plan, page, 0, s, a, z);
    if (plan.slots - s < kLanes) {  // beyond the last slot lies what zeros of q would not stop
      const auto valid = hn::FirstN(df, static_cast<size_t>(plan.slots - s));
      a = hn::IfThenElseZero(valid, a), z = hn::IfThenElseZero(valid, z);
    }
    for (int i = 0; i < kRows; ++i) {
      const VF query = hn::LoadU(df, task.q + i * stride + s), product = hn::Mul(query, a);
      hn::StoreU(product, df, task.products + i * stride + s);
      base[i] = hn::MulAdd(query, z, base[i]);
      most[i] = hn::Max(most[i], hn::Abs(product));
    }
  }
  alignas(16) float inverse[kPadded];
  const float range = static_cast<float>(kFast ? 127 : plan.most_query);
  for (int i = 0; i < kPadded; i += 4) {
    IntegerUnits(MaxesOfLanes(most + i), range, inverse + i, task.unit + i);
  }
  VF mids[kRows];
  for (VF& mid : mids) mid = hn::Zero(df);
  for (int s = 0; s < plan.slots; s += kLanes) {
    const VF mid = hn::LoadU(df, plan.mid.data() + s);
    for (int i = 0; i < kRows; ++i) {
      const VF product = hn::LoadU(df, task.products + i * stride + s);
      const VI32 rounded = RoundToInt(hn::Mul(product, hn::Set(df, inverse[i])));
      mids[i] = hn::MulAdd(hn::ConvertTo(df, rounded), mid, mids[i]);
      hn::StoreU(kFast ? FoursUp(rounded) : PairUp(rounded), DI32(), task.words + i * stride + s);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    base[i] = hn::NegMulAdd(mids[i], hn::Set(df, task.unit[i]), base[i]);
  }
  for (int i = 0; i < kPadded; i += 4) hn::StoreU(SumsOfLanes(base + i), d4, task.base + i);
}

// FoldScales<rows>, rows <= kMost.
template <int kMost, bool kFast>
HWY_INLINE void FoldScalesOf(int rows, const FoldTask& task, const uint8_t* page) {
  if (rows == kMost) {
    FoldScales<kMost, kFast>(task, page);
  } else if constexpr (kMost > 1) {
    FoldScalesOf<kMost - 1, kFast>(rows, task, page);
  }
}

// Scales change within a block (groups of 8 and 16 tokens, scales per token), or the codes are in
// order for sums: channels are decoded first.
void ScoreDecoded(const ScoreArgs& args, const uint8_t* page, int block, float* out) {
  const DF df;
  const PagePlan& plan = *args.run.plan;
  alignas(64) float values[kQuadCodes];
  for (int i = 0; i < args.rows; ++i) {
    for (int t = 0; t < kBlockTokens; ++t) out[i * args.out_stride + t] = 0.0f;
  }
  for (int quad = 0; quad < plan.slots / kQuad; ++quad) {
    DecodeQuad(plan, page, block, quad, values);
    for (int l = 0; l < kQuad; ++l) {
      const int c = plan.channel[quad * kQuad + l];
      if (c < 0) continue;
      for (int i = 0; i < args.rows; ++i) {
        const VF q = hn::Set(df, args.q[i * args.q_stride + c]);
        float* const to = out + i * args.out_stride;
        for (int t = 0; t < kBlockTokens; t += kLanes) {
          const VF value = hn::Load(df, values + l * kBlockTokens + t);
          hn::StoreU(hn::MulAdd(q, value, hn::LoadU(df, to + t)), df, to + t);
        }
      }
    }
  }
}

void Score(const ScoreArgs& args) {
  const PagePlan& plan = *args.run.plan;
  if (plan.raw) return plan.bits[0] == 16 ? ScoreRaw<16>(args) : ScoreRaw<32>(args);
  if (plan.groups() > 1 || plan.token_scaled() || plan.order != CodeOrder::kForScores) {
    for (int b = 0; b < args.run.n_pages * plan.blocks(); ++b) {
      ScoreDecoded(args, args.run.pages[b / plan.blocks()], b % plan.blocks(),
                   args.out + b * kBlockTokens);
    }
    return;
  }
  const bool fast = args.fast && kHasByteProducts;
  const int64_t stride = plan.slots + kChannelPadding, blocks = plan.blocks();
  float* const q = args.scratch;
  float* const products = q + args.rows * stride;
  int32_t* const words = reinterpret_cast<int32_t*>(products + args.rows * stride);
  for (int p = 0; p < args.run.n_pages && p < kFusedBlocks; ++p) {
    // All of it: what ScoreTile fetches on the way is as far ahead.
    for (size_t i = 0; i < plan.page_bytes(); i += 64) hwy::Prefetch(args.run.pages[p] + i);
  }
  GatherQueries(args, stride, q);
  const int64_t n_blocks = args.run.n_pages * blocks;
  for (int64_t first = 0; first < n_blocks; first += kFusedBlocks) {
    FoldedBlocks in{plan, stride};
    float base[kFusedBlocks][kMaxFusedRows], unit[kFusedBlocks][kMaxFusedRows];
    for (int64_t b = first; b < n_blocks && b < first + kFusedBlocks; ++b) {
      const int i = in.n_blocks++;
      const int64_t page = b / blocks, at = b % blocks * plan.block_bytes;
      const bool new_page = i == 0 || b % blocks == 0;
      in.codes[i] = args.run.pages[page] + at;
      in.next[i] = page + kFusedBlocks < args.run.n_pages ? args.run.pages[page + kFusedBlocks] + at
                                                          : in.codes[i];
      in.words[i] = new_page ? words + i * args.rows * stride : in.words[i - 1];
      in.base[i] = new_page ? base[i] : in.base[i - 1];
      in.unit[i] = new_page ? unit[i] : in.unit[i - 1];
      if (!new_page) continue;
      // Scales lie apart from the codes: nothing else has fetched them.
      if (page + kAheadPages < args.run.n_pages) {
        FetchScales(plan, args.run.pages[page + kAheadPages]);
      }
      const FoldTask task{plan,    stride, q, products, words + i * args.rows * stride,
                          base[i], unit[i]};
      if (kHasByteProducts && fast) {
        FoldScalesOf<kMaxFusedRows, kHasByteProducts>(args.rows, task, args.run.pages[page]);
      } else {
        FoldScalesOf<kMaxFusedRows, false>(args.rows, task, args.run.pages[page]);
      }
    }
    ScoreRows(in, args.rows, fast, args.out + first * kBlockTokens, args.out_stride);
  }
}

void AddScoreTarget(KernelTable& table) {
  table.score = Score;
  table.byte_products = kHasByteProducts;
}

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
