// File: kernels.h - every inner loop of the library, in one table of functions per implementation.
//
// `Reference()` is plain C++ that reads like the formulas; `Active()` is the Highway build for this
// CPU (or the one that PALU_TARGET names). Both take the same arguments; tests run every target
// against the reference. Threads: all functions are safe to call at once on different outputs; none
// allocates.
#ifndef PALU_SRC_KERNELS_KERNELS_H_
#define PALU_SRC_KERNELS_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/wave_plan.h"
#include "codec/page_plan.h"

namespace palu {

inline constexpr int kMaxFusedRows = 8;  // query rows that Score and Accumulate take at once
inline constexpr int kFusedBlocks = 8;   // blocks that they prepare together

// One side (K or V) of one KV head: a run of pages anywhere in memory.
struct PageRun {
  const PagePlan* plan = nullptr;
  const uint8_t* const* pages =
      nullptr;  // [n_pages], each plan->page_bytes() long: codes, then scales
  int n_pages = 0;
};

struct ScoreArgs {
  PageRun run;
  const float* q = nullptr;  // [rows][q_stride] queries in latent space, scale already applied
  int64_t q_stride = 0;
  int rows = 0;  // 1..kMaxFusedRows
  float* out =
      nullptr;  // [rows][out_stride], tokens of the run: n_pages * page_tokens of them are written
  int64_t out_stride = 0;
  bool fast = false;         // integers of 8 bits where this target multiplies four at a time
  float* scratch = nullptr;  // [ScoreScratch()]
};

// Floats that Score needs.
inline size_t ScoreScratch(const PagePlan& plan, int rows) {
  return static_cast<size_t>((2 + kFusedBlocks) * rows) *
         static_cast<size_t>(plan.slots + kChannelPadding);
}

struct AccumulateArgs {
  PageRun run;
  const float* p = nullptr;  // [rows][p_stride] weights of the run's tokens
  int64_t p_stride = 0;
  int rows = 0;          // 1..kMaxFusedRows
  float* acc = nullptr;  // [rows][acc_stride] += sum_t p_t * latent_t, [rank] used
  int64_t acc_stride = 0;
  bool fast = false;         // as in ScoreArgs
  float* scratch = nullptr;  // [AccumulateScratch()]
};

// Floats that Accumulate needs.
inline size_t AccumulateScratch(const PagePlan& plan, int rows) {
  return static_cast<size_t>((2 + rows) * kFusedBlocks + 5 * rows) *
         static_cast<size_t>(plan.slots + kChannelPadding);
}

// Scores of a rotated mean: wave_plan.h.
struct WaveArgs {
  const WavePlan* plan = nullptr;
  const float* q = nullptr;  // [rows][2 planes]: A, then B, at the run's first token
  int rows = 0;
  int n_blocks = 0;      // of 32 tokens, 0..kWaveBlocks
  float* out = nullptr;  // [rows][out_stride] += score, 32 * n_blocks of them
  int64_t out_stride = 0;
};

struct GemmArgs {  // c[m, n] = (accumulate ? c : 0) + a[m, k] * b[k, n], f32, row major
  const float* a = nullptr;
  int64_t lda = 0;
  const float* b = nullptr;
  int64_t ldb = 0;
  float* c = nullptr;
  int64_t ldc = 0;
  int m = 0, n = 0, k = 0;  // any sizes >= 0; reads and writes stay inside the matrices
  bool accumulate = false;
};

// Few rows and a basis of latents: [rank] rows of [dim] halves, `stride` apart. Any sizes >= 0.
struct BasisArgs {
  const uint16_t* basis = nullptr;
  int64_t stride = 0;
  int rank = 0, dim = 0;
  const float* x = nullptr;  // [rows][x_stride]: vectors of dim, or latents of rank
  int64_t x_stride = 0;
  int rows = 0;
  float* out = nullptr;  // [rows][out_stride]: the other of the two
  int64_t out_stride = 0;
};

struct KernelTable {
  const char* name;    // "reference", "AVX2", "AVX3", ...
  bool byte_products;  // `fast` has an effect

  // out[i][t] = q[i] . latent_t for every token of the run. Packed codes meet integers: score.cc
  // states the error.
  void (*score)(const ScoreArgs&);
  // acc[i] += sum_t p[i][t] * latent_t. The same holds for accumulate.cc.
  void (*accumulate)(const AccumulateArgs&);
  void (*wave_scores)(const WaveArgs&);
  // Block `block` (32 tokens) of one page as f32 latents: out[channel * 32 + token].
  void (*decode_block)(const PagePlan&, const uint8_t* page, int block, float* out);
  // The same, token major: out[token * out_stride + channel].
  void (*decode_block_tokens)(const PagePlan&, const uint8_t* page, int block, float* out,
                              int64_t out_stride);
  // Packs one page. x: f32 latents, x[channel * x_stride + token], page_tokens of them. page:
  // page_bytes() are written.
  void (*encode_page)(const PagePlan&, const float* x, int64_t x_stride, uint8_t* page);
  void (*gemm)(const GemmArgs&);
  // out[i][c] = sum_d x[i][d] basis[c][d].
  void (*project)(const BasisArgs&);
  // out[i][d] += sum_c x[i][c] basis[c][d].
  void (*expand)(const BasisArgs&);
  // x[i] = exp(x[i] - max) for i < n; returns their sum. -inf gives 0. max is finite.
  float (*exp_sum)(float* x, int64_t n, float max);
  // Largest of x[0, n), -inf when n = 0.
  float (*max)(const float* x, int64_t n);
  // x = cap * tanh(x / cap).
  void (*soft_cap)(float* x, int64_t n, float cap);
  // fp16 <-> f32 (round to nearest even), any alignment of 2 and 4 bytes.
  void (*f16_to_f32)(const uint16_t* x, float* out, int64_t n);
  void (*f32_to_f16)(const float* x, uint16_t* out, int64_t n);
  // Index of the first value that is NaN or whose magnitude is above `limit`, or -1.
  int64_t (*find_bad)(const float* x, int64_t n, float limit);
};

const KernelTable& Reference();
const KernelTable& Active();  // throws ConfigError when PALU_TARGET names no usable target
std::vector<const KernelTable*> AllKernels();  // Reference() and every target this CPU can run

}  // namespace palu

#endif  // PALU_SRC_KERNELS_KERNELS_H_
