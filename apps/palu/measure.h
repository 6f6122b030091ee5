// File: measure.h - time and memory of this process.
#ifndef PALU_APPS_MEASURE_H_
#define PALU_APPS_MEASURE_H_

#include <chrono>
#include <cstdint>

namespace palu::app {

class Timer {
 public:
  double Seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

// n / seconds; 0 when nothing was measured.
inline double Rate(int64_t n, double seconds) { return n > 0 && seconds > 0 ? n / seconds : 0; }

// Largest resident set so far, or since ForgetPeakRss.
int64_t PeakRssBytes();
// Lets the peak start anew at what is resident now. False where the system cannot.
bool ForgetPeakRss();

// Memory that a new allocation may take: what is free or can be freed; where the system does not
// say, all there is.
int64_t AvailableBytes();

}  // namespace palu::app

#endif  // PALU_APPS_MEASURE_H_
