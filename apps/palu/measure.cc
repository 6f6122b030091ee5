#include "measure.h"

#include <sys/resource.h>

namespace palu::app {

int64_t PeakRssBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
#ifdef __APPLE__
  return usage.ru_maxrss;  // bytes there
#else
  return int64_t{usage.ru_maxrss} * 1024;
#endif
}

}  // namespace palu::app
