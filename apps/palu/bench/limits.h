// File: limits.h - what the machine can do at best, to hold measured kernels against.
#ifndef PALU_APPS_BENCH_LIMITS_H_
#define PALU_APPS_BENCH_LIMITS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "bench/mac_rates.h"

namespace palu::app {

struct MachineLimits {
  double read_gb_s = 0;    // memory reads of all threads together, 1e9 bytes a second
  int64_t read_bytes = 0;  // of the block that was read, larger than the caches
  MacRates macs;
};

// Cost: about a second, and memory of four times the last cache, at least 512 MiB and at most a
// quarter of what is free.
MachineLimits MeasureLimits(int threads);

std::string ToText(const MachineLimits& limits, int threads);
nlohmann::ordered_json ToJson(const MachineLimits& limits);

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_LIMITS_H_
