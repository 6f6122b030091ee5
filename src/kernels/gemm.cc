// c = a b (+ c), row major f32: projections, tiles of Q K^T and P V.
//
// One register tile of kTileRows x 2 vectors, k innermost. Every element is one chain of
// multiply-adds over k in order, whatever the sizes of the matrices: results do not depend on how
// the caller cuts m and n.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm.cc"
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

// Sums take kTileRows * 2 of the 32 or 16 registers.
constexpr int kTileRows = PALU_IS_AVX512(HWY_TARGET) || HWY_TARGET == HWY_NEON ? 8 : 6;

// A tile of c: kRows rows, kVecs vectors of columns.
template <int kRows, int kVecs>
HWY_INLINE void Tile(const float* a, int64_t lda, const float* b, int64_t ldb, float* c,
                     int64_t ldc, int k, bool accumulate) {
  const DF df;
  VF sum[kRows][kVecs];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) {
      sum[i][j] = accumulate ? hn::LoadU(df, c + i * ldc + j * kLanes) : hn::Zero(df);
    }
  }
  for (int l = 0; l < k; ++l, b += ldb) {
    VF row[kVecs];
    for (int j = 0; j < kVecs; ++j) row[j] = hn::LoadU(df, b + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const VF weight = hn::Set(df, a[i * lda + l]);
      for (int j = 0; j < kVecs; ++j) sum[i][j] = hn::MulAdd(weight, row[j], sum[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kVecs; ++j) hn::StoreU(sum[i][j], df, c + i * ldc + j * kLanes);
  }
}

// All rows of kVecs vectors of columns.
template <int kVecs>
HWY_INLINE void Columns(const GemmArgs& args, const float* b, int64_t ldb, float* c, int64_t ldc,
                        bool accumulate) {
  int i = 0;
  for (; i + kTileRows <= args.m; i += kTileRows) {
    Tile<kTileRows, kVecs>(args.a + i * args.lda, args.lda, b, ldb, c + i * ldc, ldc, args.k,
                           accumulate);
  }
  const float* a = args.a + i * args.lda;
  c += i * ldc;
  switch (args.m - i) {
    case 1:
      return Tile<1, kVecs>(a, args.lda, b, ldb, c, ldc, args.k, accumulate);
    case 2:
      return Tile<2, kVecs>(a, args.lda, b, ldb, c, ldc, args.k, accumulate);
    case 3:
      return Tile<3, kVecs>(a, args.lda, b, ldb, c, ldc, args.k, accumulate);
    case 4:
      return Tile<4, kVecs>(a, args.lda, b, ldb, c, ldc, args.k, accumulate);
    case 5:
      return Tile<5, kVecs>(a, args.lda, b, ldb, c, ldc, args.k, accumulate);
    case 6:
      return Tile<6, kVecs>(a, args.lda, b, ldb, c, ldc, args.k, accumulate);
    case 7:
      return Tile<7, kVecs>(a, args.lda, b, ldb, c, ldc, args.k, accumulate);
    default:
      return;
  }
}

constexpr int kDepth = 256;         // rows of b in one copy of a panel: 32 KiB at 32 columns
constexpr int kRowsToCopyFor = 64;  // fewer rows do not pay for a copy

// Copies rows [l, l + depth) of `width` columns of b, one after another, each padded with zeros to
// kColumns.
template <int kColumns>
HWY_INLINE void CopyPanel(const GemmArgs& args, int j, int width, int l, int depth, float* to) {
  for (int row = 0; row < depth; ++row, to += kColumns) {
    std::memcpy(to, args.b + (l + row) * args.ldb + j, static_cast<size_t>(width) * sizeof(float));
    for (int column = width; column < kColumns; ++column) to[column] = 0.0f;
  }
}

// Two vectors of columns for many rows of a: rows of b that are a power of two apart would evict
// each other from the L1 cache, so they are copied together first.
void CopiedColumns(const GemmArgs& args, int j) {
  alignas(64) float b[kDepth * 2 * kLanes];
  int l = 0;
  do {
    GemmArgs part = args;
    part.a += l;
    part.k = Least(args.k - l, kDepth);
    CopyPanel<2 * kLanes>(args, j, 2 * kLanes, l, part.k, b);
    Columns<2>(part, b, 2 * kLanes, args.c + j, args.ldc, args.accumulate || l > 0);
    l += kDepth;
  } while (l < args.k);
}

// The last columns, fewer than kVecs vectors: through copies that end with zeros, so that nothing
// outside is touched.
template <int kVecs>
void LastColumns(const GemmArgs& args, int j) {
  constexpr int kColumns = kVecs * kLanes;
  alignas(64) float b[kDepth * kColumns];
  const int width = args.n - j;
  const size_t bytes = static_cast<size_t>(width) * sizeof(float);
  int l = 0;
  do {
    GemmArgs part = args;
    part.a += l;
    part.k = Least(args.k - l, kDepth);
    CopyPanel<kColumns>(args, j, width, l, part.k, b);
    for (int i = 0; i < args.m; i += kTileRows) {
      part.m = Least(args.m - i, kTileRows);
      alignas(64) float c[kTileRows * kColumns] = {};
      float* to = args.c + i * args.ldc + j;
      if (args.accumulate || l > 0) {
        for (int row = 0; row < part.m; ++row) {
          std::memcpy(c + row * kColumns, to + row * args.ldc, bytes);
        }
      }
      Columns<kVecs>(part, b, kColumns, c, kColumns, true);
      for (int row = 0; row < part.m; ++row) {
        std::memcpy(to + row * args.ldc, c + row * kColumns, bytes);
      }
      part.a += kTileRows * args.lda;
    }
    l += kDepth;
  } while (l < args.k);
}

void Gemm(const GemmArgs& args) {
  int j = 0;
  for (; j + 2 * kLanes <= args.n; j += 2 * kLanes) {
    if (args.m >= kRowsToCopyFor) {
      CopiedColumns(args, j);
    } else {
      Columns<2>(args, args.b + j, args.ldb, args.c + j, args.ldc, args.accumulate);
    }
  }
  const int left = args.n - j;
  if (left == kLanes) {
    Columns<1>(args, args.b + j, args.ldb, args.c + j, args.ldc, args.accumulate);
  } else if (left > kLanes) {
    LastColumns<2>(args, j);
  } else if (left > 0) {
    LastColumns<1>(args, j);
  }
}

void AddGemmTarget(KernelTable& table) { table.gemm = Gemm; }

#endif  // PALU_IS_SIMD
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace palu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace palu {
PALU_EXPORT_KERNELS(AddGemm)
}  // namespace palu
#endif
