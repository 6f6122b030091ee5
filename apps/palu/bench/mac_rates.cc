#include "bench/mac_rates.h"

#include <algorithm>
#include <cstdint>

#include "measure.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace palu::app {
namespace {

// Enough to hide a latency of 5 cycles on two pipes; where only an addition of one cycle is in the
// chain, fewer do, and leave registers free.
constexpr int kChains = 12;
constexpr int kShortChains = 8;
constexpr int64_t kSteps = 200000;
constexpr int kRuns = 9;

struct Kernel {
  const char* instruction;
  int chains;
  int macs;  // of one step of one chain
  void (*run)(int64_t steps);
};

// Keeps a value in a register and hides what it is, so that no step can be left out or merged. A
// macro: templates drop the attributes of vector types.
#if defined(__x86_64__)
#define PALU_HIDE(x) asm volatile("" : "+x"(x))
#elif defined(__aarch64__)
#define PALU_HIDE(x) asm volatile("" : "+w"(x))
#else
#define PALU_HIDE(x) asm volatile("" : "+m"(x))
#endif

using Vector4 = float __attribute__((vector_size(16)));

void PlainF32(int64_t steps) {
  Vector4 sums[kChains] = {};
  Vector4 a = {0.5f, 0.5f, 0.5f, 0.5f};
  for (Vector4& sum : sums) PALU_HIDE(sum);  // chains that are known to be equal would be one
  for (int64_t i = 0; i < steps; ++i) {
    for (Vector4& sum : sums) sum = sum * a + a;
    PALU_HIDE(a);
  }
  for (Vector4& sum : sums) PALU_HIDE(sum);
}

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) void Avx2F32(int64_t steps) {
  __m256 sums[kChains] = {};
  __m256 a = _mm256_set1_ps(0.5f);
  for (__m256& sum : sums) PALU_HIDE(sum);  // chains that are known to be equal would be one
  for (int64_t i = 0; i < steps; ++i) {
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, a, a);
    PALU_HIDE(a);
  }
  for (__m256& sum : sums) PALU_HIDE(sum);
}

__attribute__((target("avx2"))) void Avx2I16(int64_t steps) {
  __m256i sums[kShortChains] = {};
  __m256i a = _mm256_set1_epi16(3);
  for (__m256i& sum : sums) PALU_HIDE(sum);  // chains that are known to be equal would be one
  for (int64_t i = 0; i < steps; ++i) {
    for (__m256i& sum : sums) {
      PALU_HIDE(a);  // or one product would serve all chains
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(a, a));
    }
  }
  for (__m256i& sum : sums) PALU_HIDE(sum);
}

__attribute__((target("avx2"))) void Avx2I8(int64_t steps) {
  __m256i sums[kShortChains] = {};
  __m256i a = _mm256_set1_epi8(3);
  for (__m256i& sum : sums) PALU_HIDE(sum);  // chains that are known to be equal would be one
  for (int64_t i = 0; i < steps; ++i) {
    for (__m256i& sum : sums) {
      PALU_HIDE(a);
      sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, a));
    }
  }
  for (__m256i& sum : sums) PALU_HIDE(sum);
}

__attribute__((target("avx512f"))) void Avx512F32(int64_t steps) {
  __m512 sums[kChains] = {};
  __m512 a = _mm512_set1_ps(0.5f);
  for (__m512& sum : sums) PALU_HIDE(sum);  // chains that are known to be equal would be one
  for (int64_t i = 0; i < steps; ++i) {
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, a, a);
    PALU_HIDE(a);
  }
  for (__m512& sum : sums) PALU_HIDE(sum);
}

__attribute__((target("avx512f,avx512vnni"))) void VnniI16(int64_t steps) {
  __m512i sums[kChains] = {};
  __m512i a = _mm512_set1_epi32(0x00030003);
  for (__m512i& sum : sums) PALU_HIDE(sum);  // chains that are known to be equal would be one
  for (int64_t i = 0; i < steps; ++i) {
    for (__m512i& sum : sums) sum = _mm512_dpwssd_epi32(sum, a, a);
    PALU_HIDE(a);
  }
  for (__m512i& sum : sums) PALU_HIDE(sum);
}

__attribute__((target("avx512f,avx512vnni"))) void VnniI8(int64_t steps) {
  __m512i sums[kChains] = {};
  __m512i a = _mm512_set1_epi32(0x03030303);
  for (__m512i& sum : sums) PALU_HIDE(sum);  // chains that are known to be equal would be one
  for (int64_t i = 0; i < steps; ++i) {
    for (__m512i& sum : sums) sum = _mm512_dpbusd_epi32(sum, a, a);
    PALU_HIDE(a);
  }
  for (__m512i& sum : sums) PALU_HIDE(sum);
}

struct Kernels {
  Kernel f32, i16, i8;
};

Kernels BestKernels() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  Kernels best = {{"mulps + addps, 128 bit", kChains, 4, PlainF32}, {}, {}};
  if (avx2) {
    best.f32 = {"vfmadd, 256 bit", kChains, 8, Avx2F32};
    best.i16 = {"vpmaddwd + vpaddd, 256 bit", kShortChains, 16, Avx2I16};
    best.i8 = {"vpmaddubsw + vpaddw, 256 bit", kShortChains, 32, Avx2I8};
  }
  if (avx512) best.f32 = {"vfmadd, 512 bit", kChains, 16, Avx512F32};
  if (vnni) {
    best.i16 = {"vpdpwssd, 512 bit", kChains, 32, VnniI16};
    best.i8 = {"vpdpbusd, 512 bit", kChains, 64, VnniI8};
  }
  return best;
}

#else

struct Kernels {
  Kernel f32, i16, i8;
};

Kernels BestKernels() { return {{"plain loop, 128 bit", kChains, 4, PlainF32}, {}, {}}; }

#endif

MacRate Measure(const Kernel& kernel, int threads) {
  if (kernel.run == nullptr) return {};
  double best = 0;
  for (int run = 0; run < kRuns; ++run) {
    const Timer timer;
    ParallelFor(threads, threads, [&](int64_t) { kernel.run(kSteps); });
    const double macs = static_cast<double>(kSteps) * kernel.chains * kernel.macs * threads;
    best = std::max(best, macs / timer.Seconds() / 1e9);
  }
  return {best, kernel.instruction};
}

}  // namespace

MacRates MeasureMacRates(int threads) {
  const Kernels kernels = BestKernels();
  return {Measure(kernels.f32, threads), Measure(kernels.i16, threads),
          Measure(kernels.i8, threads)};
}

}  // namespace palu::app
