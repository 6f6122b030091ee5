// File: mac_rates.h - how many multiply-adds a second this machine can do, by the width of the
// numbers: what a kernel that waits for nothing would reach.
#ifndef PALU_APPS_BENCH_MAC_RATES_H_
#define PALU_APPS_BENCH_MAC_RATES_H_

#include <string>

namespace palu::app {

struct MacRate {
  double gmac_s = 0;        // multiply-adds, 1e9 a second, all threads; 0 = there is no way to know
  std::string instruction;  // what was run
};

struct MacRates {
  MacRate f32, i16, i8;
};

// Independent chains of the best instruction that the CPU has, on registers only; best of several
// runs. Cost: about 0.1 s. On CPUs other than x86 only f32, by what the compiler makes of a loop.
MacRates MeasureMacRates(int threads);

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_MAC_RATES_H_
