// File: self_process.h - this program again, in a process of its own.
#ifndef PALU_APPS_BENCH_SELF_PROCESS_H_
#define PALU_APPS_BENCH_SELF_PROCESS_H_

#include <string>
#include <vector>

namespace palu::app {

struct SelfResult {
  int code = 0;  // exit code, or 128 + the signal that ended it, as shells report it
  std::string out;
};

// Runs the program with these arguments to its end. Its standard error is ours; Ctrl-C
// ends it. Errors: StateError (it cannot be started).
SelfResult RunSelf(const std::vector<std::string>& arguments);

}  // namespace palu::app

#endif  // PALU_APPS_BENCH_SELF_PROCESS_H_
