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

// words, base and unit of one page (of one token group). q: [rows][stride] in slots; products: as
// large, overwritten; words: as large; base, unit: [kMaxFusedRows].
void FoldScales(const PagePlan& plan, const uint8_t* page, int rows, bool fast, const float* q,
                int64_t stride, float* products, int32_t* words, float* base_out, float* unit) {
  const DF df;
  const hn::CappedTag<float, 4> d4;
  VF base[kMaxFusedRows], most[kMaxFusedRows];
  for (int i = 0; i < kMaxFusedRows; ++i) base[i] = most[i] = hn::Zero(df);
  for (int s = 0; s < plan.slots; s += kLanes) {
    VF a, z;
    LoadScales(plan, page, 0, s, a, z);
    if (plan.slots - s < kLanes) {  // beyond the last slot lies what zeros of q would not stop
      const auto valid = hn::FirstN(df, static_cast<size_t>(plan.slots - s));
      a = hn::IfThenElseZero(valid, a), z = hn::IfThenElseZero(valid, z);
    }
    for (int i = 0; i < rows; ++i) {
      const VF query = hn::LoadU(df, q + i * stride + s), product = hn::Mul(query, a);
      hn::StoreU(product, df, products + i * stride + s);
      base[i] = hn::MulAdd(query, z, base[i]);
      most[i] = hn::Max(most[i], hn::Abs(product));
    }
  }
  float inverse[kMaxFusedRows];
  const float range = static_cast<float>(fast ? 127 : plan.most_query);
  for (int i = 0; i < rows; i += 4) {
    IntegerUnits(MaxesOfLanes(most + i), range, inverse + i, unit + i);
  }
  for (int i = 0; i < rows; ++i) {
    const VF inverses = hn::Set(df, inverse[i]);
    VF mids = hn::Zero(df);
    for (int s = 0; s < plan.slots; s += kLanes) {
      const VF product = hn::Mul(hn::LoadU(df, products + i * stride + s), inverses);
      const VI32 rounded = RoundToInt(product);
      mids = hn::MulAdd(hn::ConvertTo(df, rounded), hn::LoadU(df, plan.mid.data() + s), mids);
      hn::StoreU(fast ? FoursUp(rounded) : PairUp(rounded), DI32(), words + i * stride + s);
    }
    base[i] = hn::NegMulAdd(mids, hn::Set(df, unit[i]), base[i]);
  }
  for (int i = 0; i < rows; i += 4) hn::StoreU(SumsOfLanes(base + i), d4, base_out + i);
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
      FetchScales(plan, page + kAheadPages < args.run.n_pages ? args.run.pages[page + kAheadPages]
                                                              : args.run.pages[page]);
      FoldScales(plan, args.run.pages[page], args.rows, fast, q, stride, products,
                 words + i * args.rows * stride, base[i], unit[i]);
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
