#include "measure.h"

#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <limits>
#include <string>

namespace palu::app {
namespace {

// A line "NAME:  N kB" of a file of the kernel; -1 when there is none.
int64_t KernelFigure(const char* file, const std::string& name) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  }
  return -1;
}

}  // namespace

int64_t PeakRssBytes() {
  // Not what getrusage says first: that also counts the program that started this one.
  const int64_t peak = KernelFigure("/proc/self/status", "VmHWM");
  if (peak >= 0) return peak;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
  return usage.ru_maxrss;  // bytes there
#else
  return int64_t{usage.ru_maxrss} * 1024;
#endif
}

bool ForgetPeakRss() {
  std::ofstream out("/proc/self/clear_refs");
  out << "5" << std::flush;
  return out.good();
}

int64_t AvailableBytes() {
  const int64_t available = KernelFigure("/proc/meminfo", "MemAvailable");
  if (available >= 0) return available;
  const int64_t pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
  return pages > 0 && page > 0 ? pages * page : std::numeric_limits<int64_t>::max();
}

}  // namespace palu::app
