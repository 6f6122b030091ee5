// Accumulation: acc[i][c] += sum_t p[i][t] * latent_tc, from packed pages.
//
// Channels are the outer loop and the pages of the run the inner one, so that the sum over lanes is
// taken once per (channel, row) and run. The z of value = a * level + z needs no codes: sum_t p_t z
// = z * (sum of p over the group).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/accumulate.cc"
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

constexpr int kAccumulateRows = HWY_TARGET == HWY_AVX3 ? 4 : 3;
constexpr int kSums = 2;  // partial sums per row, to hide the latency of multiply-add

// The parts of a run that the loops over channels need.
struct RunOfPages {
  const PagePlan& plan;
  const uint8_t* const* pages;
  int n_pages;
  const float* a;  // [n_pages][stride]; unused if raw
  const float* z;
  int64_t stride;
};

// Adds sum_t p_t * (a * level_t) for kRows rows, channel by channel.
template <int kRows>
struct AccumulateTask {
  const RunOfPages& run;
  const float* p;  // [kRows][p_stride]
  int64_t p_stride;
  float* acc;  // [kRows][acc_stride]
  int64_t acc_stride;
  int c = 0;

  template <int kBits>
  HWY_INLINE void AddPage(const uint8_t* page, VU8 table, float scale, const float* weights,
                          VF* sum) const {
    const DF df;
    const VF a = hn::Set(df, scale);
    for (int block = 0; block < run.plan.blocks(); ++block) {
      const uint8_t* codes = page + static_cast<size_t>(block) * run.plan.block_bytes;
      for (int part = 0; part < kParts; ++part, weights += kPart) {
        VF value[kVecs];
        LoadLevels<kBits>(codes, part, table, value);
        for (int j = 0; j < kVecs; ++j) {
          if constexpr (kBits <= 8) value[j] = hn::Mul(value[j], a);
          for (int i = 0; i < kRows; ++i) {
            VF& to = sum[i * kSums + j % kSums];
            to = hn::MulAdd(value[j], hn::LoadU(df, weights + i * p_stride + j * kLanes), to);
          }
        }
      }
    }
  }

  // The run of channels with kBits bits that starts at c.
  template <int kBits>
  HWY_INLINE void Channels() {
    const DF df;
    const PagePlan& plan = run.plan;
    const VU8 table = LevelTable(plan, kBits);
    for (; c < plan.rank && plan.bits[c] == kBits; ++c) {
      VF sum[kRows * kSums];
      for (VF& s : sum) s = hn::Zero(df);
      const float* weights = p;
      for (int page = 0; page < run.n_pages; ++page, weights += plan.page_tokens) {
        const float scale = kBits <= 8 ? run.a[page * run.stride + c] : 1.0f;
        AddPage<kBits>(run.pages[page] + plan.code_offset[c], table, scale, weights, sum);
      }
      for (int i = 0; i < kRows; ++i) {
        const VF both = hn::Add(sum[i * kSums], sum[i * kSums + 1]);
        acc[i * acc_stride + c] += hn::GetLane(hn::SumOfLanes(df, both));
      }
    }
  }
};

template <int kRows>
void AccumulateRows(const RunOfPages& run, const float* p, int64_t p_stride, float* acc,
                    int64_t acc_stride) {
  AccumulateTask<kRows> task{run, p, p_stride, acc, acc_stride};
  while (task.c < run.plan.rank) ForBits(run.plan.bits[task.c], task);
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
void AddZeros(const AccumulateArgs& args, const RunOfPages& run) {
  const DF df;
  const PagePlan& plan = run.plan;
  float* sums = args.scratch + 2 * run.n_pages * run.stride;  // [rows][n_pages]
  for (int i = 0; i < args.rows; ++i) {
    for (int page = 0; page < run.n_pages; ++page) {
      const float* weights = args.p + i * args.p_stride + page * plan.page_tokens;
      sums[i * run.n_pages + page] = Sum(weights, plan.page_tokens);
    }
  }
  for (int i = 0; i < args.rows; ++i) {
    for (int c = 0; c < plan.rank; c += kLanes) {
      float* to = args.acc + i * args.acc_stride + c;
      VF sum = LoadFirst(to, plan.rank - c);
      for (int page = 0; page < run.n_pages; ++page) {
        const VF weight = hn::Set(df, sums[i * run.n_pages + page]);
        sum = hn::MulAdd(weight, hn::LoadU(df, run.z + page * run.stride + c), sum);
      }
      StoreFirst(sum, to, plan.rank - c);
    }
  }
}

// Groups of 8 and 16 tokens: the scales change within a block, so channels are decoded first.
void AccumulateSmallGroups(const AccumulateArgs& args) {
  const DF df;
  const PagePlan& plan = *args.run.plan;
  alignas(64) float values[kBlockTokens];
  for (int c = 0; c < plan.rank; ++c) {
    VF sums[kMaxFusedRows];
    for (VF& sum : sums) sum = hn::Zero(df);
    for (int page = 0; page < args.run.n_pages; ++page) {
      DecodeChannel(plan, args.run.pages[page], 0, c, values);
      for (int i = 0; i < args.rows; ++i) {
        const float* weights = args.p + i * args.p_stride + page * kBlockTokens;
        for (int t = 0; t < kBlockTokens; t += kLanes) {
          sums[i] = hn::MulAdd(hn::Load(df, values + t), hn::LoadU(df, weights + t), sums[i]);
        }
      }
    }
    for (int i = 0; i < args.rows; ++i) {
      args.acc[i * args.acc_stride + c] += hn::GetLane(hn::SumOfLanes(df, sums[i]));
    }
  }
}

void Accumulate(const AccumulateArgs& args) {
  const DF df;
  const PagePlan& plan = *args.run.plan;
  if (!plan.raw && plan.groups() > 1) {
    AccumulateSmallGroups(args);
    return;
  }
  const int64_t stride = plan.rank + kChannelPadding;
  float* a = args.scratch;
  float* z = a + args.run.n_pages * stride;
  const RunOfPages run{plan, args.run.pages, args.run.n_pages, a, z, stride};
  if (!plan.raw) {
    for (int page = 0; page < run.n_pages; ++page) {
      for (int c = 0; c < plan.rank; c += kLanes) {
        VF va, vz;
        LoadScales(plan, run.pages[page], 0, c, va, vz);
        hn::StoreU(va, df, a + page * stride + c);
        hn::StoreU(vz, df, z + page * stride + c);
      }
    }
  }
  const int passes = (args.rows + kAccumulateRows - 1) / kAccumulateRows;
  for (int pass = 0, row = 0; pass < passes; ++pass) {
    const int n = (args.rows - row) / (passes - pass);
    const float* p = args.p + row * args.p_stride;
    float* acc = args.acc + row * args.acc_stride;
    switch (n) {
      case 1:
        AccumulateRows<1>(run, p, args.p_stride, acc, args.acc_stride);
        break;
      case 2:
        AccumulateRows<2>(run, p, args.p_stride, acc, args.acc_stride);
        break;
      case 3:
        AccumulateRows<3>(run, p, args.p_stride, acc, args.acc_stride);
        break;
      default:
        AccumulateRows<kAccumulateRows>(run, p, args.p_stride, acc, args.acc_stride);
        break;
    }
    row += n;
  }
  if (!plan.raw) AddZeros(args, run);
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
