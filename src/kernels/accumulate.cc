// Accumulation: acc[i][c] += sum_t p[i][t] * latent_tc, from packed pages.
//
// Channels are the outer loop and the pages of the run the inner one, so that the sum over lanes is
// taken once per (channel, row) and run. The z of value = a * level + z needs no codes: sum_t p_t z
// = z * (sum of p over the group).
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
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

constexpr int kAccumulateRows = HWY_TARGET == HWY_AVX3 ? 8 : 3;
constexpr int kRunBlocks = 16;  // blocks between two sums over lanes
// Bytes ahead of the codes in use that are fetched: a run reads its pages side by side, which is
// more streams than the hardware follows well.
constexpr int kAhead = 256;

// The blocks of a run of pages.
struct Run {
  int n_blocks = 0;
  const uint8_t* codes[kRunBlocks];
  const float* a[kRunBlocks];  // [rank]; unused if raw
};

// Lane i of the result is the sum of the lanes of v[i]. The order of the additions is the same for
// every i.
HWY_INLINE hn::Vec<hn::CappedTag<float, 4>> SumsOfLanes(const VF v[4]) {
  const DF df;
  const hn::Repartition<double, DF> dd;
  // Lanes 0..3 of every 128-bit block: sums over pairs of v0, v1, v0, v1, then of v2, v3, v2, v3.
  const VF v01 = hn::Add(hn::InterleaveLower(df, v[0], v[1]), hn::InterleaveUpper(df, v[0], v[1]));
  const VF v23 = hn::Add(hn::InterleaveLower(df, v[2], v[3]), hn::InterleaveUpper(df, v[2], v[3]));
  const auto p01 = hn::BitCast(dd, v01), p23 = hn::BitCast(dd, v23);
  const VF lower = hn::BitCast(df, hn::InterleaveLower(dd, p01, p23));
  const VF upper = hn::BitCast(df, hn::InterleaveUpper(dd, p01, p23));
  return SumOfBlocks(df, hn::Add(lower, upper));
}

// Adds sum_t p_t * (a * level_t) for kRows rows, channel by channel.
template <int kRows>
struct AccumulateTask {
  const PagePlan& plan;
  const Run& run;
  const float* p;  // [token / kLanes][kRows][kLanes]
  float* acc;      // [kRows][acc_stride]
  int64_t acc_stride;
  int c = 0;

  // kChannels channels from c on: two at a time share the loads of p and hide the latency of
  // multiply-add.
  template <int kBits, int kChannels>
  HWY_INLINE void Add(VU8 table) {
    const DF df;
    constexpr int kSums = (kRows * kChannels + 3) / 4 * 4;
    VF sums[kSums];
    for (VF& sum : sums) sum = hn::Zero(df);
    const float* weights = p;
    for (int block = 0; block < run.n_blocks; ++block) {
      const uint8_t* codes = run.codes[block] + plan.code_offset[c];
      hwy::Prefetch(codes + kAhead);
      for (int part = 0; part < kParts; ++part, weights += kRows * kPart) {
        for (int k = 0; k < kChannels; ++k) {
          VF value[kVecs];
          LoadLevels<kBits>(codes + k * 4 * kBits, part, table, value);
          for (int j = 0; j < kVecs; ++j) {
            if constexpr (kBits <= 8) {
              value[j] = hn::Mul(value[j], hn::Set(df, run.a[block][c + k]));
            }
            for (int i = 0; i < kRows; ++i) {
              VF& sum = sums[k * kRows + i];
              sum = hn::MulAdd(value[j], hn::Load(df, weights + (j * kRows + i) * kLanes), sum);
            }
          }
        }
      }
    }
    const hn::CappedTag<float, 4> d4;
    alignas(16) float totals[kSums];
    for (int i = 0; i < kSums; i += 4) hn::Store(SumsOfLanes(sums + i), d4, totals + i);
    for (int k = 0; k < kChannels; ++k) {
      for (int i = 0; i < kRows; ++i) acc[i * acc_stride + c + k] += totals[k * kRows + i];
    }
  }

  // The run of channels with kBits bits that starts at c.
  template <int kBits>
  HWY_INLINE void Channels() {
    const VU8 table = LevelTable(plan, kBits);
    int end = c + 1;
    while (end < plan.rank && plan.bits[end] == kBits) ++end;
    for (; c + 2 <= end; c += 2) Add<kBits, 2>(table);
    if (c < end) {
      Add<kBits, 1>(table);
      ++c;
    }
  }
};

// The rows of one pass: p is copied so that a pass reads it in order and on cache lines.
template <int kRows>
void AccumulateRows(const PagePlan& plan, const Run& run, const AccumulateArgs& args) {
  const DF df;
  alignas(64) float tile[kRows * kRunBlocks * kBlockTokens];
  for (int t = 0; t < run.n_blocks * kBlockTokens; t += kLanes) {
    for (int i = 0; i < kRows; ++i) {
      hn::Store(hn::LoadU(df, args.p + i * args.p_stride + t), df, tile + t * kRows + i * kLanes);
    }
  }
  AccumulateTask<kRows> task{plan, run, tile, args.acc, args.acc_stride};
  while (task.c < plan.rank) ForBits(plan.bits[task.c], task);
}

// AccumulateRows<rows>, rows <= kMost.
template <int kMost>
HWY_INLINE void AccumulateRowsOf(int rows, const PagePlan& plan, const Run& run,
                                 const AccumulateArgs& args) {
  if (rows == kMost) {
    AccumulateRows<kMost>(plan, run, args);
  } else if constexpr (kMost > 1) {
    AccumulateRowsOf<kMost - 1>(rows, plan, run, args);
  }
}

// All rows of args, in passes of near equal size; args.p is that of the run's first token.
void AccumulateRun(const Run& run, AccumulateArgs args) {
  const int passes = (args.rows + kAccumulateRows - 1) / kAccumulateRows;
  for (int pass = 0; pass < passes; ++pass) {
    const int n = args.rows / (passes - pass);
    AccumulateRowsOf<kAccumulateRows>(n, *args.run.plan, run, args);
    args.rows -= n;
    args.p += n * args.p_stride;
    args.acc += n * args.acc_stride;
  }
}

// Sum of n floats, n a multiple of 8.
HWY_INLINE float Sum(const float* x, int n) {
  const hn::CappedTag<float, 8> d;
  auto sum = hn::Zero(d);
  for (int i = 0; i < n; i += static_cast<int>(hn::MaxLanes(d))) {
    sum = hn::Add(sum, hn::LoadU(d, x + i));
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// acc[i][c] += sum over the pages of z[page][c] * sum_t p[i][t].
void AddZeros(const AccumulateArgs& args, const float* z, int64_t stride, float* sums) {
  const DF df;
  const PagePlan& plan = *args.run.plan;
  const int n_pages = args.run.n_pages;
  for (int i = 0; i < args.rows; ++i) {
    for (int page = 0; page < n_pages; ++page) {
      const float* weights = args.p + i * args.p_stride + page * plan.page_tokens;
      sums[page] = Sum(weights, plan.page_tokens);
    }
    for (int c = 0; c < plan.rank; c += kLanes) {
      float* to = args.acc + i * args.acc_stride + c;
      VF sum = LoadFirst(to, plan.rank - c);
      for (int page = 0; page < n_pages; ++page) {
        const VF weight = hn::Set(df, sums[page]);
        sum = hn::MulAdd(weight, hn::LoadU(df, z + page * stride + c), sum);
      }
      StoreFirst(sum, to, plan.rank - c);
    }
  }
}

// Scales change within a block (groups of 8 and 16 tokens, scales per token): channels are decoded
// first.
void AccumulateDecoded(const AccumulateArgs& args, const uint8_t* page, int block, const float* p) {
  const DF df;
  const hn::CappedTag<float, 4> d4;
  const PagePlan& plan = *args.run.plan;
  alignas(64) float values[kLanes * kBlockTokens] = {};
  for (int c = 0; c < plan.rank; c += kLanes) {
    const int n = Least(kLanes, plan.rank - c);
    DecodeChannels(plan, page, block, c, c + n, values);
    for (int i = 0; i < args.rows; ++i) {
      const float* weights = p + i * args.p_stride;
      for (int k = 0; k < n; k += 4) {
        VF sums[4];
        for (VF& sum : sums) sum = hn::Zero(df);
        for (int t = 0; t < kBlockTokens; t += kLanes) {
          const VF weight = hn::LoadU(df, weights + t);
          for (int j = 0; j < 4; ++j) {
            const float* from = values + (k + j) * kBlockTokens + t;
            sums[j] = hn::MulAdd(weight, hn::Load(df, from), sums[j]);
          }
        }
        alignas(16) float totals[4];
        hn::Store(SumsOfLanes(sums), d4, totals);
        for (int j = 0; j < Least(4, n - k); ++j) {
          args.acc[i * args.acc_stride + c + k + j] += totals[j];
        }
      }
    }
  }
}

void Accumulate(const AccumulateArgs& args) {
  const DF df;
  const PagePlan& plan = *args.run.plan;
  if (!plan.raw && (plan.groups() > 1 || plan.token_scaled())) {
    for (int i = 0; i < args.run.n_pages * plan.blocks(); ++i) {
      AccumulateDecoded(args, args.run.pages[i / plan.blocks()], i % plan.blocks(),
                        args.p + i * kBlockTokens);
    }
    return;
  }
  const int64_t stride = plan.rank + kChannelPadding;
  float* a = args.scratch;
  float* z = a + args.run.n_pages * stride;
  if (!plan.raw) {
    for (int page = 0; page < args.run.n_pages; ++page) {
      for (int c = 0; c < plan.rank; c += kLanes) {
        VF va, vz;
        LoadScales(plan, args.run.pages[page], 0, c, va, vz);
        hn::StoreU(va, df, a + page * stride + c);
        hn::StoreU(vz, df, z + page * stride + c);
      }
    }
  }
  const int pages_per_run = kRunBlocks / plan.blocks();
  for (int first = 0; first < args.run.n_pages; first += pages_per_run) {
    Run run;
    for (int page = first; page < args.run.n_pages && page < first + pages_per_run; ++page) {
      for (int block = 0; block < plan.blocks(); ++block) {
        run.codes[run.n_blocks] =
            args.run.pages[page] + static_cast<size_t>(block) * plan.block_bytes;
        run.a[run.n_blocks++] = a + page * stride;
      }
    }
    AccumulateArgs part = args;
    part.p += static_cast<int64_t>(first) * plan.page_tokens;
    AccumulateRun(run, part);
  }
  if (!plan.raw) AddZeros(args, z, stride, z + args.run.n_pages * stride);
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
