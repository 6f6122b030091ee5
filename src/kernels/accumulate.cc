// Accumulation: acc[i][c] += sum_t p[i][t] * latent_tc, from packed pages.
//
// With value = a * (level - mid) + z, the weights of a block are rounded to 16 bits (8 in the fast
// form) of the largest of them, w_t units, and
//     sum_t p_t value_t ~ unit * a * sum_t w_t level_t + (z - a mid) * unit * sum_t w_t:
// the loop over codes is unpack, multiply and add integers. Quads are the outer loop and the blocks
// of a run the inner one, so that the sums of a quad stay in registers. A weight is off by at most
// half a unit, max_t p_t / 65534 (/ 254 in the fast form), in both terms alike.
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
  int64_t stride;  // of slots
  float* a;        // [page][stride]
  float* rest;     // [page][stride]: z - a * mid
  int n_blocks = 0;
  const uint8_t* codes[kRunBlocks];

  int page(int block) const { return block / plan.blocks(); }

  // n pages, at most kRunBlocks blocks of them.
  void Load(const uint8_t* const* pages, int n) {
    const DF df;
    n_blocks = 0;
    for (int p = 0; p < n; ++p) {
      for (int block = 0; block < plan.blocks(); ++block) {
        codes[n_blocks++] = pages[p] + static_cast<size_t>(block) * plan.block_bytes;
      }
      for (int s = 0; s < plan.slots; s += kLanes) {
        VF va, vz;
        LoadScales(plan, pages[p], 0, s, va, vz);
        const VF mid = hn::LoadU(df, plan.mid.data() + s);
        hn::StoreU(va, df, a + p * stride + s);
        hn::StoreU(hn::NegMulAdd(va, mid, vz), df, rest + p * stride + s);
      }
    }
  }

  // What is read first of pages that come next: later codes are fetched on the way.
  void Fetch(const uint8_t* const* pages, int n) const {
    for (int p = 0; p < n; ++p) {
      for (int block = 0; block < plan.blocks(); ++block) {
        const uint8_t* const first = pages[p] + static_cast<size_t>(block) * plan.block_bytes;
        for (int i = 0; i < kAhead; i += 64) hwy::Prefetch(first + i);
      }
      FetchScales(plan, pages[p]);
    }
  }
};

// Weights of kRows rows and a run of blocks as integers, each vector as the codes of a part want
// it.
template <int kRows, bool kFast>
struct Weights {
  static constexpr int kWords = kFast ? 1 : 2;  // even and odd tokens apart
  static constexpr int kPadded = (kRunBlocks * kRows + 3) / 4 * 4;
  static constexpr float kRange = kFast ? 127 : 32767;
  alignas(64) int32_t words[kRunBlocks * kParts * kRows * kWords * kLanes];
  // [block][row]
  float unit[kPadded];
  float total[kPadded];  // sum of the rounded weights

  HWY_INLINE int32_t* at(int block, int part, int row) {
    return words + ((block * kParts + part) * kRows + row) * kWords * kLanes;
  }
  HWY_INLINE const int32_t* at(int block, int part, int row) const {
    return words + ((block * kParts + part) * kRows + row) * kWords * kLanes;
  }

  void Make(int n_blocks, const float* p, int64_t p_stride) {
    const DF df;
    const hn::CappedTag<float, 4> d4;
    const int n = n_blocks * kRows;
    VF most[kPadded], sums[kPadded];
    float inverse[kPadded];
    for (int j = 0; j < n; ++j) {
      const float* const from = p + j % kRows * p_stride + j / kRows * kBlockTokens;
      most[j] = hn::Abs(hn::LoadU(df, from));
      for (int t = kLanes; t < kBlockTokens; t += kLanes) {
        most[j] = hn::Max(most[j], hn::Abs(hn::LoadU(df, from + t)));
      }
    }
    for (int j = n; j < kPadded && j < n + 3; ++j) most[j] = sums[j] = hn::Zero(df);
    for (int j = 0; j < n; j += 4) {
      IntegerUnits(MaxesOfLanes(most + j), kRange, inverse + j, unit + j);
    }
    for (int j = 0; j < n; ++j) {
      const float* const from = p + j % kRows * p_stride + j / kRows * kBlockTokens;
      sums[j] = Round(from, hn::Set(df, inverse[j]), j / kRows, j % kRows);
    }
    for (int j = 0; j < n; j += 4) {
      hn::StoreU(hn::Mul(SumsOfLanes(sums + j), hn::LoadU(d4, unit + j)), d4, total + j);
    }
  }

  // Writes the words of one row and block; returns partial sums of the integers.
  HWY_INLINE VF Round(const float* p, VF inverse, int block, int row) {
    const DF df;
    const DI32 di32;
    VI32 sum = hn::Zero(di32);
    for (int part = 0; part < kParts; ++part) {
      const VI32 w = RoundToInt(hn::Mul(hn::LoadU(df, p + part * kLanes), inverse));
      sum = hn::Add(sum, w);
      int32_t* const to = at(block, part, row);
      if constexpr (kFast) {
        hn::Store(hn::Broadcast<0>(FoursUp(w)), di32, to);
      } else {
        const VI32 pairs = PairUp(w);
        hn::Store(hn::Broadcast<0>(pairs), di32, to);
        hn::Store(hn::Broadcast<1>(pairs), di32, to + kLanes);
      }
    }
    return hn::ConvertTo(df, sum);
  }
};

// Adds unit * a * sum_t w_t level_t for kRows rows, quad by quad. Lane l of a 128-bit block is
// channel l of the quad.
template <int kRows, bool kFast>
struct AccumulateTask {
  const Run& run;
  const Weights<kRows, kFast>& weights;
  const float* scaled;  // a * unit: [block][kRows][stride]
  float* acc;           // [kRows][stride] in slots
  int64_t stride;

  // unit * a * (sum of products) of one block; every row as a vector of partial sums. scaled: of
  // the block and quad.
  template <int kBits, LevelKind kKind>
  HWY_INLINE void AddBlock(const uint8_t* codes, VU8 table, int block, const float* a,
                           VF* sums) const {
    const DF df;
    const DI32 di32;
    VI32 sum[kRows];
    for (VI32& s : sum) s = hn::Zero(di32);
    for (int part = 0; part < kParts; ++part) {
      const VU8 level = LoadLevels<kBits, kKind>(codes, part, table);
      if constexpr (kFast) {
        for (int i = 0; i < kRows; ++i) {
          const VI32 w = hn::Load(di32, weights.at(block, part, i));
          sum[i] = AddFours(sum[i], level, hn::BitCast(DU8(), w));
        }
      } else {
        const VI16 even = EvenLevels(level), odd = OddLevels(level);
        for (int i = 0; i < kRows; ++i) {
          const int32_t* const w = weights.at(block, part, i);
          sum[i] = AddPairs(sum[i], even, hn::BitCast(DI16(), hn::Load(di32, w)));
          sum[i] = AddPairs(sum[i], odd, hn::BitCast(DI16(), hn::Load(di32, w + kLanes)));
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      sums[i] = hn::MulAdd(hn::ConvertTo(df, sum[i]), hn::LoadDup128(df, a + i * stride), sums[i]);
    }
  }

  template <int kBits, LevelKind kKind>
  HWY_INLINE void Quads(const QuadRun& quads) {
    const DF df;
    const hn::CappedTag<float, 4> d4;
    const VU8 table = LevelTable<kBits, kKind>();
    for (int q = 0; q < quads.count; ++q) {
      const size_t offset = quads.offset + static_cast<size_t>(q) * 16 * kBits;
      const int slot = (quads.first + q) * kQuad;
      VF sums[kRows];
      for (VF& sum : sums) sum = hn::Zero(df);
      for (int block = 0; block < run.n_blocks; ++block) {
        const uint8_t* const codes = run.codes[block] + offset;
        hwy::Prefetch(codes + kAhead);
        AddBlock<kBits, kKind>(codes, table, block, scaled + block * kRows * stride + slot, sums);
      }
      for (int i = 0; i < kRows; ++i) {
        float* const to = acc + i * stride + slot;
        hn::StoreU(hn::Add(hn::LoadU(d4, to), SumOfBlocks(df, sums[i])), d4, to);
      }
    }
  }
};

// kRows rows of a run. p: of its first token. acc: [kRows][stride] in slots. scaled:
// [kRunBlocks][kRows][stride].
template <int kRows, bool kFast>
void AccumulateRows(const Run& run, const float* p, int64_t p_stride, float* acc, float* scaled) {
  const DF df;
  const int64_t stride = run.stride;
  Weights<kRows, kFast> weights;
  weights.Make(run.n_blocks, p, p_stride);
  for (int i = 0; i < kRows; ++i) {
    for (int s = 0; s < run.plan.slots; s += kLanes) {
      VF sum = hn::LoadU(df, acc + i * stride + s);
      for (int block = 0; block < run.n_blocks; ++block) {
        const int64_t at = run.page(block) * stride + s;
        const int j = block * kRows + i;
        const VF product = hn::Mul(hn::LoadU(df, run.a + at), hn::Set(df, weights.unit[j]));
        hn::StoreU(product, df, scaled + j * stride + s);
        sum = hn::MulAdd(hn::Set(df, weights.total[j]), hn::LoadU(df, run.rest + at), sum);
      }
      hn::StoreU(sum, df, acc + i * stride + s);
    }
  }
  AccumulateTask<kRows, kFast> task{run, weights, scaled, acc, stride};
  for (const QuadRun& quads : run.plan.runs) ForBits(run.plan, quads, task);
}

// AccumulateRows<rows>, rows <= kMost.
template <int kMost, bool kFast>
HWY_INLINE void AccumulateRowsOf(int rows, const Run& run, const float* p, int64_t p_stride,
                                 float* acc, float* scaled) {
  if (rows == kMost) {
    AccumulateRows<kMost, kFast>(run, p, p_stride, acc, scaled);
  } else if constexpr (kMost > 1) {
    AccumulateRowsOf<kMost - 1, kFast>(rows, run, p, p_stride, acc, scaled);
  }
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

// Pages whose scales hold for whole blocks, all rows, into acc in slots.
void AccumulateQuads(const AccumulateArgs& args, Run run, float* acc, float* scaled) {
  const PagePlan& plan = *args.run.plan;
  const bool fast = args.fast && kHasByteProducts;
  const int step = kRunBlocks / plan.blocks(), n_pages = args.run.n_pages;
  const int passes = (args.rows + kAccumulateRows - 1) / kAccumulateRows;
  run.Fetch(args.run.pages, Least(step, n_pages));
  for (int page = 0; page < n_pages; page += step) {
    run.Load(args.run.pages + page, Least(step, n_pages - page));
    const int next = page + step;
    if (next < n_pages) run.Fetch(args.run.pages + next, Least(step, n_pages - next));
    for (int pass = 0, row = 0; pass < passes; ++pass) {
      const int n = (args.rows - row) / (passes - pass);
      const float* const p = args.p + row * args.p_stride + page * plan.page_tokens;
      float* const to = acc + row * run.stride;
      if (kHasByteProducts && fast) {
        AccumulateRowsOf<kAccumulateRows, kHasByteProducts>(n, run, p, args.p_stride, to, scaled);
      } else {
        AccumulateRowsOf<kAccumulateRows, false>(n, run, p, args.p_stride, to, scaled);
      }
      row += n;
    }
  }
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
  const int64_t stride = plan.slots + kChannelPadding;
  float* const a = args.scratch;
  float* const rest = a + kRunBlocks * stride;
  float* const acc = rest + kRunBlocks * stride;  // [rows][stride] in slots
  std::memset(acc, 0, static_cast<size_t>(args.rows * stride) * sizeof(float));
  AccumulateQuads(args, {plan, stride, a, rest}, acc, acc + args.rows * stride);
  for (int i = 0; i < args.rows; ++i) {
    for (int c = 0; c < plan.rank; ++c) {
      args.acc[i * args.acc_stride + c] += acc[i * stride + plan.slot[c]];
    }
  }
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
