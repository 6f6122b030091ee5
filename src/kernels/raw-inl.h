// File: raw-inl.h - scores and sums of exact tokens: pages of fp16 or f32 values without scales.
#if defined(PALU_SRC_KERNELS_RAW_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef PALU_SRC_KERNELS_RAW_INL_H_
#undef PALU_SRC_KERNELS_RAW_INL_H_
#else
#define PALU_SRC_KERNELS_RAW_INL_H_
#endif

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

// Rows whose sums fit the registers, at kRawVecs vectors of tokens each.
inline constexpr int kRawRows = PALU_IS_AVX512(HWY_TARGET) ? 8 : 3;
inline constexpr int kRawVecs = PALU_IS_AVX512(HWY_TARGET) ? 2 : 4;
inline constexpr int kRawParts = kBlockTokens / (kRawVecs * kLanes);

// Tokens of one channel: kRawVecs vectors from `token` of the block on.
template <int kBits>
HWY_INLINE void LoadRaw(const uint8_t* channel, int token, VF* out) {
  const DF df;
  for (int j = 0; j < kRawVecs; ++j) {
    const int t = token + j * kLanes;
    if constexpr (kBits == 32) {
      out[j] = hn::LoadU(df, reinterpret_cast<const float*>(channel) + t);
    } else {
      out[j] = LoadF16(reinterpret_cast<const uint16_t*>(channel) + t);
    }
  }
}

// out[i][t] = sum_c q[i][c] * value[c][t] for kRows rows of one block. next: the same block of the
// next page, which is fetched meanwhile.
template <int kBits, int kRows>
void ScoreRawBlock(int rank, const uint8_t* codes, const uint8_t* next, const float* q,
                   int64_t q_stride, float* out, int64_t out_stride) {
  const DF df;
  for (int part = 0; part < kRawParts; ++part) {
    VF sum[kRows * kRawVecs];
    for (VF& s : sum) s = hn::Zero(df);
    for (int c = 0; c < rank; ++c) {
      VF value[kRawVecs];
      hwy::Prefetch(next + c * 4 * kBits);
      LoadRaw<kBits>(codes + c * 4 * kBits, part * kRawVecs * kLanes, value);
      for (int i = 0; i < kRows; ++i) {
        const VF weight = hn::Set(df, q[i * q_stride + c]);
        for (int j = 0; j < kRawVecs; ++j) {
          sum[i * kRawVecs + j] = hn::MulAdd(weight, value[j], sum[i * kRawVecs + j]);
        }
      }
    }
    for (int i = 0; i < kRows; ++i) {
      float* const to = out + i * out_stride + part * kRawVecs * kLanes;
      for (int j = 0; j < kRawVecs; ++j) hn::StoreU(sum[i * kRawVecs + j], df, to + j * kLanes);
    }
  }
}

template <int kBits>
void ScoreRaw(const ScoreArgs& args) {
  const PagePlan& plan = *args.run.plan;
  for (int b = 0; b < args.run.n_pages * plan.blocks(); ++b) {
    const int p = b / plan.blocks();
    const size_t at = static_cast<size_t>(b % plan.blocks()) * plan.block_bytes;
    const uint8_t* const codes = args.run.pages[p] + at;
    const uint8_t* const next = p + 1 < args.run.n_pages ? args.run.pages[p + 1] + at : codes;
    ForPasses<kRawRows>(args.rows, [&](auto n, int row) HWY_ATTR {
      ScoreRawBlock<kBits, n>(plan.rank, codes, next, args.q + row * args.q_stride, args.q_stride,
                              args.out + row * args.out_stride + b * kBlockTokens, args.out_stride);
    });
  }
}

inline constexpr int kRawRun = 16;  // blocks between two sums over lanes
// Bytes ahead of the values in use that are fetched: a run reads its pages side by side, which is
// more streams than the hardware follows well.
inline constexpr int kAhead = 256;

struct RawRun {
  int n_blocks = 0;
  const uint8_t* codes[kRawRun];
};

// acc[i][c] += sum_t p[i][t] * value[c][t] for channels c, c + 1, .. and kRows rows. Two channels
// at a time share the loads of p and hide the latency of multiply-add. p: [token / kLanes][kRows]
// [kLanes].
template <int kBits, int kRows, int kChannels>
HWY_INLINE void AddRawChannels(const RawRun& run, int c, const float* p, float* acc,
                               int64_t acc_stride) {
  const DF df;
  constexpr int kSums = (kRows * kChannels + 3) / 4 * 4;
  VF sums[kSums];
  for (VF& sum : sums) sum = hn::Zero(df);
  for (int block = 0; block < run.n_blocks; ++block) {
    const uint8_t* const codes = run.codes[block] + c * 4 * kBits;
    hwy::Prefetch(codes + kAhead);
    for (int part = 0; part < kRawParts; ++part, p += kRows * kRawVecs * kLanes) {
      for (int k = 0; k < kChannels; ++k) {
        VF value[kRawVecs];
        LoadRaw<kBits>(codes + k * 4 * kBits, part * kRawVecs * kLanes, value);
        for (int j = 0; j < kRawVecs; ++j) {
          for (int i = 0; i < kRows; ++i) {
            VF& sum = sums[k * kRows + i];
            sum = hn::MulAdd(value[j], hn::Load(df, p + (j * kRows + i) * kLanes), sum);
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

// The rows of one pass: p is copied so that a pass reads it in order and on cache lines.
template <int kBits, int kRows>
void AccumulateRawRun(int rank, const RawRun& run, const float* p, int64_t p_stride, float* acc,
                      int64_t acc_stride) {
  const DF df;
  alignas(64) float tile[kRows * kRawRun * kBlockTokens];
  for (int t = 0; t < run.n_blocks * kBlockTokens; t += kLanes) {
    for (int i = 0; i < kRows; ++i) {
      hn::Store(hn::LoadU(df, p + i * p_stride + t), df, tile + t * kRows + i * kLanes);
    }
  }
  int c = 0;
  for (; c + 2 <= rank; c += 2) AddRawChannels<kBits, kRows, 2>(run, c, tile, acc, acc_stride);
  if (c < rank) AddRawChannels<kBits, kRows, 1>(run, c, tile, acc, acc_stride);
}

template <int kBits>
void AccumulateRaw(const AccumulateArgs& args) {
  const PagePlan& plan = *args.run.plan;
  const int blocks = args.run.n_pages * plan.blocks();
  for (int first = 0; first < blocks; first += kRawRun) {
    RawRun run;
    for (int b = first; b < blocks && b < first + kRawRun; ++b) {
      run.codes[run.n_blocks++] = args.run.pages[b / plan.blocks()] +
                                  static_cast<size_t>(b % plan.blocks()) * plan.block_bytes;
    }
    ForPasses<kRawRows>(args.rows, [&](auto n, int row) HWY_ATTR {
      AccumulateRawRun<kBits, n>(plan.rank, run,
                                 args.p + row * args.p_stride + first * kBlockTokens, args.p_stride,
                                 args.acc + row * args.acc_stride, args.acc_stride);
    });
  }
}

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#endif  // PALU_SRC_KERNELS_RAW_INL_H_
