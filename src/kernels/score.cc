// Scores: out[i][t] = q[i] . latent_t, from packed pages.
//
// With value = a * (level - mid) + z a page's scores are
//     sum_c (q_c a_c) (level_ct - mid_c) + sum_c q_c z_c.
// The scales are folded into the query once per page, and q_c a_c is rounded to 16 bits (8 in the
// fast form) of the largest of them: the loop over codes is unpack, multiply and add integers. The
// rounding of a product is at most half a unit, so a score is off by at most
//     max_c |q_c a_c| / 65278 * sum_c |level_c - mid_c|   (/ 254 in the fast form).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/score.cc"
// clang-format off
#include "kernels/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#include "hwy/cache_control.h"
#include "kernels/decode-inl.h"
#include "kernels/fold-inl.h"
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

// Rows of a tile. Split bytes have two sums for one.
template <Form kForm>
constexpr int kTileRows = kForm == Form::kSplitBytes ? kScoreRows / 2 : kScoreRows;

// Some blocks and the queries that meet them, scales folded in.
struct FoldedBlocks {
  const PagePlan& plan;
  const int64_t stride;  // of slots
  int n_blocks = 0;
  const uint8_t* codes[kFusedBlocks];
  const uint8_t* next[kFusedBlocks];   // what is fetched meanwhile
  const int32_t* words[kFusedBlocks];  // [rows][stride], four per quad: see Words
  const float* base[kFusedBlocks];     // [rows]
  const float* unit[kFusedBlocks];

  FoldedBlocks(const PagePlan& p, int64_t n) : plan(p), stride(n) {}
};

// The scores of kRows rows for kScoreParts vectors of tokens of every block.
template <int kRows, Form kForm>
struct ScoreTile {
  // Sums that are kept apart: bytes until the end, pairs where that shortens the chain of
  // additions.
  static constexpr int kChains = kForm == Form::kSplitBytes                         ? 2
                                 : kForm == Form::kPairs && kRows * 2 <= kScoreRows ? 2
                                                                                    : 1;
  static constexpr int kSums = kRows * kScoreParts * kChains;
  const FoldedBlocks& in;
  const int row, part;
  float* const out;  // of the first row and block
  const int64_t out_stride;
  VI32 sums[kFusedBlocks][kSums];  // between two runs of quads

  ScoreTile(const FoldedBlocks& blocks, int first_row, int first_part, float* to, int64_t to_stride)
      : in(blocks),
        row(first_row),
        part(kParts == kScoreParts ? 0 : first_part),
        out(to),
        out_stride(to_stride) {}

  // Adds a run of quads with kBits bits: the first sets the sums, the last makes scores of them.
  template <int kBits, LevelKind kKind>
  HWY_INLINE void Quads(const QuadRun& run) {
    const VU8 table = LevelTable<kBits, kKind>();
    const bool first = run.first == 0, last = (run.first + run.count) * kQuad == in.plan.slots;
    for (int block = 0; block < in.n_blocks; ++block) {
      VI32 sum[kSums];
      for (int j = 0; j < kSums; ++j) sum[j] = first ? hn::Zero(DI32()) : sums[block][j];
      AddQuads<kBits, kKind>(run.count, table, in.codes[block] + run.offset,
                             in.next[block] + run.offset,
                             in.words[block] + row * in.stride + run.first * kQuad, sum);
      if (last) {
        Finish(block, sum);
      } else {
        for (int j = 0; j < kSums; ++j) sums[block][j] = sum[j];
      }
    }
  }

  template <int kBits, LevelKind kKind>
  HWY_INLINE void AddQuads(int n, VU8 table, const uint8_t* codes, const uint8_t* next,
                           const int32_t* words, VI32* sum) const {
    const int64_t stride = in.stride;
    const int first_part = kParts == kScoreParts ? 0 : part;
    for (int q = 0; q < n; ++q, codes += 16 * kBits, next += 16 * kBits, words += kQuad) {
      VU8 level[kScoreParts];
      hwy::Prefetch(next);
      for (int j = 0; j < kScoreParts; ++j) {
        level[j] = LoadLevels<kBits, kKind>(codes, first_part + j, table);
      }
      for (int i = 0; i < kRows; ++i) {
        AddRow(words + i * stride, level, sum + i * kScoreParts * kChains);
      }
    }
  }

  // One quad of one row. words: its one or two.
  HWY_INLINE void AddRow(const int32_t* words, const VU8* level, VI32* sum) const {
    const DI32 di32;
    const VI32 first = hn::Set(di32, words[0]);
    if constexpr (kForm == Form::kBytes) {
      for (int j = 0; j < kScoreParts; ++j) {
        sum[j] = AddFours(sum[j], level[j], hn::BitCast(DU8(), first));
      }
    } else {
      const VI32 second = hn::Set(di32, words[1]);
      for (int j = 0; j < kScoreParts; ++j, sum += kChains) {
        VI32& last = sum[kChains - 1];
        if constexpr (kForm == Form::kSplitBytes) {
          sum[0] = AddFours(sum[0], level[j], hn::BitCast(DU8(), first));
          last = AddFours(last, level[j], hn::BitCast(DU8(), second));
        } else {
          sum[0] = AddPairs(sum[0], EvenLevels(level[j]), hn::BitCast(DI16(), first));
          last = AddPairs(last, OddLevels(level[j]), hn::BitCast(DI16(), second));
        }
      }
    }
  }

  HWY_INLINE static VI32 Total(const VI32* chains) {
    if constexpr (kForm == Form::kSplitBytes) {
      return hn::Add(hn::ShiftLeft<8>(chains[0]), chains[1]);
    } else {
      return kChains > 1 ? hn::Add(chains[0], chains[kChains - 1]) : chains[0];
    }
  }

  HWY_INLINE void Finish(int block, const VI32* sum) const {
    const DF df;
    const float* const base = in.base[block] + row;
    const float* const unit = in.unit[block] + row;
    float* to = out + block * kBlockTokens + part * kLanes;
    for (int i = 0; i < kRows; ++i, to += out_stride) {
      const VF vbase = hn::Set(df, base[i]), vunit = hn::Set(df, unit[i]);
      for (int j = 0; j < kScoreParts; ++j, sum += kChains) {
        hn::StoreU(hn::MulAdd(hn::ConvertTo(df, Total(sum)), vunit, vbase), df, to + j * kLanes);
      }
    }
  }

  void Run() {
    for (const QuadRun& run : in.plan.runs) ForBits(in.plan, run, *this);
  }
};

template <int kRows, Form kForm>
void ScoreBlocks(const FoldedBlocks& in, int row, float* out, int64_t out_stride) {
  using Tile = ScoreTile<kRows, kForm>;
  for (int part = 0; part < kParts; part += kScoreParts) {
    Tile(in, row, part, out, out_stride).Run();
  }
}

// All rows, in passes of near equal size.
template <Form kForm>
void ScoreRows(const FoldedBlocks& in, int rows, float* out, int64_t out_stride) {
  ForPasses<kTileRows<kForm>>(rows, [&](auto n, int row) HWY_ATTR {
    ScoreBlocks<n, kForm>(in, row, out + row * out_stride, out_stride);
  });
}

// Queries with their channels in slots: [rows][stride], zeros in empty slots and after the last.
void GatherQueries(const ScoreArgs& args, int64_t stride, float* slots) {
  const PagePlan& plan = *args.run.plan;
  for (int i = 0; i < args.rows; ++i) {
    const float* const q = args.q + i * args.q_stride;
    float* const to = slots + i * stride;
    if (plan.in_order) {
      std::memcpy(to, q, static_cast<size_t>(plan.slots) * sizeof(float));
    } else {
      for (int s = 0; s < plan.slots; ++s) to[s] = plan.channel[s] < 0 ? 0.0f : q[plan.channel[s]];
    }
    for (int64_t s = plan.slots; s < stride; ++s) to[s] = 0.0f;
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

// Pages whose scales hold for whole blocks.
template <Form kForm>
struct PageScores {
  static constexpr int kMostSums = kFusedBlocks * kMaxFusedRows;
  const ScoreArgs& args;
  const PagePlan& plan;
  const int64_t stride;                    // of slots
  float* const q;                          // [rows][stride] in slots
  int32_t* const mids;                     // [stride]
  int32_t* const words;                    // [page][rows][stride]
  float base[kMostSums], unit[kMostSums];  // [page][rows]

  explicit PageScores(const ScoreArgs& a)
      : args(a),
        plan(*a.run.plan),
        stride(plan.slots + kChannelPadding),
        q(a.scratch),
        mids(reinterpret_cast<int32_t*>(q + a.rows * stride)),
        words(mids + stride) {}

  // Folds the scales of n pages and scores blocks [begin, end) of each.
  void Step(int first_page, int n, int begin, int end) {
    const int64_t blocks = plan.blocks();
    const uint8_t* const* const pages = args.run.pages + first_page;
    const int left = args.run.n_pages - first_page;  // from here on
    FoldedBlocks in(plan, stride);
    for (int p = 0; p < n; ++p) {
      const uint8_t* const next = pages[p + kFusedBlocks < left ? p + kFusedBlocks : p];
      for (int b = begin; b < end; ++b) {
        const int i = in.n_blocks++;
        in.codes[i] = pages[p] + static_cast<size_t>(b) * plan.block_bytes;
        in.next[i] = next + static_cast<size_t>(b) * plan.block_bytes;
        in.words[i] = words + p * args.rows * stride;
        in.base[i] = base + p * args.rows;
        in.unit[i] = unit + p * args.rows;
      }
    }
    // Scales lie apart from the codes: nothing else has fetched them.
    for (int p = n; p < 2 * n && p < left; ++p) FetchScales(plan, pages[p]);
    ForRows<kMaxFusedRows>(args.rows, [&](auto rows) HWY_ATTR {
      Fold<rows, kForm>(plan, stride, q, mids, words, base, unit).Run(pages, n);
    });
    ScoreRows<kForm>(in, args.rows, args.out + (first_page * blocks + begin) * kBlockTokens,
                     args.out_stride);
  }

  void Run() {
    const DF df;
    const DI32 di32;
    GatherQueries(args, stride, q);
    for (int s = 0; s < plan.slots; s += kLanes) {
      hn::StoreU(MidWords<kForm>(RoundToInt(hn::LoadU(df, plan.mid.data() + s))), di32, mids + s);
    }
    const int blocks = plan.blocks(), n_pages = args.run.n_pages;
    const int step = blocks < kFusedBlocks ? kFusedBlocks / blocks : 1;
    for (int p = 0; p < n_pages; p += step) {
      for (int b = 0; b < blocks; b += kFusedBlocks) {
        Step(p, Least(step, n_pages - p), b, Least(b + kFusedBlocks, blocks));
      }
    }
  }
};

void Score(const ScoreArgs& args) {
  const PagePlan& plan = *args.run.plan;
  if (plan.raw) return plan.bits[0] == 16 ? ScoreRaw<16>(args) : ScoreRaw<32>(args);
  if (plan.slots == 0 || plan.groups() > 1 || plan.token_scaled() ||
      plan.order != CodeOrder::kForScores) {
    for (int b = 0; b < args.run.n_pages * plan.blocks(); ++b) {
      ScoreDecoded(args, args.run.pages[b / plan.blocks()], b % plan.blocks(),
                   args.out + b * kBlockTokens);
    }
    return;
  }
  const size_t page_bytes = plan.page_bytes();
  for (int p = 0; p < args.run.n_pages && p < kFusedBlocks; ++p) {
    // All of it: what ScoreTile fetches on the way is as far ahead.
    for (size_t i = 0; i < page_bytes; i += 64) hwy::Prefetch(args.run.pages[p] + i);
  }
  if constexpr (kHasByteProducts) {
    if (args.fast) return PageScores<Form::kBytes>(args).Run();
  }
  PageScores<kAccurate>(args).Run();
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
