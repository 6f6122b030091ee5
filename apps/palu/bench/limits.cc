#include "bench/limits.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

#include "measure.h"
#include "parallel.h"
#include "sizes.h"

namespace palu::app {
namespace {

constexpr int kPasses = 5;
constexpr int64_t kSlice = 1 << 20;  // bytes of one task

int64_t LastCacheBytes() {
#ifdef _SC_LEVEL3_CACHE_SIZE
  return std::max<int64_t>(0, sysconf(_SC_LEVEL3_CACHE_SIZE));
#else
  return 0;
#endif
}

int64_t ReadBlockBytes() {
  const int64_t wanted = std::max<int64_t>(512 << 20, 4 * LastCacheBytes());
  const int64_t bytes = std::min(wanted, AvailableBytes() / 4);
  return std::max(kSlice, bytes / kSlice * kSlice);
}

// Many sums, so that the additions never wait for each other; compilers make vector code of it.
uint64_t Sum(const uint64_t* x, int64_t n) {
  std::array<uint64_t, 32> sums{};
  for (int64_t i = 0; i < n; i += 32) {
    for (int64_t j = 0; j < 32; ++j) sums[j] += x[i + j];
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) sum += part;
  return sum;
}

double ReadGbPerSecond(int64_t bytes, int threads) {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  const std::unique_ptr<uint64_t, Free> block(
      static_cast<uint64_t*>(std::aligned_alloc(4096, bytes)));
  if (block == nullptr) throw std::bad_alloc();
  const int64_t slices = bytes / kSlice, words = kSlice / 8;
  ParallelFor(slices, threads,
              [&](int64_t i) { std::fill_n(block.get() + i * words, words, uint64_t{1}); });
  std::atomic<uint64_t> total{0};  // or nothing would be read
  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    const Timer timer;
    ParallelFor(slices, threads, [&](int64_t i) { total += Sum(block.get() + i * words, words); });
    best = std::max(best, static_cast<double>(bytes) / timer.Seconds() / 1e9);
  }
  return total > 0 ? best : 0;
}

std::string RateText(const char* name, const MacRate& rate) {
  if (rate.gmac_s == 0) return fmt::format("  {} not measured on this CPU\n", name);
  return fmt::format("  {} {:>7.1f} G multiply-adds/s ({})\n", name, rate.gmac_s, rate.instruction);
}

nlohmann::ordered_json RateJson(const MacRate& rate) {
  if (rate.gmac_s == 0) return nullptr;
  return {{"gmac_s", rate.gmac_s}, {"instruction", rate.instruction}};
}

}  // namespace

MachineLimits MeasureLimits(int threads) {
  MachineLimits limits;
  limits.read_bytes = ReadBlockBytes();
  limits.read_gb_s = ReadGbPerSecond(limits.read_bytes, threads);
  limits.macs = MeasureMacRates(threads);
  return limits;
}

std::string ToText(const MachineLimits& limits, int threads) {
  return fmt::format("limits of this machine, {} thread{}\n", threads, threads == 1 ? "" : "s") +
         fmt::format("  read  {:>6.1f} GB/s (sum over {})\n", limits.read_gb_s,
                     FormatBytes(limits.read_bytes)) +
         RateText("f32  ", limits.macs.f32) + RateText("int16", limits.macs.i16) +
         RateText("int8 ", limits.macs.i8);
}

nlohmann::ordered_json ToJson(const MachineLimits& limits) {
  return {{"read_gb_s", limits.read_gb_s},
          {"read_bytes", limits.read_bytes},
          {"f32", RateJson(limits.macs.f32)},
          {"int16", RateJson(limits.macs.i16)},
          {"int8", RateJson(limits.macs.i8)}};
}

}  // namespace palu::app
