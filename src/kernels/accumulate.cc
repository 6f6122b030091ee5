// Accumulation: acc[i][c] += sum_t p[i][t] * latent_tc, from packed pages.
//
// With value = a * (level - mid) + z, the weights of a block are rounded to 16 bits (8 in the fast
// form) of the largest of them, w_t units, and
//     sum_t p_t value_t ~ unit * a * sum_t w_t level_t + (z - a mid) * unit * sum_t w_t:
// the loop over codes is unpack, multiply and add integers. Blocks are the outer loop and quads the
// inner one, so that codes are read in order while the weights stay in registers; the sum of a quad
// is a vector whose 128-bit blocks are added up at the end. A weight is off by at most half a unit,
// max_t p_t / 65534 (/ 254 in the fast form), in both terms alike.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/accumulate.cc"
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

constexpr int kAccumulateRows = PALU_IS_AVX512(HWY_TARGET) ? 8 : 4;
constexpr int kRunBlocks = kFusedBlocks;

// The blocks of some pages, and their scales as all rows see them.
struct Run {
  const PagePlan& plan;
  const int64_t stride;  // of slots
  float* const a;        // [page][stride]
  float* const rest;     // [page][stride]: z - a * mid
  int n_blocks = 0;
  const uint8_t* codes[kRunBlocks];
  const uint8_t* next[kRunBlocks];  // what is fetched meanwhile
  int64_t scales[kRunBlocks];       // of the block's page in a and rest

  Run(const PagePlan& p, int64_t n, float* to_a, float* to_rest)
      : plan(p), stride(n), a(to_a), rest(to_rest) {}

  // n pages, at most kRunBlocks blocks of them; `left` pages lie there.
  void Load(const uint8_t* const* pages, int n, int left) {
    n_blocks = 0;
    for (int p = 0; p < n; ++p) {
      const uint8_t* const page = pages[p];
      const uint8_t* const later = pages[p + n < left ? p + n : p];
      LoadPage(page, p * stride);
      for (int b = 0; b < plan.blocks(); ++b, ++n_blocks) {
        codes[n_blocks] = page + static_cast<size_t>(b) * plan.block_bytes;
        next[n_blocks] = later + static_cast<size_t>(b) * plan.block_bytes;
        scales[n_blocks] = p * stride;
      }
    }
  }

  HWY_INLINE void LoadPage(const uint8_t* page, int64_t at) const {
    const DF df;
    const ChannelScales from(plan, page, 0);
    const int slots = plan.slots;
    const float* const mids = plan.mid.data();
    float* const to_a = a + at;
    float* const to_rest = rest + at;
    for (int s = 0; s < slots; s += kLanes) {
      const VF scale = from.a(s);
      hn::StoreU(scale, df, to_a + s);
      hn::StoreU(hn::NegMulAdd(scale, hn::LoadU(df, mids + s), from.z(s, scale)), df, to_rest + s);
    }
  }
};

// Weights of kRows rows and a run of blocks as integers, each vector as the codes of a part want
// it.
template <int kRows, bool kFast>
struct Weights {
  static constexpr int kWords = kFast ? 1 : 2;                 // even and odd tokens apart
  static constexpr int kBlockWords = kParts * kRows * kWords;  // vectors
  static constexpr int kPadded = (kRunBlocks * kRows + 3) / 4 * 4;
  static constexpr float kRange = kFast ? 127 : 32767;
  alignas(64) int32_t words[kRunBlocks * kBlockWords * kLanes];  // [block][part][row][word]
  // [block][row]
  float unit[kPadded];
  float total[kPadded];  // sum of the rounded weights

  // What is done to one row and block is a chain of dependent operations: every step is done to all
  // of them before the next.
  void Make(int n_blocks, const float* p, int64_t p_stride) {
    const DF df;
    const hn::CappedTag<float, 4> d4;
    const int n = n_blocks * kRows;
    VF most[kPadded], sums[kPadded];
    float inverse[kPadded];
    for (int block = 0; block < n_blocks; ++block) {
      for (int i = 0; i < kRows; ++i) {
        const float* const from = p + i * p_stride + block * kBlockTokens;
        VF largest = hn::Zero(df);
        for (int t = 0; t < kBlockTokens; t += kLanes) {
          largest = MaxAbs(largest, hn::LoadU(df, from + t));
        }
        most[block * kRows + i] = largest;
      }
    }
    for (int j = n; j < kPadded && j < n + 3; ++j) most[j] = sums[j] = hn::Zero(df);
    for (int j = 0; j < n; j += 4) {
      IntegerUnits(MaxesOfLanes(most + j), kRange, inverse + j, unit + j);
    }
    for (int block = 0; block < n_blocks; ++block) {
      for (int i = 0; i < kRows; ++i) {
        const int j = block * kRows + i;
        sums[j] = Round(p + i * p_stride + block * kBlockTokens, hn::Set(df, inverse[j]),
                        words + (block * kBlockWords + i * kWords) * kLanes);
      }
    }
    for (int j = 0; j < n; j += 4) {
      hn::StoreU(hn::Mul(SumsOfLanes(sums + j), hn::LoadU(d4, unit + j)), d4, total + j);
    }
  }

  // Writes the words of one row and block; returns partial sums of the integers. to: of part 0.
  HWY_INLINE static VF Round(const float* p, VF inverse, int32_t* to) {
    const DF df;
    const DI32 di32;
    VI32 sum = hn::Zero(di32);
    for (int part = 0; part < kParts; ++part, to += kRows * kWords * kLanes) {
      const VI32 w = RoundToInt(hn::Mul(hn::LoadU(df, p + part * kLanes), inverse));
      sum = hn::Add(sum, w);
      if constexpr (kFast) {
        hn::Store(AllFours(w), di32, to);
      } else {
        hn::Store(EvenPairs(w), di32, to);
        hn::Store(OddPairs(w), di32, to + kLanes);
      }
    }
    return hn::ConvertTo(df, sum);
  }
};

// Adds unit * a * sum_t w_t level_t for kRows rows, block by block. Lane l of a 128-bit block is
// channel l of the quad.
template <int kRows, bool kFast>
struct AccumulateTask {
  using RowWeights = Weights<kRows, kFast>;
  static constexpr int kWords = RowWeights::kWords;
  // Weights of a block that stay in registers; more are loaded where they are used.
  static constexpr bool kHeld = RowWeights::kBlockWords <= (PALU_IS_AVX512(HWY_TARGET) ? 16 : 4);
  const Run& run;
  const RowWeights& weights;
  const float* scaled;  // a * unit: [block][kRows][stride]
  float* acc;           // [quad][kRows][kLanes]

  template <int kBits, LevelKind kKind>
  HWY_INLINE void Quads(const QuadRun& quads) {
    const VU8 table = LevelTable<kBits, kKind>();
    for (int block = 0; block < run.n_blocks; ++block) {
      AddBlock<kBits, kKind>(quads, table, block);
    }
  }

  template <int kBits, LevelKind kKind>
  HWY_INLINE void AddBlock(const QuadRun& quads, VU8 table, int block) const {
    const DF df;
    const DI32 di32;
    const int64_t stride = run.stride;
    const uint8_t* codes = run.codes[block] + quads.offset;
    const uint8_t* next = run.next[block] + quads.offset;
    const float* a = scaled + block * kRows * stride + quads.first * kQuad;
    float* to = acc + quads.first * kRows * kLanes;
    const int32_t* const words = weights.words + block * RowWeights::kBlockWords * kLanes;
    VI32 held[kHeld ? RowWeights::kBlockWords : 1];
    if constexpr (kHeld) {
      for (int j = 0; j < RowWeights::kBlockWords; ++j) {
        held[j] = hn::Load(di32, words + j * kLanes);
      }
    }
    const auto weight = [&](int j) HWY_ATTR {
      return kHeld ? held[kHeld ? j : 0] : hn::Load(di32, words + j * kLanes);
    };
    for (int q = quads.count; q > 0; --q, codes += 16 * kBits, next += 16 * kBits) {
      VI32 sum[kRows];
      for (VI32& s : sum) s = hn::Zero(di32);
      hwy::Prefetch(next);
      for (int part = 0; part < kParts; ++part) {
        AddPart(LoadLevels<kBits, kKind>(codes, part, table), weight, part * kRows * kWords, sum);
      }
      for (int i = 0; i < kRows; ++i, to += kLanes) {
        const VF scale = hn::LoadDup128(df, a + i * stride);
        hn::StoreU(hn::MulAdd(hn::ConvertTo(df, sum[i]), scale, hn::LoadU(df, to)), df, to);
      }
      a += kQuad;
    }
  }

  // Products of the levels of one part. first: weight of row 0.
  template <typename W>
  HWY_INLINE static void AddPart(VU8 level, const W& weight, int first, VI32* sum) {
    if constexpr (kFast) {
      for (int i = 0; i < kRows; ++i) {
        sum[i] = AddFours(sum[i], level, hn::BitCast(DU8(), weight(first + i)));
      }
    } else {
      const VI16 even = EvenLevels(level), odd = OddLevels(level);
      for (int i = 0; i < kRows; ++i) {
        const int j = first + i * kWords;
        sum[i] = AddPairs(sum[i], even, hn::BitCast(DI16(), weight(j)));
        sum[i] = AddPairs(sum[i], odd, hn::BitCast(DI16(), weight(j + 1)));
      }
    }
  }
};

// kRows rows of a run. p: of its first token. acc: [quad][kRows][kLanes]; rest: [kRows][stride].
// scaled: [kRunBlocks][kRows][stride].
template <int kRows, bool kFast>
void AccumulateRows(const Run& run, const float* p, int64_t p_stride, float* acc, float* rest,
                    float* scaled) {
  const DF df;
  const int64_t stride = run.stride;
  const int slots = run.plan.slots, n_blocks = run.n_blocks;
  Weights<kRows, kFast> weights;
  weights.Make(n_blocks, p, p_stride);
  for (int s = 0; s < slots; s += kLanes) {
    VF sum[kRows];
    for (int i = 0; i < kRows; ++i) sum[i] = hn::LoadU(df, rest + i * stride + s);
    for (int block = 0; block < n_blocks; ++block) {
      const int64_t at = run.scales[block] + s;
      const VF a = hn::LoadU(df, run.a + at), rest_of_page = hn::LoadU(df, run.rest + at);
      float* const to = scaled + block * kRows * stride + s;
      for (int i = 0; i < kRows; ++i) {
        const int j = block * kRows + i;
        hn::StoreU(hn::Mul(a, hn::Set(df, weights.unit[j])), df, to + i * stride);
        sum[i] = hn::MulAdd(hn::Set(df, weights.total[j]), rest_of_page, sum[i]);
      }
    }
    for (int i = 0; i < kRows; ++i) hn::StoreU(sum[i], df, rest + i * stride + s);
  }
  AccumulateTask<kRows, kFast> task{run, weights, scaled, acc};
  for (const QuadRun& quads : run.plan.runs) ForBits(run.plan, quads, task);
}

// Scales change within a block (groups of 8 and 16 tokens, scales per token), or the codes are in
// order for scores: channels are decoded first.
void AccumulateDecoded(const AccumulateArgs& args, const uint8_t* page, int block, const float* p) {
  const DF df;
  const PagePlan& plan = *args.run.plan;
  alignas(64) float values[kQuadCodes];
  const hn::CappedTag<float, 4> d4;
  for (int quad = 0; quad < plan.slots / kQuad; ++quad) {
    DecodeQuad(plan, page, block, quad, values);
    for (int i = 0; i < args.rows; ++i) {
      VF sums[kQuad];
      for (VF& sum : sums) sum = hn::Zero(df);
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        const VF weight = hn::LoadU(df, p + i * args.p_stride + t);
        for (int l = 0; l < kQuad; ++l) {
          sums[l] = hn::MulAdd(weight, hn::Load(df, values + l * kBlockTokens + t), sums[l]);
        }
      }
      alignas(16) float totals[kQuad];
      hn::Store(SumsOfLanes(sums), d4, totals);
      for (int l = 0; l < kQuad; ++l) {
        const int c = plan.channel[quad * kQuad + l];
        if (c >= 0) args.acc[i * args.acc_stride + c] += totals[l];
      }
    }
  }
}

// Adds one row to args.acc. sums: [quad][quad_stride], of kLanes each; rest: in slots, overwritten.
void AddRow(const PagePlan& plan, const float* sums, int64_t quad_stride, float* rest, float* acc) {
  const DF df;
  const hn::CappedTag<float, 4> d4;
  for (int s = 0; s < plan.slots; s += kQuad, sums += quad_stride) {
    const auto sum = hn::Add(SumOfBlocks(df, hn::LoadU(df, sums)), hn::LoadU(d4, rest + s));
    if (plan.in_order) {
      hn::StoreU(hn::Add(sum, hn::LoadU(d4, acc + s)), d4, acc + s);
    } else {
      hn::StoreU(sum, d4, rest + s);
    }
  }
  for (int c = 0; c < plan.rank && !plan.in_order; ++c) acc[c] += rest[plan.slot[c]];
}

// Pages whose scales hold for whole blocks.
template <bool kFast>
void AccumulateQuads(const AccumulateArgs& args) {
  const PagePlan& plan = *args.run.plan;
  const int64_t stride = plan.slots + kChannelPadding, quads = plan.slots / kQuad;
  float* const a = args.scratch;
  float* const scaled = a + 2 * kRunBlocks * stride;
  float* const rest = scaled + args.rows * kRunBlocks * stride;  // [rows][stride]
  float* const acc = rest + args.rows * stride;  // of every pass [quad][its rows][kLanes]
  const int64_t sums = args.rows * (stride + quads * kLanes);
  std::memset(rest, 0, static_cast<size_t>(sums) * sizeof(float));
  Run run(plan, stride, a, a + kRunBlocks * stride);
  const int step = kRunBlocks / plan.blocks(), n_pages = args.run.n_pages;
  for (int page = 0; page < n_pages; page += step) {
    const uint8_t* const* const pages = args.run.pages + page;
    run.Load(pages, Least(step, n_pages - page), n_pages - page);
    // Scales lie apart from the codes: nothing else has fetched them.
    for (int p = step; p < 2 * step && p < n_pages - page; ++p) FetchScales(plan, pages[p]);
    ForPasses<kAccumulateRows>(args.rows, [&](auto n, int row) HWY_ATTR {
      const float* const p = args.p + row * args.p_stride + page * plan.page_tokens;
      AccumulateRows<n, kFast>(run, p, args.p_stride, acc + row * quads * kLanes,
                               rest + row * stride, scaled);
    });
  }
  ForPasses<kAccumulateRows>(args.rows, [&](auto n, int row) HWY_ATTR {
    const float* const from = acc + row * quads * kLanes;
    for (int i = 0; i < n; ++i) {
      AddRow(plan, from + i * kLanes, n * kLanes, rest + (row + i) * stride,
             args.acc + (row + i) * args.acc_stride);
    }
  });
}

void Accumulate(const AccumulateArgs& args) {
  const PagePlan& plan = *args.run.plan;
  if (plan.raw) return plan.bits[0] == 16 ? AccumulateRaw<16>(args) : AccumulateRaw<32>(args);
  if (plan.groups() > 1 || plan.token_scaled() || plan.order != CodeOrder::kForSums ||
      plan.blocks() > kRunBlocks) {
    for (int b = 0; b < args.run.n_pages * plan.blocks(); ++b) {
      AccumulateDecoded(args, args.run.pages[b / plan.blocks()], b % plan.blocks(),
                        args.p + b * kBlockTokens);
    }
    return;
  }
  const int first = Least(kRunBlocks / plan.blocks(), args.run.n_pages);
  const size_t page_bytes = plan.page_bytes();
  for (int p = 0; p < first; ++p) {
    for (size_t i = 0; i < page_bytes; i += 64) hwy::Prefetch(args.run.pages[p] + i);
  }
  if constexpr (kHasByteProducts) {
    if (args.fast) return AccumulateQuads<kHasByteProducts>(args);
  }
  AccumulateQuads<false>(args);
}

void AddAccumulateTarget(KernelTable& table) { table.accumulate = Accumulate; }

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace palu {
PALU_EXPORT_KERNELS(AddAccumulate)
}  // namespace palu
#endif
