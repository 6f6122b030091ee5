// Speed of the kernels of every table: attention over one head's packed pages, matrix products,
// encoding.
//
//   kernels_bench --benchmark_filter='Score|Accumulate'
//
// Attention benchmarks walk `heads` caches of 8,192 tokens in turn: 1 stays in the L2 cache, 64 do
// not. The time is that of one head, which is what a decode step pays per KV head and layer.
// Encode and Decode take one page and one block of rank 64.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <new>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "codec/page_plan.h"
#include "fit/rotated_mean.h"
#include "kernels/kernels.h"

namespace palu {
namespace {

constexpr int kTokens = 8192;
constexpr int kRunPages = 32;

// Floats on cache lines, as callers are to keep rows that kernels read whole vectors of: a 64-byte
// load across two lines counts twice.
template <typename T>
struct OnCacheLines {
  using value_type = T;
  OnCacheLines() = default;
  template <typename U>
  explicit OnCacheLines(const OnCacheLines<U>&) {}
  T* allocate(size_t n) {
    return static_cast<T*>(::operator new (n * sizeof(T), std::align_val_t{64}));
  }
  void deallocate(T* p, size_t) { ::operator delete (p, std::align_val_t{64}); }
  bool operator==(const OnCacheLines&) const { return true; }
};
using Floats = std::vector<float, OnCacheLines<float>>;

Floats Normal(size_t n) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Floats x(n);
  for (float& v : x) v = normal(random);
  return x;
}

struct Mix {
  const char* name;
  std::vector<uint8_t> bits;
  ScaleFormat scales;
  int group_size;
};

std::vector<uint8_t> Bits(int rank, int n_first, int first, int rest) {
  std::vector<uint8_t> bits(static_cast<size_t>(rank), static_cast<uint8_t>(rest));
  std::fill(bits.begin(), bits.begin() + n_first, static_cast<uint8_t>(first));
  return bits;
}

// What water-filling gives at 3 bits on average: few channels of many bits.
std::vector<uint8_t> Graded() {
  std::vector<uint8_t> bits;
  const std::pair<int, int> runs[] = {{6, 4}, {4, 16}, {3, 22}, {2, 16}, {1, 5}};
  for (const auto& [b, n] : runs) bits.insert(bits.end(), n, static_cast<uint8_t>(b));
  return bits;
}

const std::vector<Mix>& Mixes() {
  static const std::vector<Mix> mixes = {
      {"3bit", Bits(64, 64, 3, 3), ScaleFormat::kLog8, 32},
      {"4/2bit", Bits(64, 16, 4, 2), ScaleFormat::kMinMax, 32},
      {"r32-4/2bit", Bits(32, 8, 4, 2), ScaleFormat::kLog8, 32},
      {"4bit", Bits(64, 64, 4, 4), ScaleFormat::kLog8, 32},
      {"graded3", Graded(), ScaleFormat::kLog8, 32},
      {"4bit-g128", Bits(64, 64, 4, 4), ScaleFormat::kMinMax, 128},
      {"8bit", Bits(64, 64, 8, 8), ScaleFormat::kMinMax, 32},
      {"fp16", Bits(64, 64, 16, 16), ScaleFormat::kMinMax, 32},
      {"fp32", Bits(64, 64, 32, 32), ScaleFormat::kMinMax, 32},
      {"3bit-g8", Bits(64, 64, 3, 3), ScaleFormat::kMinMax, 8},
  };
  return mixes;
}

// `heads` caches of kTokens tokens.
struct Caches {
  PagePlan plan;
  std::vector<std::vector<uint8_t>> memory;
  std::vector<std::vector<const uint8_t*>> pages;

  Caches(const Mix& mix, int heads, CodeOrder order)
      : plan(PagePlan::Make(mix.bits, mix.scales, mix.group_size, 0, order)) {
    const auto x = Normal(static_cast<size_t>(plan.rank) * plan.page_tokens);
    std::vector<uint8_t> page(plan.page_bytes());
    Reference().encode_page(plan, x.data(), plan.page_tokens, page.data());
    const size_t n = static_cast<size_t>(kTokens / plan.page_tokens);
    const size_t stride = (plan.page_bytes() + 3) / 4 * 4;
    memory.resize(static_cast<size_t>(heads));
    pages.resize(static_cast<size_t>(heads));
    for (size_t h = 0; h < memory.size(); ++h) {
      memory[h].resize(n * stride + kReadPadding);
      for (size_t p = 0; p < n; ++p) {
        std::copy(page.begin(), page.end(), memory[h].begin() + p * stride);
        pages[h].push_back(memory[h].data() + p * stride);
      }
    }
  }
};

void Report(benchmark::State& state, const PagePlan& plan) {
  const double bytes = static_cast<double>(plan.page_bytes()) * kTokens / plan.page_tokens;
  state.SetBytesProcessed(static_cast<int64_t>(bytes) * state.iterations());
}

void Score(benchmark::State& state, const KernelTable& kernels, const Mix& mix, int rows, int heads,
           bool fast) {
  const Caches caches(mix, heads, CodeOrder::kForScores);
  const int rank = caches.plan.rank;
  const auto q = Normal(static_cast<size_t>(rows) * rank);
  Floats out(static_cast<size_t>(rows) * kTokens);
  Floats scratch(ScoreScratch(caches.plan, rows));
  size_t head = 0;
  for (auto _ : state) {
    const auto& pages = caches.pages[head];
    head = (head + 1) % caches.pages.size();
    for (size_t p = 0; p < pages.size(); p += kRunPages) {
      const int n = static_cast<int>(std::min<size_t>(kRunPages, pages.size() - p));
      kernels.score({.run = {&caches.plan, pages.data() + p, n},
                     .q = q.data(),
                     .q_stride = rank,
                     .rows = rows,
                     .out = out.data() + p * caches.plan.page_tokens,
                     .out_stride = kTokens,
                     .fast = fast,
                     .scratch = scratch.data()});
    }
    benchmark::ClobberMemory();
  }
  Report(state, caches.plan);
}

void Accumulate(benchmark::State& state, const KernelTable& kernels, const Mix& mix, int rows,
                int heads, bool fast) {
  const Caches caches(mix, heads, CodeOrder::kForSums);
  const int rank = caches.plan.rank;
  const auto weights = Normal(static_cast<size_t>(rows) * kTokens);
  Floats acc(static_cast<size_t>(rows) * rank);
  Floats scratch(AccumulateScratch(caches.plan, rows));
  size_t head = 0;
  for (auto _ : state) {
    const auto& pages = caches.pages[head];
    head = (head + 1) % caches.pages.size();
    for (size_t p = 0; p < pages.size(); p += kRunPages) {
      const int n = static_cast<int>(std::min<size_t>(kRunPages, pages.size() - p));
      kernels.accumulate({.run = {&caches.plan, pages.data() + p, n},
                          .p = weights.data() + p * caches.plan.page_tokens,
                          .p_stride = kTokens,
                          .rows = rows,
                          .acc = acc.data(),
                          .acc_stride = rank,
                          .fast = fast,
                          .scratch = scratch.data()});
    }
    benchmark::ClobberMemory();
  }
  Report(state, caches.plan);
}

// Rotated means of one head's 32 planes (RoPE's frequencies of base 10,000) over 1,024 tokens.
void WaveScores(benchmark::State& state, const KernelTable& kernels, int rows) {
  constexpr int kPlanes = 32, kRun = kWaveBlocks * kWaveBlock;
  std::vector<float> frequencies;
  for (int i = 0; i < kPlanes; ++i) frequencies.push_back(std::pow(1e4f, -1.0f * i / kPlanes));
  Waves waves;
  waves.Prepare(frequencies);
  const Floats q = Normal(static_cast<size_t>(rows) * 2 * kPlanes);
  Floats out(static_cast<size_t>(rows) * kRun);
  for (auto _ : state) {
    std::fill(out.begin(), out.end(), 0.0f);
    kernels.wave_scores({.plan = &waves.plan(),
                         .q = q.data(),
                         .rows = rows,
                         .n_blocks = kWaveBlocks,
                         .out = out.data(),
                         .out_stride = kRun});
    benchmark::ClobberMemory();
  }
}

void Gemm(benchmark::State& state, const KernelTable& kernels, int m, int n, int k) {
  const auto a = Normal(static_cast<size_t>(m) * k), b = Normal(static_cast<size_t>(k) * n);
  Floats c(static_cast<size_t>(m) * n);
  for (auto _ : state) {
    kernels.gemm({.a = a.data(),
                  .lda = k,
                  .b = b.data(),
                  .ldb = n,
                  .c = c.data(),
                  .ldc = n,
                  .m = m,
                  .n = n,
                  .k = k});
    benchmark::ClobberMemory();
  }
  state.counters["GFLOP/s"] = benchmark::Counter(
      2e-9 * m * n * k * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
}

void Encode(benchmark::State& state, const KernelTable& kernels, const Mix& mix) {
  const PagePlan plan = PagePlan::Make(mix.bits, mix.scales, mix.group_size);
  const auto x = Normal(static_cast<size_t>(plan.rank) * plan.page_tokens);
  std::vector<uint8_t> page(plan.page_bytes());
  for (auto _ : state) {
    kernels.encode_page(plan, x.data(), plan.page_tokens, page.data());
    benchmark::ClobberMemory();
  }
  state.SetItemsProcessed(plan.page_tokens * state.iterations());
}

void Decode(benchmark::State& state, const KernelTable& kernels, const Mix& mix, bool tokens) {
  const Caches caches(mix, 1, tokens ? CodeOrder::kForSums : CodeOrder::kForScores);
  const PagePlan& plan = caches.plan;
  Floats out(static_cast<size_t>(plan.rank) * kBlockTokens);
  for (auto _ : state) {
    if (tokens) {
      kernels.decode_block_tokens(plan, caches.pages[0][0], 0, out.data(), plan.rank);
    } else {
      kernels.decode_block(plan, caches.pages[0][0], 0, out.data());
    }
    benchmark::ClobberMemory();
  }
}

void ExpSum(benchmark::State& state, const KernelTable& kernels) {
  Floats x = Normal(1024), y(1024);
  for (auto _ : state) {
    y = x;
    benchmark::DoNotOptimize(kernels.exp_sum(y.data(), 1024, 4.0f));
  }
  state.SetItemsProcessed(1024 * state.iterations());
}

void RegisterAll() {
  for (const KernelTable* kernels : AllKernels()) {
    const std::string target = std::string("/") + kernels->name;
    if (kernels == &Reference()) continue;  // hundreds of times slower
    for (const Mix& mix : Mixes()) {
      for (const int rows : {1, 3, 8}) {
        for (const int heads : {1, 64}) {
          for (const bool fast : {false, true}) {
            const std::string name = target + "/" + mix.name + "/rows:" + std::to_string(rows) +
                                     "/heads:" + std::to_string(heads) + (fast ? "/fast" : "");
            benchmark::RegisterBenchmark(("Score" + name).c_str(), Score, *kernels, mix, rows,
                                         heads, fast)
                ->Unit(benchmark::kMicrosecond);
            benchmark::RegisterBenchmark(("Accumulate" + name).c_str(), Accumulate, *kernels, mix,
                                         rows, heads, fast)
                ->Unit(benchmark::kMicrosecond);
          }
        }
      }
      benchmark::RegisterBenchmark(("Encode" + target + "/" + mix.name).c_str(), Encode, *kernels,
                                   mix)
          ->Unit(benchmark::kMicrosecond);
      benchmark::RegisterBenchmark(("Decode" + target + "/" + mix.name).c_str(), Decode, *kernels,
                                   mix, false)
          ->Unit(benchmark::kMicrosecond);
      benchmark::RegisterBenchmark(("DecodeTokens" + target + "/" + mix.name).c_str(), Decode,
                                   *kernels, mix, true)
          ->Unit(benchmark::kMicrosecond);
    }
    const int shapes[][3] = {{192, 256, 64}, {192, 64, 256},  {32, 64, 64},  {3, 64, 64},
                             {512, 64, 64},  {256, 128, 128}, {192, 50, 256}};
    for (const auto& [m, n, k] : shapes) {
      const std::string name = target + "/m:" + std::to_string(m) + "/n:" + std::to_string(n) +
                               "/k:" + std::to_string(k);
      benchmark::RegisterBenchmark(("Gemm" + name).c_str(), Gemm, *kernels, m, n, k)
          ->Unit(benchmark::kMicrosecond);
    }
    benchmark::RegisterBenchmark(("WaveScores" + target + "/rows:3").c_str(), WaveScores, *kernels,
                                 3)
        ->Unit(benchmark::kMicrosecond);
    benchmark::RegisterBenchmark(("ExpSum" + target).c_str(), ExpSum, *kernels)
        ->Unit(benchmark::kMicrosecond);
  }
}

// Runs before the main of Google Benchmark, which knows only registered benchmarks.
const bool registered = (RegisterAll(), true);

}  // namespace
}  // namespace palu
