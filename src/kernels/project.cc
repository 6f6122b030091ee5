// Queries into latent space and latents back, through a basis of fp16 rows: few rows of x, so the
// basis is read once for all of them and nothing is transposed or converted ahead.
//
// An element of Project is the sum over lanes of one chain of multiply-adds, an element of Expand
// one chain over the channels in order: results do not depend on how the caller cuts the rows.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/project.cc"
// clang-format off
#include "kernels/targets.h"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
// clang-format on

#include "kernels/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace palu {
namespace HWY_NAMESPACE {
namespace {
#if PALU_IS_SIMD(HWY_TARGET)

constexpr bool kManyRegisters = PALU_IS_AVX512(HWY_TARGET) || HWY_TARGET == HWY_NEON;
constexpr int kTileRows = kManyRegisters ? 4 : 2;
constexpr int kTileChannels = 4;                   // of Project: one SumsOfLanes
constexpr int kTileVecs = kManyRegisters ? 4 : 2;  // of Expand

// The first n (1..kLanes) halves; the rest is zero and not read.
HWY_INLINE VF LoadFirstF16(const uint16_t* from, int n) {
  if (n >= kLanes) return LoadF16(from);
  alignas(64) uint16_t halves[kLanes] = {};
  std::memcpy(halves, from, static_cast<size_t>(n) * sizeof(uint16_t));
  return LoadF16(halves);
}

// Channels [first, first + 4) of kRows rows.
template <int kRows>
HWY_INLINE void ProjectTile(const BasisArgs& args, int row, int first) {
  const DF df;
  const hn::CappedTag<float, 4> d4;
  const int n = Least(kTileChannels, args.rank - first);
  const uint16_t* const basis = args.basis + first * args.stride;
  const float* const x = args.x + row * args.x_stride;
  VF sum[kRows][kTileChannels];
  for (auto& of_row : sum) {
    for (VF& s : of_row) s = hn::Zero(df);
  }
  const auto add = [&](int d, auto load_basis, auto load_x) HWY_ATTR {
    VF in[kRows];
    for (int i = 0; i < kRows; ++i) in[i] = load_x(x + i * args.x_stride + d);
    for (int c = 0; c < kTileChannels; ++c) {
      // Channels past the last repeat it and are dropped.
      const VF b = load_basis(basis + Least(c, n - 1) * args.stride + d);
      for (int i = 0; i < kRows; ++i) sum[i][c] = hn::MulAdd(in[i], b, sum[i][c]);
    }
  };
  int d = 0;
  for (; d + kLanes <= args.dim; d += kLanes) {
    add(
        d, [](const uint16_t* from) HWY_ATTR { return LoadF16(from); },
        [&](const float* from) HWY_ATTR { return hn::LoadU(df, from); });
  }
  if (const int left = args.dim - d; left > 0) {
    add(
        d, [&](const uint16_t* from) HWY_ATTR { return LoadFirstF16(from, left); },
        [&](const float* from) HWY_ATTR { return LoadFirst(from, left); });
  }
  for (int i = 0; i < kRows; ++i) {
    alignas(16) float totals[kTileChannels];
    hn::Store(SumsOfLanes(sum[i]), d4, totals);
    float* const to = args.out + (row + i) * args.out_stride + first;
    for (int c = 0; c < n; ++c) to[c] = totals[c];
  }
}

void Project(const BasisArgs& args) {
  ForPasses<kTileRows>(args.rows, [&](auto n, int row) HWY_ATTR {
    for (int c = 0; c < args.rank; c += kTileChannels) ProjectTile<n>(args, row, c);
  });
}

// Dimensions [d, d + kVecs * kLanes) of kRows rows; with kVecs = 1 only `left` of them.
template <int kRows, int kVecs>
HWY_INLINE void ExpandTile(const BasisArgs& args, int row, int d, int left) {
  const DF df;
  float* const out = args.out + row * args.out_stride + d;
  const float* const x = args.x + row * args.x_stride;
  VF sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) {
      const float* const from = out + i * args.out_stride + j * kLanes;
      sum[i][j] = kVecs == 1 ? LoadFirst(from, left) : hn::LoadU(df, from);
    }
  }
  const uint16_t* basis = args.basis + d;
  for (int c = 0; c < args.rank; ++c, basis += args.stride) {
    VF b[kVecs];
    for (int j = 0; j < kVecs; ++j) {
      b[j] = kVecs == 1 ? LoadFirstF16(basis, left) : LoadF16(basis + j * kLanes);
    }
    for (int i = 0; i < kRows; ++i) {
      const VF weight = hn::Set(df, x[i * args.x_stride + c]);
      for (int j = 0; j < kVecs; ++j) sum[i][j] = hn::MulAdd(weight, b[j], sum[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) {
      float* const to = out + i * args.out_stride + j * kLanes;
      kVecs == 1 ? StoreFirst(sum[i][j], to, left) : hn::StoreU(sum[i][j], df, to);
    }
  }
}

void Expand(const BasisArgs& args) {
  constexpr int kStep = kTileVecs * kLanes;
  ForPasses<kTileRows>(args.rows, [&](auto n, int row) HWY_ATTR {
    int d = 0;
    for (; d + kStep <= args.dim; d += kStep) ExpandTile<n, kTileVecs>(args, row, d, kStep);
    for (; d < args.dim; d += kLanes) ExpandTile<n, 1>(args, row, d, Least(kLanes, args.dim - d));
  });
}

void AddProjectTarget(KernelTable& table) {
  table.project = Project;
  table.expand = Expand;
}

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace palu {
PALU_EXPORT_KERNELS(AddProject)
}  // namespace palu
#endif
